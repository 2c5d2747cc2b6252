"""An error in one line."""

from lit_linformer.utils.errors import user_error


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
        return " ".join(str(error).split()) or None
    return None
