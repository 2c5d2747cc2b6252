"""PerplexityCurve: what its seconds count, and a headline next to the perplexity."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.callbacks import PerplexityCurve, throughput
from lit_linformer.studies.tune.study import read_curve
from lit_linformer.tasks import MLM
from lit_linformer.utils.files import read_rows
from tests.helpers import output

RECALL = (
    "fit --config conf/recall/small.yaml --data.rows 64 --data.validation_rows 8 --data.batch_size 8 --trainer.max_steps 6 "
    "--trainer.val_check_interval 3 --model.encoder.hidden_size 16 --model.encoder.num_layers 1 --model.warmup_steps 1"
).split()


def test_training_seconds_are_those_of_the_steps_also_after_resuming(tiny, tmp_path, monkeypatch):
    """The clock advances 1 s in a training step, 0.5 s of it processor time, and 100 s in a validation batch."""
    clock = SimpleNamespace(now=0.0, cpu=0.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.cpu)
    monkeypatch.setattr(throughput, "time", fake)

    def moves(name, seconds):
        method = getattr(MLM, name)

        def moving(self, *arguments):
            clock.now, clock.cpu = clock.now + seconds, clock.cpu + seconds / 2
            return method(self, *arguments)

        monkeypatch.setattr(MLM, name, moving)

    moves("training_step", 1.0)
    moves("validation_step", 100.0)
    run, fit = tmp_path / "runs/tiny", ["fit", *tiny, "--trainer.val_check_interval", "6"]
    output([*fit, "--trainer.max_steps", "6", "--last.every_n_steps", "2"], tmp_path)
    shutil.copytree(run, tmp_path / "runs/old")
    output([*fit, "--ckpt_path", "last"], tmp_path)
    rows = read_rows(run / "perplexity.csv")
    assert [(row["step"], row["training_seconds"], row["cpu_seconds"]) for row in rows] == [(0, 0, 0), (6, 6, 3), (12, 12, 6)]

    last = tmp_path / "runs/old/checkpoints/last.ckpt"  # as it was before these columns
    checkpoint = torch.load(last, weights_only=True)
    state = checkpoint["callbacks"]["PerplexityCurve"]
    del state["trained"]
    for row in state["rows"]:
        del row["training_seconds"], row["cpu_seconds"]
    torch.save(checkpoint, last)
    output([*fit, "--name", "old", "--ckpt_path", "last"], tmp_path)
    rows = read_rows(tmp_path / "runs/old/perplexity.csv")
    assert [row["step"] for row in rows] == [0, 6, 12] and all(row["seconds"] >= 0 for row in rows)
    assert all(math.isnan(row[name]) for row in rows for name in ("training_seconds", "cpu_seconds"))


def test_a_headline_beside_the_perplexity_is_a_column_of_its_own(tmp_path, monkeypatch):
    """This lets `tune` prune recall runs."""
    (tmp_path / "conf").symlink_to(Path(__file__).parents[2] / "conf")
    monkeypatch.chdir(tmp_path)
    output([*RECALL, "--name", "recall"], tmp_path)
    rows = read_rows(tmp_path / "runs/recall/perplexity.csv")
    result = json.loads((tmp_path / "runs/recall/result.json").read_text())
    assert rows[-1]["val/accuracy"] == pytest.approx(result["metrics"]["val/accuracy"])
    found = read_curve(tmp_path / "runs/recall", "val/accuracy")
    assert list(found) == [3, 6] and all(0 <= value <= 1 for value in found.values())
    assert rows[-1]["perplexity"] > 1


def test_a_run_may_go_on_with_another_headline(tmp_path):
    curve = PerplexityCurve()
    curve.rows = [{"step": 1, "seconds": 1.0, "val/loss": 0.1, "best": 0.1}]
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=False, fast_dev_run=False, is_global_zero=True, global_step=2,
        callbacks=[], callback_metrics={"val/accuracy": torch.tensor(0.5)}, default_root_dir=tmp_path,
    )  # fmt: skip
    curve.on_validation_end(trainer, SimpleNamespace(headline=("val/accuracy", "accuracy", ".4f", max)))
    earlier, now = read_rows(tmp_path / "curve.csv")
    assert math.isnan(earlier["val/accuracy"]) and math.isnan(now["val/loss"]) and now["val/accuracy"] == now["best"] == 0.5
    trainer.callback_metrics["val/accuracy"] = torch.tensor(0.25)  # worse: the best stays
    curve.on_validation_end(trainer, SimpleNamespace(headline=("val/accuracy", "accuracy", ".4f", max)))
    assert read_rows(tmp_path / "curve.csv")[-1]["best"] == 0.5
    trainer.callback_metrics["val/accuracy"] = torch.tensor(0.75)
    curve.on_validation_end(trainer, SimpleNamespace(headline=("val/accuracy", "accuracy", ".4f", max)))
    assert read_rows(tmp_path / "curve.csv")[-1]["best"] == 0.75
