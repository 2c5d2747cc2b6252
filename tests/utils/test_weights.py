"""A model with weights that are not finite is refused in one line that names it, wherever it would be used."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_linformer.utils.weights import check_finite
from tests.helpers import load, output

NAME = "encoder.layers.1.up.weight"


@pytest.fixture
def broken(put, tiny, tmp_path):
    """A run all of whose checkpoints have one weight that is NaN."""
    for path in (put("tiny") / "checkpoints").glob("*.ckpt"):
        checkpoint = load(path)
        checkpoint["state_dict"][f"net.{NAME}"][0, 0] = math.nan
        torch.save(checkpoint, path)
    return tiny


@pytest.mark.slow
def test_every_command_refuses_it(broken, tmp_path):
    commands = {
        "ckpt_path": [
            ["fit", *broken, "--ckpt_path", "last", "--trainer.max_steps", "14"],
            ["validate", *broken],
            ["predict", *broken, "--data.text", "a <mask>"],
            ["spectrum", "--run", "runs/tiny"],
            ["export", "--ckpt_path", "runs/tiny", "--format", "safetensors", "--output", "out"],
            ["draw", "--ckpt_path", "runs/tiny", "--text", "a b", "--output", "out.png"],
        ],
        "from": [["convert", "--from", "runs/tiny", "--name", "out", "--attention", "linformer"]],
        "model.pretrained": [["fit", *broken, "--name", "next", "--model.pretrained", "runs/tiny"]],
    }
    for setting, tried in commands.items():
        for command in tried:
            line = output(command, tmp_path, status=2).splitlines()[-1]
            checkpoint = "last" if "14" in command else "best-0"
            assert line.startswith(f"error: {setting} is runs/tiny/checkpoints/{checkpoint}"), (command, line)
            assert line.endswith(f"{NAME}); allowed: a checkpoint of before they were"), (command, line)
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs/tiny/validate.json").exists()


def test_an_exported_model_is_looked_at_too(tiny, tmp_path):
    output(["fit", *tiny, "--trainer.max_steps", "1"], tmp_path)
    output(["export", "--ckpt_path", "runs/tiny", "--format", "safetensors", "--output", "out"], tmp_path)
    weights = load_file(tmp_path / "out/model.safetensors")
    weights[NAME][0, 0] = -math.inf
    save_file(weights, tmp_path / "out/model.safetensors")
    (tmp_path / "out/SHA256SUMS").unlink()  # which would report it first
    line = output(["fit", *tiny, "--name", "next", "--model.pretrained", "out"], tmp_path, status=2).splitlines()[-1]
    assert line.startswith(f"error: model.pretrained is out, whose weights are not finite ({NAME}); allowed: ")


def test_the_first_weight_is_named():
    check_finite({"a": torch.ones(2), "b": torch.arange(3)}, "from is x")
    with pytest.raises(ValueError, match=r"from is x, whose weights are not finite \(b\); allowed"):
        check_finite({"a": torch.ones(2), "b": torch.tensor([0.0, math.inf]), "c": torch.tensor(math.nan)}, "from is x")
