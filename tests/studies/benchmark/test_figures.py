"""Figure 2 of the paper and Table 3, as `benchmark` draws and compares them."""

import pytest

from lit_linformer.studies.benchmark.figures import draw_times
from lit_linformer.studies.benchmark.tables import with_ratios

MANY = [f"linformer {2**number}" for number in range(1, 9)]
MECHANISMS = ["linformer 128", "window 128", "lookup 128", "coarse 128", "luna 128", "nystrom 128", "lsh 128", "sparse 128"]


def times(*models):
    entry = {"status": "ok", "median": 1.0, "quartiles": [0.9, 1.1]}
    cell = {"kind": "time", "direction": "inference", "models": dict.fromkeys(models, entry)}
    settings = {"device": "cpu", "threads": 1, "precision": "float32", "num_layers": 1, "hidden_size": 8, "num_heads": 1}
    settings |= {"tokens": 128, "sharing": "layerwise"}
    cells = {str(n): {**cell, "n": n} for n in (64, 128)}
    return {"cells": cells, "settings": settings, "environment": {"hardware": "An Abacus", "torch": "2"}}


@pytest.mark.parametrize("models", [MANY, MECHANISMS], ids=["many k", "mechanisms"])
def test_no_two_lines_look_the_same(models):
    from matplotlib.figure import Figure

    (axes,) = draw_times(Figure, times("written-out", "fused", *models, "peer 128")).axes
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    looks = {line.get_label(): (line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(set(looks.values())) == len(looks) == len(models) + 3


def test_a_model_whose_module_begins_like_a_baseline_is_none():
    models = {
        name: {"status": "ok", "bytes": size}
        for name, size in (("fused", 8), ("fused_ideas.Fast 128", 2), ("linformer 128", 4))
    }
    cell = with_ratios({"kind": "memory", "direction": "forward", "n": 512, "models": models}, {})
    assert {name: found["fused"]["ratio"] for name, found in cell["ratios"].items()} == {
        "fused_ideas.Fast 128": 4,
        "linformer 128": 2,
    }
