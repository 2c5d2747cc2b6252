"""An attention and its settings in one word, and layers of each measured under that name."""

import json
from pathlib import Path

import pytest

from lit_linformer.model import ATTENTIONS, EncoderConfig
from lit_linformer.studies.benchmark.layers import main
from lit_linformer.studies.benchmark.models import kind_settings, operations
from tests.cli.test_errors import complaint
from tests.studies.conftest import settings_of


def test_settings_of_a_word():
    assert kind_settings("sparse") == {"attention": "sparse"}
    found = kind_settings("window:window=64+projection=gated+dual_norm=true+projection_options.gate=channel")
    options = {"attention_options": {"window": 64, "dual_norm": True}, "projection_options": {"gate": "channel"}}
    assert found == {"attention": "window", "projection": "gated", **options}
    wrong = ("64", "=3", "projection_dim=3", "dropout=0.1", "window=64+", "window={a", "options.window=3")
    for word in (f"window:{settings}" for settings in wrong):
        with pytest.raises(ValueError, match="allowed: NAME, or NAME:SETTING=VALUE") as caught:
            kind_settings(word)
    shown = str(caught.value).rpartition(" as ")[2]  # the example is one that works
    EncoderConfig(**kind_settings(shown))


def test_operations_are_those_of_the_settings():
    settings = settings_of("--hidden_size", "32", "--intermediate_size", "64")
    near, far = (operations(f"window:window={window} 8", settings, 64) for window in (2, 16))
    assert far - near == 4 * 2 * 32 * (16 - 2)  # 4 (2 w) D per token
    assert operations("full", settings, 64) == operations("fused", settings, 64)


@pytest.mark.slow
def test_every_attention_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = (
        "--lengths 32 --projection_dims 8 --hidden_size 16 --num_heads 2 --num_layers 1 --tokens 64 --rounds 1 --memory false"
    )
    names = [name for name in ATTENTIONS if name not in ("full", "linformer")]
    words = ["fused", "linformer", *names, "coarse:best=3+projection=gated", "window:window=4+dual_norm=true"]
    main([*sizes.split(), "--backward", "true", "--models", *words])
    (cell,) = json.loads(Path("runs/benchmark/benchmark.json").read_text())["cells"].values()
    assert {entry["status"] for entry in cell["models"].values()} == {"ok"}
    assert {name.partition(" ")[0] for name in cell["models"]} == set(words)
    assert all("operation_counts" in found["fused"] for found in cell["ratios"].values())


def test_a_name_that_there_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = complaint(["benchmark", "--models", "windw:window=4"], tmp_path)
    names = "written-out, fused, linformer, coarse, window, lookup, lsh"
    assert f"models is 'windw'; did you mean 'window'?; allowed: {names}" in line
    assert "attention_options.window is 5; allowed: an even number" in complaint(
        ["benchmark", "--models", "window:window=5"], tmp_path
    )
