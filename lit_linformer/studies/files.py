"""Files that are whole at any moment."""

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
