"""The length sweep: the perplexities equal those of `validate`, on one and two processes; training is not affected."""

import json
import random
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.callbacks import LengthSweep
from lit_linformer.callbacks.length_sweep import AllocatedTensors, draw_sweep, together
from lit_linformer.callbacks.observing import unnoticed
from lit_linformer.data import PretrainingData
from lit_linformer.utils.figures import figure_class
from lit_linformer.utils.files import read_rows
from tests.helpers import assert_same_runs, fit, run_forked, slow

TWO = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
# The compared runs have different batch sizes, and so, on some processors, another order of float32 sums.
EXACT = ["--trainer.precision", "64-true"]


def sweep(lengths, **settings):
    words = ["--trainer.callbacks+", "LengthSweep", "--trainer.callbacks.lengths", str(lengths)]
    return words + [word for name, value in settings.items() for word in (f"--trainer.callbacks.{name}", str(value))]


def validate(tiny, tmp_path, *extra):
    """{length: row} of a length sweep over the checkpoint of runs/run."""
    log = tmp_path / "validate.out"
    assert run_forked(["validate", *tiny, "--name", "run", *extra], log) == 0, log.read_text()
    return {int(row["length"]): row for row in read_rows(tmp_path / "runs/run/validate_length_sweep.csv")}


@pytest.fixture
def trained(tiny, put):
    put("run")
    return tiny


def test_perplexity_is_what_validate_gives_at_that_length(trained, tmp_path):
    def result():
        return json.loads((tmp_path / "runs/run/validate.json").read_text())["metrics"]["val/perplexity"]

    found = validate(trained, tmp_path, *EXACT, *sweep([32, 8, 21]))
    measured_there = {32: result()}
    assert list(found) == [8, 21, 32]
    for length, row in found.items():
        if length < 32:  # at n, the first command has measured it itself
            assert run_forked(["validate", *trained, *EXACT, "--name", "run", "--data.max_length", str(length)]) == 0
            measured_there[length] = result()
        assert row["perplexity"] == pytest.approx(measured_there[length], rel=1e-9)
        assert row["tokens_per_second"] > 0 and 0.01 < row["peak_memory_mib"] < 5
        assert row["step"] == 7 and row["tokens"] == 7 * 4 * 32  # the best checkpoint's
    assert not (tmp_path / "runs/run/length_sweep.csv").exists()


def test_same_on_two_processes_whatever_the_batches(trained, tmp_path):
    one = validate(trained, tmp_path, *EXACT, *sweep([8, 32]))
    two = validate(trained, tmp_path, *EXACT, *sweep([8, 32], num_tokens=200), *TWO)
    for length in (8, 32):
        assert two[length]["perplexity"] == pytest.approx(one[length]["perplexity"], rel=1e-9)


def test_processes_together_are_as_fast_as_the_slowest_allows():
    ranks = torch.tensor([[600.0, 2.0, 30.0], [400.0, 4.0, 50.0], [500.0, 1.0, 20.0]])
    assert together(ranks) == {"tokens_per_second": 375.0, "peak_memory_mib": 50.0}


@pytest.mark.parametrize(("settings", "rows"), [({}, [16, 4]), slow({"num_tokens": 64}, [8, 2])])
def test_a_batch_holds_as_many_tokens_at_every_length(settings, rows, trained, tmp_path, monkeypatch):
    asked, loader = tmp_path / "asked", PretrainingData.evaluation_loader

    def noted(data, split, length, rows):
        with open(asked, "a") as file:
            print(length, rows, file=file)
        return loader(data, split, length, rows)

    monkeypatch.setattr(PretrainingData, "evaluation_loader", noted)  # in the forked process too
    validate(trained, tmp_path, *sweep([8, 32], **settings))
    assert asked.read_text().split() == ["8", str(rows[0]), "32", str(rows[1])]


def test_the_later_of_two_rows_is_kept():
    callback, row = LengthSweep([8]), {"step": 3, "length": 8}
    for perplexity in (5.0, 4.0):
        callback.load_state_dict({"validations": 1, "rows": [row | {"perplexity": perplexity}]})
    assert callback.state_dict()["rows"] == [row | {"perplexity": 4.0}]


@pytest.mark.slow
def test_limit_bounds_the_cost(trained, tmp_path):
    found = validate(trained, tmp_path, *sweep([8, 32], limit_batches=1, num_tokens=64))
    whole = validate(trained, tmp_path, *sweep([8, 32]))
    assert found[32]["perplexity"] != pytest.approx(whole[32]["perplexity"], rel=1e-3)
    assert found[32]["peak_memory_mib"] < whole[32]["peak_memory_mib"]


@pytest.mark.parametrize(
    "extra",
    [[], slow([*TWO, "--data.num_workers", "1", "--trainer.precision", "bf16-mixed"])],
    ids=["plain", "two processes, workers, bf16"],
)
def test_training_does_not_notice(extra, put, tiny, tmp_path):
    """Both callbacks, after each validation and at the end: equal batches, masks, losses, weights, optimiser, bit for bit."""
    watched = [*sweep([8, 32], at_end="true"), "--trainer.callbacks+", "Spectrum"]
    if not extra:
        put("without")
    for name, callbacks in (("without", []), ("with", watched))[not extra :]:
        assert fit(tiny, name, tmp_path / name, *extra, *callbacks) == 0, (tmp_path / f"{name}.out").read_text()
    assert {row["step"] for row in read_rows(tmp_path / "runs/with/length_sweep.csv")} == {7, 12}
    assert_same_runs(tmp_path, "without", "with", processes=2 if extra else 1)


def test_modes_and_random_states_are_restored():
    module = LightningModule()
    module.net = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    module.train()
    module.net[1].eval()  # frozen
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with pytest.raises(RuntimeError, match="passed on"), unnoticed(module):
        assert not module.training and not module.net[0].training and not torch.is_grad_enabled()
        torch.rand(5), np.random.rand(5), random.random()
        raise RuntimeError("passed on")
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == before
    assert module.training and module.net[0].training and not module.net[1].training and torch.is_grad_enabled()


def measured(path):
    """All columns except timings."""
    return [(row["step"], row["tokens"], row["length"], row["perplexity"]) for row in read_rows(path)]


@pytest.mark.slow
def test_resumed_run_has_the_rows_of_a_whole_one(tiny, tmp_path):
    tiny = [*tiny, "--trainer.val_check_interval", "3"]
    callback = sweep([8, 32], every_n_validations=2, at_end="true")
    assert fit(tiny, "whole", tmp_path / "whole", *callback) == 0
    assert (tmp_path / "whole.out").read_text().count("perplexity by length") == 2  # not once more at the end
    assert fit(tiny, "killed", tmp_path / "killed", *callback, kill_at=8) == -9
    assert fit(tiny, "killed", tmp_path / "killed", *callback, "--ckpt_path", "last") == 0
    whole, killed = (measured(tmp_path / f"runs/{name}/length_sweep.csv") for name in ("whole", "killed"))
    assert whole == killed and [row[0] for row in whole] == [6, 6, 12, 12]
    # The rows measured at the end are newer than last.ckpt, and stay when training is resumed.
    end = sweep([8], every_n_validations=0, at_end="true")
    assert run_forked(["fit", *tiny, "--name", "end", *end]) == 0
    more = ["--trainer.max_steps", "14", "--ckpt_path", "last"]
    assert run_forked(["fit", *tiny, "--name", "end", *end, *more]) == 0
    assert [row[:1] + row[2:3] for row in measured(tmp_path / "runs/end/length_sweep.csv")] == [(12, 8), (14, 8)]


@pytest.mark.slow
def test_tensorboard_and_figure(tiny, tmp_path):
    assert run_forked(["fit", *tiny, *EXACT, "--name", "run", *sweep([8, 32])]) == 0
    events = EventAccumulator(str(tmp_path / "runs/run")).Reload()
    (row,) = (row for row in read_rows(tmp_path / "runs/run/length_sweep.csv") if row["length"] == 32)
    (point,) = events.Scalars("watch_sweep/perplexity_32")
    assert point.step == 7 and point.value == pytest.approx(row["perplexity"])
    names = {"perplexity", "tokens_per_second", "peak_memory_mib"}
    assert {tag for tag in events.Tags()["scalars"] if tag.startswith("watch_sweep/")} == {
        f"watch_sweep/{name}_{length}" for name in names for length in (8, 32)
    }
    assert "watch_sweep/by_length" in events.Tags()["images"]
    assert (tmp_path / "runs/run/length_sweep.png").read_bytes()[1:4] == b"PNG"
    # At the model's own length it equals the validation perplexity.
    last = read_rows(tmp_path / "runs/run/perplexity.csv")[-1]
    assert row["perplexity"] == pytest.approx(last["perplexity"], rel=1e-9)


def test_counts_what_lives_at_once():
    weight = torch.ones(1000)
    with AllocatedTensors([weight]) as allocated:
        view = weight.view(10, 100)  # allocates nothing
        a = view + 1  # 4,000 bytes
        del a
        b = torch.zeros(500)
        c = b * 2
        d = c[:100]
        del b, c
    assert allocated.peak == 4000 and allocated.live == 2000 and len(d) == 100  # c's storage is still used by d


def test_figure_leaves_no_pyplot_state_and_matplotlib_is_optional(tmp_path, monkeypatch):
    rows = [{"step": s, "length": n, "perplexity": s + n, "tokens_per_second": 5e3} for s in (1, 2) for n in (8, 16)]
    draw_sweep(figure_class(), rows).savefig(tmp_path / "figure.png")
    assert pyplot.get_fignums() == []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert figure_class() is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lengths": []}, "LengthSweep.lengths is []; allowed: a list of lengths, each 8 or more"),
        ({"lengths": [7, 16]}, "LengthSweep.lengths is 7; allowed"),
        ({"lengths": [8], "every_n_validations": -1}, "LengthSweep.every_n_validations is -1; allowed: 0 or more"),
        ({"lengths": [8], "every_n_validations": 0}, "every_n_validations is 0; allowed: 1 or more, or 0 with at_end true"),
        ({"lengths": [8], "limit_batches": 0}, "LengthSweep.limit_batches is 0; allowed: 1 or more"),
        ({"lengths": [8], "num_tokens": 0}, "LengthSweep.num_tokens is 0; allowed: 1 or more"),
    ],
)
def test_bad_settings(settings, expected):
    with pytest.raises(ValueError) as caught:
        LengthSweep(**settings)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "extra", "expected"),
    [
        ([8, 64], [], "error: LengthSweep.lengths holds 64; allowed: 8 to model.encoder.max_length = 32"),
        (
            [8],
            ["--data.validation_fraction", "0"],
            "error: data.validation_fraction is 0.0; allowed with LengthSweep: more than",
        ),
        ([4], [], "LengthSweep.lengths is 4; allowed: 8 or more"),
    ],
)
def test_what_does_not_fit_is_one_line_before_training(lengths, extra, expected, tiny, tmp_path):
    log = tmp_path / "out"
    assert run_forked(["fit", *tiny, "--name", "run", *sweep(lengths), *extra], log) == 2
    assert expected in log.read_text().splitlines()[-1]
    assert not (tmp_path / "runs/run/checkpoints").exists()
