"""Files: written so that they are whole at any moment, read as far as they are whole."""

import contextlib
import csv
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes beside the target, then renames: whoever reads it meanwhile finds the old file or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_rows(path: Path) -> list[dict[str, float]]:
    """A CSV file's rows as numbers, those that are whole; none where there is no such file."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(TypeError, ValueError):
                found.append({key: float(value) for key, value in row.items()})
    return found
