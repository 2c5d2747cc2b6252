"""torch.compile: whether it works here."""

import torch

from lit_linformer.utils.errors import SettingError, first_line


def check_compiler(device: torch.device) -> None:
    """ValueError, in one line, where torch.compile finds no compiler: it is tried on a small function.

    What it needs: g++ and Python's headers for a CPU, Triton and a C compiler for a GPU. Some seconds the first time on a
    machine, most of them for what the model's own compilation then finds done.
    """
    try:
        torch.compile(_increase, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # torch's own, whose place and name differ from version to version
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        raise SettingError(
            "model.compile",
            True,
            f"false, or install what it needs on a {device.type} device: {needs}",
            more=f", but torch.compile fails here: {first_line(error)}",
        ) from error


def _increase(x: torch.Tensor) -> torch.Tensor:
    return x + 1
