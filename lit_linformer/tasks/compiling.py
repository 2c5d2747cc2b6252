"""torch.compile: which parts of a model are compiled for training, and whether that works on this machine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lit_linformer.model import Encoder, MaskedLanguageModel
from lit_linformer.utils import compat
from lit_linformer.utils.errors import SettingError, first_line


def compile_training(net: nn.Module, dynamic: bool | None = False) -> None:
    """Compiles each layer of the encoder separately and, for a masked language model, the loss over the vocabulary.

    In evaluation mode they run uncompiled. Layers of one kind share a graph: twelve take no longer to compile than two. The
    state dict does not change, and a copy of the net is compiled, too.

    Args:
        net: with an ``encoder``.
        dynamic: whether batches differ in shape, as for torch.compile; None: torch.compile finds out.
    """
    if not isinstance(getattr(net, "encoder", None), Encoder):
        raise SettingError("model.compile", True, "false", more=f", but {type(net).__name__} has no encoder to compile")
    compat.many_recompilations()  # for models whose layers differ in k
    forwards = {kind: torch.compile(kind.forward, dynamic=dynamic) for kind in dict.fromkeys(map(type, net.encoder.layers))}
    for layer in net.encoder.layers:
        layer.forward = partial(_run, forwards[type(layer)], type(layer).forward, layer)
    if isinstance(net, MaskedLanguageModel):
        loss_of = type(net).loss_of
        net.loss_of = partial(_run, torch.compile(loss_of, dynamic=dynamic), loss_of, net)


def _run(compiled: Callable, plain: Callable, module: nn.Module, *inputs: Any) -> Any:
    return (compiled if module.training else plain)(module, *inputs)


def check_compiler(device: torch.device) -> None:
    """Raises ValueError, in one line, if torch.compile does not work here: it is tried on a small function.

    The first time on a machine this takes some seconds, most of which the model's own compilation then saves.
    """
    try:
        torch.compile(_increase, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # torch's own, whose module and name differ between versions
        compiler = "a C++ compiler" if device.type == "cpu" else "Triton, a C compiler"
        raise SettingError(
            "model.compile",
            True,
            f"false, or install what it needs on a {device.type} device: {compiler} and Python's headers (python3-dev)",
            more=f", but torch.compile fails here: {first_line(error)}",
        ) from error


def _increase(x: torch.Tensor) -> torch.Tensor:
    return x + 1
