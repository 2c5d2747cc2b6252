"""AdamW and Muon: their settings, the parameter groups, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from torch import nn

from lit_linformer.model import EncoderLayer
from lit_linformer.model.projection import Projection
from lit_linformer.model.ranges import Count, OneOf, Range, Share, check_ranges
from lit_linformer.utils.errors import SettingError

SCHEDULES = ("linear", "cosine", "polynomial", "constant", "wsd")
OPTIMIZERS = ("adamw", "muon")
MUON = "muon"  # the name of its parameter group
# Settings of Optimization that are read only with one value of another setting.
READ_WITH = {"muon_lr_factor": ("optimizer", "muon"), "decay_share": ("schedule", "wsd"), "power": ("schedule", "polynomial")}
LearningRate = Annotated[float, Range(above=0, most=10000)]
Multiple = Annotated[float, Range(least=0, most=1000)]  # of another learning rate
WeightDecay = Annotated[float, Range(least=0, most=100)]
Beta = Annotated[float, Range(least=0, below=1)]


@dataclass
class Optimization:
    """The optimiser, and its learning rate over the steps.

    Args:
        lr: peak learning rate, of AdamW and of Muon.
        lr_batch_size: rows of an optimiser step for which lr was chosen. With R rows the rate becomes lr · √(R /
            lr_batch_size), as in the rule for Adam (Malladi et al., 2022, "On the SDEs and scaling rules for adaptive gradient
            algorithms"), whose betas and eps are not scaled here. None: lr is not scaled.
        weight_decay: weight decay of the matrices; norms, biases and embeddings have none.
        projection_lr_factor: learning rate of E and F, as a multiple of lr. AdamW moves every entry by about lr in a step, and
            those of E start at k/n or 0: with a factor of 1 the windows of block_mean vanish before the rest has learnt to use
            them.
        projection_weight_decay: weight decay of E and F.
        betas: AdamW's betas; a second one of 0.98 is RoBERTa's.
        eps: AdamW's epsilon; 1e-6 is RoBERTa's.
        schedule: how the rate falls after the warm-up: linear | cosine | polynomial | constant | wsd (warm-up, stable, decay:
            constant until the last steps, where it falls as 1 - √progress).
        decay_share: share of all steps, the last ones, in which the wsd schedule lowers the rate.
        power: exponent of the polynomial schedule.
        final_lr_factor: the final rate, as a multiple of lr.
        optimizer: adamw | muon: Muon for the matrices of the encoder's layers, AdamW for the rest. Muon's updates are scaled
            to the size of AdamW's, so that lr and weight_decay suit both.
        muon_lr_factor: learning rate of the matrices that Muon trains, as a multiple of lr.
    """

    lr: LearningRate = 1e-3
    lr_batch_size: Count | None = None
    weight_decay: WeightDecay = 0.01
    projection_lr_factor: Multiple = 0.02
    projection_weight_decay: WeightDecay = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Annotated[float, Range(above=0, most=1)] = 1e-6
    schedule: Annotated[str, OneOf(SCHEDULES)] = "linear"
    power: Annotated[float, Range(above=0, most=100)] = 2.0
    final_lr_factor: Share = 0.0
    decay_share: Annotated[float, Range(above=0, most=1)] | None = 0.3
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    muon_lr_factor: Multiple = 1.0

    def __post_init__(self) -> None:
        check_ranges("model.", Optimization, vars(self))
        if self.schedule == "wsd" and self.decay_share is None:
            raise SettingError("model.decay_share", None, "more than 0, up to 1", when="with model.schedule='wsd'")

    def hyper_parameters(self) -> dict[str, Any]:
        """Plain values, as checkpoints and hparams.yaml hold them."""
        return asdict(self) | {"betas": list(self.betas)}

    def lr_factor(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """The learning rate in optimiser step ``step`` (0: the first), as a multiple of the peak.

        It rises linearly over ``warmup_steps``, then falls to ``final_lr_factor`` at ``total_steps``: linear, cosine,
        polynomial ((1 - progress)**power; power 1 is linear); stays (constant); or stays until the last ``decay_share`` of
        all steps (wsd: then it falls as 1 - √progress, which did better than linear; Hägele et al., 2024, arXiv 2405.18392).
        """
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        start = warmup_steps
        if self.schedule == "wsd":
            start = max(warmup_steps, total_steps - round(self.decay_share * total_steps))
        progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
        shape = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "polynomial": (1.0 - progress) ** self.power,
            "wsd": 1.0 - math.sqrt(progress),
        }[self.schedule]
        return self.final_lr_factor + (1.0 - self.final_lr_factor) * shape


def endless(schedule: str, max_steps: int) -> ValueError:
    """The error to raise if training has no end, but its schedule needs one."""
    return SettingError(
        "trainer.max_steps",
        max_steps,
        "1 or more, since the schedule needs an end",
        when=f"with model.schedule={schedule!r}",
    )


def check_shardable(optimizer: str | None) -> None:
    """Raises SettingError for an optimiser that does not work with a strategy that shards each matrix."""
    if optimizer == "muon":
        divided = ", but trainer.strategy divides each matrix among the processes, and Muon takes them whole"
        raise SettingError("model.optimizer", "muon", "adamw", more=divided, when="with that strategy")


def parameter_groups(
    model: nn.Module,
    lr: float,
    settings: Optimization,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, Any]]:
    """Groups: decay (matrices), no_decay (norms, biases, embeddings), projection (E and F), and muon; empty ones left out.

    A shared parameter is in one group only. ``lr_scale`` maps a parameter's name to a factor of its learning rate; each factor
    has its own groups.
    """
    with_muon = hidden_matrices(model) if settings.optimizer == "muon" else set()
    kinds = {
        "decay": {"lr": lr, "weight_decay": settings.weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "projection": {"lr": lr * settings.projection_lr_factor, "weight_decay": settings.projection_weight_decay},
        MUON: {"lr": lr * settings.muon_lr_factor, "weight_decay": settings.weight_decay},
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
            elif parameter in with_muon:
                kind = MUON
            elif parameter.ndim < 2 or isinstance(module, nn.Embedding):
                kind = "no_decay"
            else:
                kind = "decay"
            members.setdefault((lr_scale(f"{prefix}.{name}"), kind), []).append(parameter)
    groups = []
    # The highest factor first: the first group's learning rate is the one that is logged.
    for scale in sorted({scale for scale, _ in members}, reverse=True):
        for kind, values in kinds.items():
            if params := members.get((scale, kind)):
                name = kind if scale == 1.0 else f"{kind} × {scale:.4g}"
                groups.append({"name": name, "params": params, **values, "lr": values["lr"] * scale})
    return groups


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """What Muon trains: the weights of the linear layers inside the encoder's layers, except those of projections."""
    layers = [module for layer in model.modules() if isinstance(layer, EncoderLayer) for module in layer.modules()]
    apart = {inner for module in layers if isinstance(module, Projection) for inner in module.modules()}
    return {module.weight for module in layers if isinstance(module, nn.Linear) and module not in apart}


def layer_decay(decay: float, num_layers: int) -> Callable[[str], float]:
    """``lr_scale`` for layer-wise learning-rate decay (Howard and Ruder, 2018; ELECTRA's and BEiT's fine-tuning).

    The head's factor is 1, the last layer's ``decay``, that of the layer before it ``decay``², and so on down to the
    embeddings. An E that all layers share has the first layer's factor, a final norm the last layer's.
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
