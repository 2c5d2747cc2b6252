"""Weights of 16 bits: rounded, told what it changes, stored."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lit_linformer.export.verify import random_inputs, read
from lit_linformer.runs.exported import WEIGHTS
from lit_linformer.runs.trained_model import TrainedModel


@torch.inference_mode()
def round_weights(model: TrainedModel) -> str:
    """In place, the tensors staying float32: so it computes with what will be stored. A line that says what it changes."""
    before = copy.deepcopy(model.net)
    for tensor in model.net.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
    largest = change = 0.0
    for ids, mask in random_inputs(model):
        real = mask.bool()
        logits, rounded = (read(model, net(ids, real), real) for net in (before, model.net))
        largest = max(largest, logits.abs().max().item())
        change = max(change, (logits - rounded).abs().max().item())
    return (
        f"weights rounded to bfloat16: on the same inputs the logits, of up to {largest:.3g}, change by {change:.2g} at most; "
        "they are computed in float32"
    )


def store_rounded(folder: Path) -> None:
    """model.safetensors in bfloat16."""
    weights = {name: t.bfloat16() if t.is_floating_point() else t for name, t in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
