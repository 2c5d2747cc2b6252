"""AdamW's parameter groups, and the learning rate as a function of the step."""

import math
from typing import Any

from torch import nn

from lit_linformer.model.projection import Projection

SCHEDULES = ("linear", "cosine", "polynomial", "constant")


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float, projection_lr_factor: float, projection_weight_decay: float
) -> list[dict[str, Any]]:
    """Three groups: decay (matrices), no_decay (norms, biases, embeddings) and projection (E and F), empty ones left out.

    A parameter that is used twice is in one group, once.
    """
    groups = {
        "decay": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "projection": {"lr": lr * projection_lr_factor, "weight_decay": projection_weight_decay},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if isinstance(module, Projection):
                members["projection"].append(parameter)
            elif parameter.ndim < 2 or isinstance(module, nn.Embedding):
                members["no_decay"].append(parameter)
            else:
                members["decay"].append(parameter)
    return [{"name": name, "params": members[name], **groups[name]} for name in groups if members[name]]


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
