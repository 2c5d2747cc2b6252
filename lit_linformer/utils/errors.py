"""The errors of model/errors.py, without importing torch, as its package does: for what is refused before torch is needed."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

OF_ANOTHER_PROCESS = re.compile(r"^lit_linformer(?:\.\w+)+: (.+)$", re.MULTILINE)


def without_torch(name: str) -> ModuleType:
    """A module of model/ that needs nothing but Python; the same object that its package imports later, or has imported."""
    name = f"lit_linformer.model.{name}"
    if name not in sys.modules:
        path = Path(__file__).parents[2].joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if TYPE_CHECKING:
    from lit_linformer.model.errors import SettingError, UserError, first_line, meant, shortened, shown
else:
    SettingError, UserError, first_line, meant, shortened, shown = (
        getattr(without_torch("errors"), name)
        for name in ("SettingError", "UserError", "first_line", "meant", "shortened", "shown")
    )


def user_error(error: BaseException | None) -> str | None:
    """The message of the UserError behind an error, which a library may have wrapped in its own; None: there is none."""
    # From another process torch passes on only the traceback's text, in which a line begins with the name of the class.
    if told := OF_ANOTHER_PROCESS.findall(str(error)):
        return told[-1]
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if error is None else " ".join(str(error).split())


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine ran out of memory, as torch's allocators and the libraries below them report it."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # cuBLAS and cuDNN: CUBLAS_STATUS_ALLOC_FAILED
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


__all__ = [
    "SettingError",
    "UserError",
    "first_line",
    "meant",
    "out_of_memory",
    "shortened",
    "shown",
    "user_error",
    "without_torch",
]
