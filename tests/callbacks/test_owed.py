"""Training ends with a validation, whatever its interval; a resumed run continues as if that had not taken place."""

import json
import re
import signal

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_linformer.callbacks import Owed
from lit_linformer.utils.files import read_rows
from tests.callbacks.test_curves import curves
from tests.helpers import TINY, assert_same, load, output, run_forked, slow

TERM = int(signal.SIGTERM)


@pytest.fixture
def ending(tiny, tmp_path):
    """A run of 9 steps with validations after 7 and after the last one; its learning rate does not depend on max_steps."""
    config = yaml.safe_load(TINY)
    del config["last"]["validation"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    return ["fit", *tiny, "--model.schedule", "constant", "--trainer.max_steps", "9"]


def steps(run):
    return [row["step"] for row in read_rows(run / "perplexity.csv")]


def test_ends_with_a_validation_and_goes_on_as_if_there_had_been_none(ending, tmp_path):
    whole, short = tmp_path / "runs/whole", tmp_path / "runs/short"
    output([*ending, "--name", "whole", "--trainer.max_steps", "14"], tmp_path)
    said = output([*ending, "--name", "short"], tmp_path)
    assert steps(whole) == [0, 7, 14] and steps(short) == [0, 7, 9]
    assert re.search(r"  last +1\d\d\.\d\d \(step 9\)\n", said)
    result = json.loads((short / "result.json").read_text())
    assert result["step"] == result["best_step"] == 9
    assert result["metrics"]["val/perplexity"] == pytest.approx(read_rows(short / "perplexity.csv")[-1]["perplexity"])
    assert [path.name[:13] for path in (short / "checkpoints").glob("best-*")] == ["best-00000009"]
    assert [step for step, _ in curves(short)["val/perplexity"]] == [0, 7, 9]
    output([*ending, "--name", "short", "--ckpt_path", "last", "--trainer.max_steps", "14"], tmp_path)
    assert steps(short) == [0, 7, 9, 14]
    ended = [load(run / "checkpoints/last.ckpt") for run in (whole, short)]
    assert_same(ended[0]["state_dict"], ended[1]["state_dict"])
    assert_same(ended[0]["optimizer_states"], ended[1]["optimizer_states"])
    assert_same(curves(whole)["train/loss"], curves(short)["train/loss"])


def test_killed_within_its_last_validation_it_does_that(ending, tmp_path):
    killed = [*ending, "--ckpt_path", "auto"]
    kill = ["--trainer.callbacks+", "tests.helpers.KillAt", "--trainer.callbacks.hook", "on_validation_batch_start"]
    assert run_forked([*killed, *kill, "--trainer.callbacks.step", "9"], tmp_path / "log") == -9
    assert steps(tmp_path / "runs/tiny") == [0, 7]
    output(killed, tmp_path)
    assert steps(tmp_path / "runs/tiny") == [0, 7, 9]
    assert [step for step, _ in curves(tmp_path / "runs/tiny")["val/perplexity"]] == [0, 7, 9]


PASS = {  # an epoch has 6 steps; by steps there is a validation in its middle, too
    "by epochs": "--trainer.max_steps -1 --trainer.max_epochs 3 --trainer.val_check_interval 1.0",
    "by steps": "--trainer.max_steps 15 --trainer.val_check_interval 3",
}


@pytest.mark.parametrize(("end", "signalled"), [("by steps", False), slow("by epochs", True)], ids=["killed", "signalled"])
def test_stopped_in_a_validation_at_the_end_of_a_pass_it_goes_on(end, signalled, ending, tmp_path):
    ending += ["--trainer.check_val_every_n_epoch", "1" if end == "by epochs" else "null"]
    words = [*ending, "--data.batch_size", "64", *PASS[end].split(), "--last.every_n_steps", "6"]
    output([*words, "--name", "whole"], tmp_path)
    stop = "tests.helpers.KillAt --trainer.callbacks.hook on_validation_batch_start --trainer.callbacks.step 6"
    if signalled:
        stop = "tests.helpers.SendSignal --trainer.callbacks.marker sent --trainer.callbacks.at 6"
        stop += f" --trainer.callbacks.number {TERM}"
    words += ["--name", "part"]
    assert run_forked([*words, "--trainer.callbacks+", *stop.split()], tmp_path / "log") == (128 + TERM if signalled else -9)
    output([*words, "--ckpt_path", "last"], tmp_path)
    whole, part = tmp_path / "runs/whole", tmp_path / "runs/part"
    assert steps(whole) == steps(part) and steps(whole)[-1] == json.loads((part / "result.json").read_text())["step"]
    ended = [load(run / "checkpoints/last.ckpt") for run in (whole, part)]
    assert_same(ended[0]["state_dict"], ended[1]["state_dict"])
    assert_same(curves(whole)["train/loss"], curves(part)["train/loss"])


@pytest.mark.slow
def test_an_end_by_epochs_too_unless_told(ending, tmp_path):
    epochs = [*ending, "--trainer.max_steps", "-1", "--trainer.max_epochs", "1", "--trainer.val_check_interval", "1.0"]
    epochs += ["--trainer.check_val_every_n_epoch", "2", "--trainer.limit_train_batches", "4"]
    output([*epochs, "--name", "with"], tmp_path)
    output([*epochs, "--name", "without", "--last.validation", "false"], tmp_path)
    assert steps(tmp_path / "runs/with") == [0, 4] and steps(tmp_path / "runs/without") == [0]


def test_an_end_by_time_comes_after_a_step_and_is_validated(ending, tmp_path):
    """Whichever epochs are validated, and with accumulation only after a whole step; then no time is left in later starts."""
    ends = ["--trainer.max_steps", "1000000", "--trainer.max_time", "00:00:00:01", "--trainer.accumulate_grad_batches", "20"]
    ends += ["--trainer.check_val_every_n_epoch", "1000", "--trainer.val_check_interval", "1.0"]
    for _ in range(2):
        said = output([*ending, *ends, "--ckpt_path", "auto"], tmp_path)
        result = json.loads((tmp_path / "runs/tiny/result.json").read_text())
        step = result["step"]
        assert f"ended       early at step {step}: the time given for training is over\n" in said
        assert steps(tmp_path / "runs/tiny") == [0, step] and result["tokens"] == 20 * 4 * 32 * step
        assert result["metrics"].keys() >= {"val/perplexity"} and result["best_step"] == step
    assert f"resuming at step {step}\n" in said


def test_alone_in_a_trainer_of_ones_own(tmp_path):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(max_steps=2, accelerator="cpu", callbacks=[Owed()], default_root_dir=tmp_path, **quiet)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
