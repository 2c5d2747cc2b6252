"""The errors of model/errors.py for those who refuse a mistake before torch is imported, as its package would."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def without_torch(name: str) -> ModuleType:
    """A module of model/ that needs nothing but Python; the same one that its package imports later, or has imported."""
    name = f"lit_linformer.model.{name}"
    if name not in sys.modules:
        path = Path(__file__).parents[2].joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if TYPE_CHECKING:
    from lit_linformer.model.errors import SettingError, UserError
else:
    SettingError, UserError = (getattr(without_torch("errors"), name) for name in ("SettingError", "UserError"))


def user_error(error: BaseException | None) -> UserError | None:
    """The user's mistake behind what has been raised, which a library may have wrapped in errors of its own; None: there is none."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


__all__ = ["SettingError", "UserError", "user_error", "without_torch"]
