"""AdamW's parameter groups, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Annotated, Any

from torch import nn

from lit_linformer.model.projection import Projection
from lit_linformer.model.ranges import OneOf, Range

SCHEDULES = ("linear", "cosine", "polynomial", "constant")
Schedule = Annotated[str, OneOf(SCHEDULES)]
LearningRate = Annotated[float, Range(above=0, most=10000)]
Multiple = Annotated[float, Range(least=0, most=1000)]  # of another learning rate
WeightDecay = Annotated[float, Range(least=0, most=100)]
Beta = Annotated[float, Range(least=0, below=1)]
Epsilon = Annotated[float, Range(above=0, most=1)]
Power = Annotated[float, Range(above=0, most=100)]


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    projection_lr_factor: float,
    projection_weight_decay: float,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, Any]]:
    """Three groups: decay (matrices), no_decay (norms, biases, embeddings) and projection (E and F), empty ones left out.

    A parameter that is used twice is in one group, once. ``lr_scale`` multiplies a parameter's learning rate, by its name;
    each scale makes three groups of its own.
    """
    kinds = {
        "decay": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "projection": {"lr": lr * projection_lr_factor, "weight_decay": projection_weight_decay},
    }
    members: dict[tuple[float, str], list[nn.Parameter]] = {}
    seen = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if isinstance(module, Projection):
                kind = "projection"
            elif parameter.ndim < 2 or isinstance(module, nn.Embedding):
                kind = "no_decay"
            else:
                kind = "decay"
            members.setdefault((lr_scale(f"{prefix}.{name}"), kind), []).append(parameter)
    groups = []
    # The highest rate first: its group is the one whose rate is logged.
    for scale in sorted({scale for scale, _ in members}, reverse=True):
        for kind, settings in kinds.items():
            if params := members.get((scale, kind)):
                name = kind if scale == 1.0 else f"{kind} × {scale:.4g}"
                groups.append({"name": name, "params": params, **settings, "lr": settings["lr"] * scale})
    return groups


def layer_decay(decay: float, num_layers: int) -> Callable[[str], float]:
    """``lr_scale`` for layer-wise learning-rate decay (Howard and Ruder, 2018; ELECTRA's and BEiT's fine-tuning).

    The head has 1, the last layer ``decay``, the one before its square, and so on down to the embeddings. E shared by all
    layers goes with the first of them; a final norm with the last.
    """

    def scale(name: str) -> float:
        below = name.partition("encoder.")[2]
        if not below:
            return 1.0
        if below.startswith("layers."):
            depth = int(below.split(".")[1]) + 1
        else:
            depth = {"E": 1, "final_norm": num_layers}.get(below.split(".")[0], 0)
        return decay ** (num_layers + 1 - depth)

    return scale


def lr_factor(step: int, schedule: str, warmup_steps: int, total_steps: int, final: float = 0.0, power: float = 2.0) -> float:
    """What the peak learning rate is multiplied by before optimiser step ``step`` (0 the first).

    Rises linearly over ``warmup_steps``, then falls to ``final`` at ``total_steps``: linear, cosine, polynomial
    ((1 - progress)**power; power 1 is linear), or stays (constant).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "polynomial": (1.0 - progress) ** power,
    }[schedule]
    return final + (1.0 - final) * shape
