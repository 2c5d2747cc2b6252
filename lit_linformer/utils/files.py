"""Files: written atomically, and read as far as they are complete."""

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lit_linformer.utils.errors import SettingError


def write_text(path: Path, text: str) -> None:
    """Writes a temporary file, then renames it: whoever reads meanwhile finds the old file or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    with _replacing(path) as file:
        file.write(content)


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Writes lines as ``write_text`` does, with line ends, but only one in memory at a time; returns their number."""
    with _replacing(path) as file:
        return sum(file.write(f"{line}\n".encode()) > 0 for line in lines)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the path's place when complete. An OSError names the path, which a full disk's alone does not."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_own(folder: Path, names: Iterable[str], main: str, command: str) -> None:
    """Raises ValueError, in one line, if --output is a file, or holds one that the command would overwrite but did not write.

    names: the files that it writes; main: the one that begins with the command line that wrote them all.
    """
    if folder.exists() and not folder.is_dir():
        raise SettingError("output", folder, "a folder, or a name that is free", more=", which is no folder")
    there = [name for name in names if (folder / name).exists()]
    if not there:
        return
    written = False
    with contextlib.suppress(OSError), open(folder / main, encoding="utf-8", errors="replace") as file:
        written = f"python run.py {command}" in file.read(1 << 16)
    if not written:
        raise SettingError(
            "output", folder, "another folder", more=f", which holds {there[0]}, and `{command}` did not write that"
        )


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    write_text(path, json_text(content, indent=indent) + "\n")


def json_text(content: Any, **form: Any) -> str:
    """The content as standard JSON, which has no NaN and no infinity: these become null."""
    return json.dumps(_finite(content), allow_nan=False, ensure_ascii=False, **form)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(path: Path) -> dict[str, Any] | None:
    """The object that a JSON file holds; None if it is missing, incomplete or holds something else."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None


def value_at(content: Any, keys: Iterable[str]) -> Any:
    """The value under these keys, one after the other, in nested mappings; None if there is none."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, their keys joined by dots."""
    if not isinstance(content, dict):
        return {prefix: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def read_rows(path: Path) -> list[dict[str, float]]:
    """The complete rows of a CSV file, as numbers; none if there is no such file."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(TypeError, ValueError):
                found.append({key: float(value) for key, value in row.items()})
    return found


def last_line(log: Path | None) -> str:
    """The last error line of a log's last command, or else its last line; nothing without a log."""
    if log is None or not log.is_file():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    start = max((number for number, line in enumerate(lines) if line.startswith("$ ")), default=-1) + 1
    said = [line for line in lines[start:] if line]
    return ([line for line in said if line.startswith("error: ")] or said or [""])[-1]
