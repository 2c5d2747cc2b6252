"""The safetensors format: model.safetensors, config.json, tokenizer.json; and 16-bit weights, for huggingface too."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_linformer.export import load
from lit_linformer.export.verify import random_inputs, read
from lit_linformer.runs.exported import CONFIG, WEIGHTS
from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.utils.files import write_json


def write(model: TrainedModel, folder: Path) -> None:
    """Writes config.json, tokenizer.json, if there is a tokenizer, and model.safetensors."""
    write_config(model, folder)
    weights = {name: tensor.contiguous() for name, tensor in model.net.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def logits(model: TrainedModel, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """The written model, as a function of input_ids and attention_mask (B, N)."""
    net, _ = load(folder)
    return lambda ids, mask: net(ids, mask.bool())


def write_config(model: TrainedModel, folder: Path) -> None:
    """Writes config.json and, if there is a tokenizer, tokenizer.json."""
    write_json(folder / CONFIG, model.config(), indent=2)
    if model.tokenizer is not None:
        model.tokenizer.save(folder / "tokenizer.json")


@torch.inference_mode()
def round_weights(model: TrainedModel) -> str:
    """Rounds the weights in place, in float32 tensors, so that the model computes with what will be stored.

    Returns a line on the effect.
    """
    before = copy.deepcopy(model.net)
    for tensor in model.net.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
    largest = change = 0.0
    for ids, mask in random_inputs(model):
        real = mask.bool()
        exact, rounded = (read(model, net(ids, real), real) for net in (before, model.net))
        largest = max(largest, exact.abs().max().item())
        change = max(change, (exact - rounded).abs().max().item())
    return (
        f"weights rounded to bfloat16: on the same inputs the logits, of up to {largest:.3g}, change by {change:.2g} at most; "
        "they are computed in float32"
    )


def store_rounded(folder: Path) -> None:
    """Rewrites model.safetensors in bfloat16."""
    weights = {name: t.bfloat16() if t.is_floating_point() else t for name, t in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
