"""kill -9 at any step, --ckpt_path last, and the run continues as if nothing had happened: bit for bit."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.runs.checkpoints import check_checkpoint
from tests.cli.test_errors import complaint
from tests.helpers import TINY, assert_same, assert_same_runs, fit, inside, load, output, read_log, run_forked, slow, untimed
from tests.model.mechanisms import MECHANISMS

ROOT = Path(__file__).parents[1]
MODERN = ["--config", str(ROOT / "conf/model/modern.yaml"), "--trainer.callbacks+", "Averaging"]
# 20 rows of 32 tokens make some 30 batches of 4 an epoch: kills fall in the middle of it and of an accumulation.
CASES = {
    "accumulate": ["--trainer.accumulate_grad_batches", "3"],
    "workers, whole words, bf16": [
        "--data.num_workers", "2", "--data.whole_word", "true", "--trainer.precision", "bf16-mixed",
    ],
    "modern, many passes": [*MODERN, "--data.batch_size", "64"],
    "modern, two processes": [
        *MODERN, "--trainer.strategy", "ddp_fork", "--trainer.devices", "2",
        "--trainer.accumulate_grad_batches", "2", "--model.encoder.attention", "lookup", "--model.encoder.sharing", "none",
    ],
    "two processes, workers, accumulate": [
        "--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.num_workers", "2",
        "--trainer.accumulate_grad_batches", "2",
    ],
}  # fmt: skip
QUICK = ("accumulate",)


@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_killed_run_resumes_bit_for_bit(case, tiny, tmp_path):
    extra = CASES[case]
    accumulate = int(dict(zip(extra[::2], extra[1::2], strict=True)).get("--trainer.accumulate_grad_batches", 1))
    assert fit(tiny, "whole", tmp_path / "whole", *extra) == 0
    # After the checkpoint at step 5, and again after the one at step 10, in the middle of an accumulation.
    assert fit(tiny, "killed", tmp_path / "killed", *extra, kill_at=7 * accumulate - 1) == -9
    assert fit(tiny, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last", kill_at=11 * accumulate) == -9
    assert fit(tiny, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "killed", processes=2 if "two" in case else 1)
    assert len(read_log(tmp_path / "whole.0")) == 12 * accumulate
    whole = load(tmp_path / "runs/whole/checkpoints/last.ckpt")
    assert ("training_weights" in whole) == ("modern" in case)  # then state_dict holds averages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long-short", "lsh"])  # most settings; drawn numbers. Others: model/test_encoder.py
def test_a_mechanism_resumes_bit_for_bit(name, tiny, tmp_path):
    settings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in MECHANISMS[name].items()}
    words = [word for key, value in settings.items() for word in (f"--model.encoder.{key}", value)]
    assert fit(tiny, "whole", tmp_path / "whole", *words) == 0
    assert fit(tiny, "killed", tmp_path / "killed", *words, kill_at=8) == -9
    assert fit(tiny, "killed", tmp_path / "killed", *words, "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "killed")


@pytest.mark.slow
def test_kills_between_steps_that_are_all_saved_resume(tiny, tmp_path):
    tiny = [*tiny, "--last.every_n_steps", "1", "--trainer.max_steps", "6"]
    assert fit(tiny, "whole", tmp_path / "whole") == 0
    for step in (2, 5):
        assert fit(tiny, f"killed{step}", tmp_path / f"killed{step}", kill_at=step) == -9
        assert fit(tiny, f"killed{step}", tmp_path / f"killed{step}", "--ckpt_path", "last") == 0
        assert_same_runs(tmp_path, "whole", f"killed{step}")


def test_another_seed_another_curve(put, tiny, tmp_path):
    """The same seed, the same curve: test_perplexity_file_and_tensorboard_of_a_resumed_run_are_those_of_a_whole_one."""
    put("a")
    assert fit(tiny, "b", tmp_path / "b", "--seed_everything", "4", "--trainer.max_steps", "1") == 0
    a, b = (read_log(tmp_path / f"{name}.0")[1] for name in "ab")
    assert a["lr"] == b["lr"] and a["inputs"] != b["inputs"] and a["loss"] != b["loss"]


def test_command_line_wins_on_resume_and_says_so(tiny, tmp_path):
    log = tmp_path / "run"
    constant = [*tiny, "--model.schedule", "constant", "--model.warmup_steps", "0"]
    assert fit(constant, "run", log, "--trainer.max_steps", "5") == 0
    changes = ["--model.lr", "0.003", "--model.weight_decay", "0.5", "--trainer.max_steps", "9"]
    checkpoint = tmp_path / "runs/run/checkpoints/last.ckpt"  # as a path: Lightning's own CLI would restore the old lr then
    assert fit(constant, "run", log, *changes, "--ckpt_path", str(checkpoint)) == 0
    lines = read_log(tmp_path / "run.0")
    assert [line["lr"] for line in lines.values()] == [0.01] * 5 + [0.003] * 4
    groups = {group["name"]: group for group in load(checkpoint)["optimizer_states"][0]["param_groups"]}
    assert groups["decay"]["weight_decay"] == 0.5 and groups["no_decay"]["weight_decay"] == 0.0
    shown = log.with_suffix(".out").read_text()
    for announced in ("resuming at step 5", "model.lr: 0.01 → 0.003", "trainer.max_steps: 5 → 9"):
        assert announced in shown


def test_a_warm_up_longer_than_training_is_told(tiny, tmp_path):
    short = ["fit", *tiny, "--trainer.max_steps", "3", "--model.warmup_steps", "9"]
    told = "warning: training ends after 3 steps, within a warm-up of 9: the learning rate rises to 0.3 of model.lr"
    assert output(short, tmp_path).count(told) == 1
    assert "warm-up" not in output([*short, "--model.warmup_steps", "2", "--name", "other"], tmp_path)


@pytest.mark.parametrize(
    "change",
    [["--trainer.accumulate_grad_batches", "2"], slow(["--data.batch_size", "32"]), slow(["--data.batch_size", "8"])],
    ids=" ".join,
)
def test_a_run_continues_with_other_rows_a_step(change, tiny, tmp_path):
    """Each step has all of its rows, though the run resumes within an epoch, more than half of which is done."""
    # The checkpoint was written after a validation: Lightning takes one from before it for the end of an epoch.
    constant = [*tiny, "--data.batch_size", "16", "--model.schedule", "constant", "--model.warmup_steps", "0"]
    constant += ["--trainer.val_check_interval", "20"]
    assert fit(constant, "run", tmp_path / "run", "--trainer.max_steps", "20") == 0
    assert fit(constant, "run", tmp_path / "run", *change, "--trainer.max_steps", "40", "--ckpt_path", "last") == 0
    batches, rows = (2, 32) if "accumulate" in change[0] else (1, int(change[1]))
    lines = list(read_log(tmp_path / "run.0").values())[20:]
    assert len(lines) == 20 * batches and all(len(line["inputs"]) * batches == rows * 32 for line in lines)
    assert load(tmp_path / "runs/run/checkpoints/last.ckpt")["seen"]["tokens"] == 20 * 16 * 32 + 20 * rows * 32
    samples = load(tmp_path / "runs/run/checkpoints/last.ckpt")["PretrainingData"]["samples"]
    assert samples == 20 * 16 + 20 * rows


@pytest.mark.slow
def test_a_run_of_passes_is_not_continued_with_other_rows_a_step(tiny, tmp_path):
    """Half an epoch is not a whole number of new steps, and the learning rate decays by steps."""
    passes = [*tiny, "--trainer.max_steps", "-1", "--trainer.max_epochs", "1", "--data.batch_size"]
    assert fit([*passes, "16"], "run", tmp_path / "run", kill_at=7) == -9
    again = ["fit", "--name", "run", "--ckpt_path", "last", *passes]
    assert (
        "error: a step has 32 rows, in the checkpoint 16, and trainer.max_epochs counts epochs; allowed: as many (data.glob"
        in (line := complaint([*again, "32"], tmp_path))
    ), line
    assert run_forked([*again, "8", "--data.global_batch_size", "16"]) == 0
    whole = [*passes, "8", "--data.global_batch_size", "16"]
    assert fit(whole, "whole", tmp_path / "whole") == 0
    steps = [load(tmp_path / f"runs/{name}/checkpoints/last.ckpt")["global_step"] for name in ("run", "whole")]
    assert steps[0] == steps[1] > 20


ENDS = {
    "after a pass": "--trainer.max_epochs 2",
    "within one": "--trainer.callbacks+ tests.own_code.StopAt --trainer.callbacks.step 8",
}


@pytest.mark.parametrize(("max_steps", "first"), [("-1", "within one"), slow("1000", "after a pass")])
def test_a_run_that_has_ended_goes_on_in_its_pass(max_steps, first, tiny, tmp_path):
    """After two epochs of six steps, and within the second, to the end of the third."""
    then = [*tiny, "--data.batch_size", "64", "--trainer.check_val_every_n_epoch", "1", "--trainer.val_check_interval", "1.0"]
    then += ["--model.schedule", "constant", "--trainer.max_epochs", "3", "--trainer.max_steps", max_steps]
    assert fit(then, "whole", tmp_path / "whole") == 0
    assert fit([*then, *ENDS[first].split()], "part", tmp_path / "part") == 0
    assert fit([*then, "--ckpt_path", "last"], "part", tmp_path / "part") == 0
    assert read_log(tmp_path / "part.0") == read_log(tmp_path / "whole.0")
    whole, part = (load(tmp_path / f"runs/{name}/checkpoints/last.ckpt") for name in ("whole", "part"))
    assert whole["epoch"] == part["epoch"] and part["global_step"] == 18
    assert_same(whole["state_dict"], part["state_dict"])


def test_truncated_last_falls_back_to_previous(put, tiny, tmp_path):
    put("run")
    last, previous = (tmp_path / f"runs/run/checkpoints/{name}.ckpt" for name in ("last", "previous"))
    assert load(last)["global_step"] == 12 and load(previous)["global_step"] == 10
    last.write_bytes(last.read_bytes()[:3000])
    assert fit(tiny, "run", tmp_path / "run", "--ckpt_path", "last", "--trainer.max_steps", "14") == 0
    output = (tmp_path / "run.out").read_text()
    assert "last.ckpt, which is truncated or no checkpoint" in output and "resuming at step 10" in output
    assert load(last)["global_step"] == 14


def test_good_previous_outlives_a_save_that_fails_after_a_fall_back(put, tiny, tmp_path):
    folder = put("run") / "checkpoints"
    good = (folder / "previous.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(good[:3000])
    for name in ("new", "last"):
        (folder / f"{name}.ckpt.tmp").mkdir()  # in place of the next checkpoint's temporary file
        (folder / f"{name}.ckpt.tmp/note.txt").write_text("not the run's own, so it stays")
    assert fit(tiny, "run", tmp_path / "run", "--ckpt_path", "last", "--trainer.max_steps", "14") == os.EX_IOERR
    assert (folder / "previous.ckpt").read_bytes() == good


@pytest.mark.parametrize("saved_every", ["5", slow("7")], ids=["between", "at the validation's step"])
def test_perplexity_file_and_tensorboard_of_a_resumed_run_are_those_of_a_whole_one(saved_every, put, tiny, tmp_path):
    put("whole")
    tiny = [*tiny, "--last.every_n_steps", saved_every]
    assert fit(tiny, "killed", tmp_path / "killed", kill_at=9) == -9
    assert fit(tiny, "killed", tmp_path / "killed", "--ckpt_path", "last") == 0
    whole, killed = (untimed(tmp_path / f"runs/{name}/perplexity.csv") for name in ("whole", "killed"))
    assert whole == killed and [row["step"] for row in whole] == [0, 7]
    assert read_log(tmp_path / "whole.0") == read_log(tmp_path / "killed.0")
    events = EventAccumulator(str(tmp_path / "runs/killed")).Reload()
    steps = [[point.step for point in events.Scalars(name)] for name in ("val/perplexity", "train/loss")]
    assert steps == [[0, 7], [*range(1, 13)]]  # no point twice


@pytest.fixture(scope="module")
def saved_at_every_step(tmp_path_factory, corpus, cache):
    """Arguments, and the folder of an uninterrupted run: validated after steps 7 and 14, the last."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY)
    tiny = ["--config", str(folder / "tiny.yaml"), "--data.source", str(corpus), "--data.cache_dir", str(cache)]
    tiny += ["--last.every_n_steps", "1", "--trainer.max_steps", "14"]
    with inside(folder):
        assert fit(tiny, "whole", folder / "whole") == 0
    return tiny, folder / "runs/whole"


KILLS = {
    "validation": ("on_validation_batch_start", 7),
    "last step's validation": ("on_validation_batch_start", 14),
    "validation done but not saved": ("on_validation_end", 7),
    "end": ("on_fit_end", 14),
}


@pytest.mark.parametrize("case", KILLS)
def test_what_was_killed_after_a_step_is_made_up_for_without_doing_the_step_again(
    case, saved_at_every_step, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (hook, step), (tiny, alone) = KILLS[case], saved_at_every_step
    kill = ["--trainer.callbacks+", "tests.helpers.KillAt", "--trainer.callbacks.hook", hook]
    assert fit(tiny, "killed", tmp_path / "killed", *kill, "--trainer.callbacks.step", str(step)) == -9
    assert fit(tiny, "killed", tmp_path / "killed", "--ckpt_path", "last") == 0
    assert f"resuming at step {step}\n" in (tmp_path / "killed.out").read_text()
    runs = (alone, tmp_path / "runs/killed")
    whole, killed = (load(run / "checkpoints/last.ckpt") for run in runs)
    assert_same(whole["state_dict"], killed["state_dict"])
    assert_same(whole["metrics"], killed["metrics"])
    names = [{path.name for path in (run / "checkpoints").iterdir()} for run in runs]
    assert names[0] == names[1]
    found = []
    for run in runs:
        result = json.loads((run / "result.json").read_text())
        result = {key: result[key] for key in ("step", "metrics", "best_step", "best_metrics")}
        found.append([untimed(run / "perplexity.csv"), result])
    assert found[0] == found[1]
    assert [row["step"] for row in found[0][0]] == [0, 7, 14] and "val/perplexity" in found[0][1]["metrics"]


def test_last_save_that_was_killed_is_finished(put, tiny, tmp_path):
    folder = put("run") / "checkpoints"
    names = {path.name for path in folder.iterdir()}
    (best,) = folder.glob("best-*.ckpt")
    # As between two renames of the last save, with the former best not yet deleted.
    (folder / "last.ckpt").rename(folder / "new.ckpt")
    shutil.copy(best, folder / "best-00000003-900.0000.ckpt")
    assert fit(tiny, "run", tmp_path / "run", "--ckpt_path", "auto") == 0
    assert {path.name for path in folder.iterdir()} == names
    assert check_checkpoint(folder / "last.ckpt")["global_step"] == 12
    # The same when the step's checkpoint is written a second time, after its validation.
    shutil.copy(folder / "last.ckpt", folder / "new.ckpt")
    assert fit(tiny, "run", tmp_path / "run", "--ckpt_path", "auto") == 0
    assert {path.name for path in folder.iterdir()} == names
    assert [check_checkpoint(folder / f"{name}.ckpt")["global_step"] for name in ("previous", "last")] == [10, 12]
