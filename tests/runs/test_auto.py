"""--ckpt_path auto resumes or starts over, whatever a kill leaves; and the best checkpoint is that of the run's history."""

import json
import shutil

import pytest

from tests.cli.test_errors import complaint
from tests.helpers import assert_same, fit, load, output, read_log

PARTS = ("state_dict", "optimizer_states", "seen", "global_step")


@pytest.fixture
def whole(put):
    """The folder of an uninterrupted run: last.ckpt is from step 12, previous.ckpt from 10, the best from 7."""
    return put("whole")


def only_best(checkpoints):
    (checkpoints / "last.ckpt").unlink()
    (checkpoints / "previous.ckpt").unlink()


def only_new(checkpoints):
    (checkpoints / "last.ckpt").unlink()
    (checkpoints / "previous.ckpt").rename(checkpoints / "new.ckpt")


def new_beside_last(checkpoints):
    (checkpoints / "last.ckpt").rename(checkpoints / "new.ckpt")
    (checkpoints / "previous.ckpt").rename(checkpoints / "last.ckpt")


def half_a_sharded_new(checkpoints):
    only_best(checkpoints)
    (checkpoints / "new.ckpt").mkdir()
    (checkpoints / "new.ckpt/__0_0.distcp").write_bytes(b"half")


def only_a_tmp(checkpoints):
    only_best(checkpoints)
    for path in checkpoints.iterdir():
        path.rename(checkpoints / "last.ckpt.tmp")


STATES = {
    only_best: ("no last.ckpt yet, only best-00000007", 0),
    only_new: ("", 10),
    new_beside_last: ("", 12),
    half_a_sharded_new: ("no last.ckpt yet, only best-00000007", 0),
    only_a_tmp: ("no checkpoint yet: it starts anew", 0),
}


@pytest.mark.parametrize("state", STATES)
def test_what_a_kill_leaves_never_stops_it(state, whole, tiny, tmp_path):
    expected = load(whole / "checkpoints/last.ckpt")
    curve = (whole / "perplexity.csv").read_text().splitlines()[-1].split(",")[3]
    state(whole / "checkpoints")
    told, step = STATES[state]
    shown = output(["fit", *tiny, "--name", "whole", "--ckpt_path", "auto", "--trainer.max_steps", "12"], tmp_path)
    assert told in shown and (f"resuming at step {step}" in shown) == bool(step)
    left = {path.name for path in (whole / "checkpoints").iterdir()}
    assert {"last.ckpt", "previous.ckpt"} >= {name for name in left if not name.startswith("best-00000007-")}
    assert_same(*({part: found[part] for part in PARTS} for found in (expected, load(whole / "checkpoints/last.ckpt"))))
    lines = (whole / "perplexity.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "0", "7"] and lines[-1].split(",")[3] == curve
    assert len(list(whole.glob("events.*"))) == (1 if step == 0 else 2)  # an earlier start's points are not shown again


@pytest.mark.slow
def test_both_damaged_is_one_line_for_beginning_anew_would_throw_them_away(whole, tiny, tmp_path):
    for name in ("last.ckpt", "previous.ckpt"):
        content = bytearray((whole / "checkpoints" / name).read_bytes())
        content[len(content) // 2] ^= 1
        (whole / "checkpoints" / name).write_bytes(content)
    shutil.rmtree(whole / "by_tokens")
    (tmp_path / "complaint").mkdir()
    line = complaint_after_warnings(["fit", *tiny, "--name", "whole", "--ckpt_path", "auto"], tmp_path)
    assert "runs/whole/checkpoints holds no whole last.ckpt or previous.ckpt; allowed: --ckpt_path best" in line
    assert {"last.ckpt", "previous.ckpt"} < {path.name for path in (whole / "checkpoints").iterdir()}
    assert "resuming at step 7" in output(["fit", *tiny, "--name", "whole", "--ckpt_path", "best"], tmp_path)


def complaint_after_warnings(argv, tmp_path):
    return output(argv, tmp_path, status=2).splitlines()[-1]


def test_last_and_new_names_say_what_to_do(tiny, tmp_path):
    line = complaint(["fit", *tiny, "--ckpt_path", "last"], tmp_path)
    assert "runs/tiny/checkpoints holds none; allowed: a --name that has run, or auto, which then starts anew" in line


@pytest.mark.slow
def test_best_of_a_dead_history_is_dropped_and_the_living_ones_kept(tiny, tmp_path):
    """Killed after a best at step 14, then resumed from 12 with a learning rate that makes step 14 worse than step 7."""
    tiny = [*tiny, "--trainer.max_steps", "16", "--last.every_n_steps", "6", "--model.schedule", "constant"]
    assert fit(tiny, "run", tmp_path / "run", kill_at=15) == -9
    folder = tmp_path / "runs/run"
    best = {path.name[:13] for path in (folder / "checkpoints").glob("best-*")}
    assert best == {"best-00000007", "best-00000014"}  # last.ckpt, of step 12, names 7 as the best
    # A start that is refused deletes nothing.
    wrong = ["--model.lr", "5", "--ckpt_path", "auto", "--trainer.accumulate_grad_batches", "0"]
    assert fit(tiny, "run", tmp_path / "run", *wrong) != 0
    assert {path.name[:13] for path in (folder / "checkpoints").glob("best-*")} == best

    assert fit(tiny, "run", tmp_path / "run", "--model.lr", "5", "--ckpt_path", "auto") == 0
    (path,) = (folder / "checkpoints").glob("best-*")
    assert path.name.startswith("best-00000007-") and load(path)["global_step"] == 7
    rows = {int(line.split(",")[0]): float(line.split(",")[3]) for line in (folder / "perplexity.csv").read_text().split()[1:]}
    assert rows[14] > rows[7]
    assert f"checkpoint: {path.relative_to(tmp_path)}" in output(["validate", *tiny, "--name", "run"], tmp_path)
    found = json.loads((folder / "validate.json").read_text())["metrics"]["val/perplexity"]
    assert found == pytest.approx(rows[7], rel=1e-5)


@pytest.mark.slow
def test_kills_after_bests_pile_nothing_up_and_change_nothing(tiny, tmp_path):
    tiny = [*tiny, "--trainer.val_check_interval", "3", "--last.every_n_steps", "4"]
    assert fit(tiny, "whole", tmp_path / "whole") == 0
    for at in (7, 7, 11):
        assert fit(tiny, "killed", tmp_path / "killed", "--ckpt_path", "auto", kill_at=at) == -9
    assert fit(tiny, "killed", tmp_path / "killed", "--ckpt_path", "auto") == 0
    assert read_log(tmp_path / "whole.0") == read_log(tmp_path / "killed.0")
    places = [tmp_path / f"runs/{name}/checkpoints" for name in ("whole", "killed")]
    assert {path.name for path in places[0].iterdir()} == {path.name for path in places[1].iterdir()}
    for path in places[0].iterdir():
        assert_same(*({part: load(place / path.name)[part] for part in PARTS} for place in places))


def test_a_checkpoint_with_a_bad_config_is_one_line(whole, tiny, tmp_path):
    import torch

    path = whole / "checkpoints/last.ckpt"
    good = load(path)
    encoder = {**good["hyper_parameters"]["encoder"], "num_heads": 5}
    bad = {
        "config is no YAML": {"config": "a: [1"},
        "config is no run's": {"config": "- 1"},
        "encoder has settings that none can have": {"hyper_parameters": good["hyper_parameters"] | {"encoder": encoder}},
        "holds no encoder": {"hyper_parameters": {"encoder": 3}},
    }
    for words, change in bad.items():
        torch.save(good | change, path)
        line = complaint(["export", "--ckpt_path", str(path), "--format", "torch", "--output", "out"], tmp_path)
        assert words in line and "last.ckpt" in line
        if "encoder" not in words:
            assert words in complaint(["fit", *tiny, "--name", "whole", "--ckpt_path", "last"], tmp_path)
        else:
            assert words in complaint(["fit", *tiny, "--model.pretrained", str(path)], tmp_path)
