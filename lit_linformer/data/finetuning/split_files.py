"""The files of a split in a folder: in one piece or in shards, plain or compressed, or a folder for each class."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_linformer.utils.errors import UserError

SHARD = r"(?:-\d{5}-of-(?P<shards>\d{5})(?:-[0-9a-f]{16})?)?"  # older data sets have a hash there
FILE = r"(?i:(?P<kind>\.csv|\.tsv|\.jsonl|\.ndjson|\.json|\.parquet)(?P<packed>\.gz|\.xz|\.zst)?)"


@dataclass
class SplitFiles:
    """Where a split was found: the kind of its files (".tsv", …, "file", "folders" or "hub"), and the files."""

    kind: str
    name: str
    files: list[Path]


def find_files(folder: Path, name: str, classes: Sequence[str], setting: str) -> Iterator[SplitFiles]:
    """The sets of files in the folder that may be the split ``name``; ValueError, naming ``setting``, if a shard is missing."""
    found: dict[tuple, list[Path]] = {}  # plain and compressed, in one piece and in shards: each is a set of its own
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(re.escape(name) + SHARD + FILE, path.name)
        if match and path.is_file():
            found.setdefault((match["kind"].lower(), match["packed"], match["shards"]), []).append(path)
    for (kind, _, shards), files in found.items():
        if shards and len(files) != int(shards):
            raise UserError(f"{setting}: {files[0]} is one of {len(files)} shards", f"all {int(shards)} of its name")
        yield SplitFiles(kind, str(files[0]), files)
    folders = [folder / name / label for label in classes if "/" not in label]
    if any(path.is_dir() for path in folders):
        files = [file for path in folders if path.is_dir() for file in sorted(path.glob("*.txt"))]
        yield SplitFiles("folders", str(folder / name), files)
