"""What preparation has to tell, on the terminal and once, whatever the number of processes."""

import sys
from collections.abc import Sequence

from lit_linformer.utils.signals import is_first_process


def note(message: str) -> None:
    if is_first_process():
        print(f"note: {message}", file=sys.stderr, flush=True)


def first_few(numbers: Sequence[int]) -> str:
    """ "2, 5, 9"; of more than five the first ones and an ellipsis."""
    return ", ".join(map(str, numbers[:5])) + ", …" * (len(numbers) > 5)
