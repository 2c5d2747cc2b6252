"""What `benchmark --what training` computes from its measurements: tokens/s, MFU and ratios; its batches and its clock."""

import pytest
import torch

from lit_linformer.studies.benchmark import steps
from lit_linformer.studies.benchmark.training import evaluate
from lit_linformer.utils import peaks

SETTINGS = {
    "length": 32, "scaling": [48], "tokens": 100, "device": "cpu", "precision": "float32", "mask_rate": 0.15, "vocab_size": 300,
    "projection_dim": 8, "dropout": 0.0, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def test_speeds_mfu_and_ratios_follow_from_the_seconds_of_the_rounds(monkeypatch):
    monkeypatch.setattr(peaks, "device_peak", lambda device, precision: 1e9)
    measured = {
        "linformer 32": {"status": "ok", "seconds": [0.5, 0.25, 1.0]},
        "transformer 32": {"status": "ok", "seconds": [1.0, 1.0, 1.0]},
        "linformer 48": {"status": "ok", "seconds": [0.5, 0.5, 0.5]},
        "roberta 32": {"status": "failed", "reason": "out of memory"},
    }
    found = evaluate(SETTINGS, measured)
    ours = found["models"]["linformer 32"]
    assert ours["tokens_per_second"] == {"median": 192, "min": 96, "max": 384}  # three whole rows of 32 fit into 100 tokens
    flops = steps.step_flops("linformer 32", SETTINGS)
    assert ours["mfu"] == pytest.approx(flops / 0.5 / 1e9, rel=1e-3)
    assert ours["gflops_per_second"] == pytest.approx(flops / 0.5 / 1e9, rel=1e-4)
    assert found["peak_tflops"] == 1e-3 and "mfu" not in found["models"]["roberta 32"]
    assert found["ratios"] == {
        "linformer 32 / transformer 32": {"median": 2.0, "min": 1.0, "max": 4.0},
        "linformer 48 / linformer 32": {"median": 1.0, "min": 0.5, "max": 2.0},
    }


def test_operations_of_a_step_grow_with_its_rows():
    one, three = (steps.step_flops("lookup 32", SETTINGS | {"tokens": tokens}) for tokens in (32, 96))
    assert three == 3 * one and steps.step_flops("roberta 32", SETTINGS) is None


def test_labels_are_the_tokens_under_the_masks():
    batch, whole = steps.make_batch(SETTINGS, 32, 0), steps.make_batch(SETTINGS | {"mask_rate": 1e-9}, 32, 0)
    ids, positions, labels = batch["input_ids"], batch["positions"], batch["labels"]
    assert ids.shape == (3, 32) and labels.shape == positions.shape == (3, 5) and (positions.diff() > 0).all()
    assert (ids.gather(1, positions) == 4).all() and (ids == 4).sum() == 15 and (labels >= 5).all()
    unmasked = whole["input_ids"] != 4  # of the same tokens only one a row is masked
    assert torch.equal(ids.scatter(1, positions, labels)[unmasked], whole["input_ids"][unmasked])


def test_the_first_steps_of_a_turn_are_not_counted(monkeypatch):
    moments = iter([10.0, 18.0])
    monkeypatch.setattr(steps, "now", lambda settings: next(moments))
    clock = steps.Clock({"steps": 4})
    for _ in range(steps.WARM + 4):
        clock.tick()
    assert clock.seconds == 2.0 and next(moments, None) is None
