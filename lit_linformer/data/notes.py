"""Notes to the user while data are prepared, printed once for any number of processes."""

import sys

from lit_linformer.utils.signals import is_first_process


def note(message: str) -> None:
    if is_first_process():
        print(f"note: {message}", file=sys.stderr, flush=True)
