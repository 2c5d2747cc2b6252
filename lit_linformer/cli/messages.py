"""An error in one line."""

import sys
import sysconfig
import traceback
from pathlib import Path

from lit_linformer.utils.errors import user_error

OURS = Path(__file__).resolve().parents[1]
INSTALLED = [Path(folder).resolve() for folder in {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}]


def one_line(error: Exception) -> str | None:
    """One line for an error that a user can fix; None for what looks like a bug of ours, whose traceback is worth more."""
    if (told := user_error(error)) is not None:
        return told  # without what follows, which imports Lightning
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lit_linformer.cli.failures import connection_error

    if line := connection_error(error):
        return line
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | MisconfigurationException | ModuleNotFoundError):
        line = " ".join(str(error).split())
        return f"{line}{place(error)}" if line else None
    return None


def place(error: Exception) -> str:
    """Where in the user's own code an error was raised, or what was raised below it: it may be a bug there. "": elsewhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(OURS):
            return ""
        if file.is_file() and not any(file.is_relative_to(folder) for folder in INSTALLED):
            return f" ({frame.filename}, line {frame.lineno}; --traceback shows more)"
    return ""
