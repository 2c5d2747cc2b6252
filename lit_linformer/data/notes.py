"""Notes to the user while data are prepared, printed once however many processes there are."""

import sys

from lit_linformer.utils.signals import is_first_process


def note(message: str) -> None:
    if is_first_process():
        print(f"note: {message}", file=sys.stderr, flush=True)
