"""Row files: labelled rows of one or two texts on the disk, as token ids; written once, memory-mapped.

The files hold every text whole; it is cut when it is read, so changing max_length needs no new tokenising.

    texts-<fingerprint>/ids.bin        all texts of all rows, one after the other; uint16, or uint32 for more than 65,536 ids
    texts-<fingerprint>/offsets.bin    where each text starts in it, and where the last one ends; int64
    texts-<fingerprint>/labels.bin     class numbers (-1: none) as int32, values (NaN: none) as float32, or where a row may have
                                       several labels a 0 or 1 for each class (-1: not known) as int8
    texts-<fingerprint>/hashes.bin     a hash of each row's texts, to find rows that occur in two splits; uint64
    texts-<fingerprint>/meta.json      counts, checksums, and all that shaped the files

Shapes: T texts per row (1, or 2 for pairs); C classes.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_linformer.data.cache import damaged, fingerprint, read_meta, write_meta
from lit_linformer.data.checksums import SHARD_BYTES, ShardWriter, make_verified
from lit_linformer.data.progress_bar import Preparing

FORMAT = 1  # to be increased when the files' meaning changes, so that old caches are not found
FILES = ["ids.bin", "offsets.bin", "hashes.bin", "labels.bin"]

# ids of each text of a row, its label, a hash of its texts
Encoded = tuple[list[np.ndarray], int | float | Sequence[int] | None, int]


class Labels(NamedTuple):
    """How labels are stored: their dtype, what stands for none, and how many numbers a row has."""

    dtype: type
    none: float
    width: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the labels of R rows: (R,), or (R, C)."""
        return (-1,) if self.width == 1 else (-1, self.width)

    def array(self, labels: list) -> np.ndarray:
        missing = self.none if self.width == 1 else [self.none] * self.width
        return np.array([missing if label is None else label for label in labels], self.dtype).reshape(self.shape)

    def known(self, labels: np.ndarray) -> bool:
        """Whether all rows have labels."""
        return bool((np.isfinite(labels) if np.isnan(self.none) else labels != self.none).all())


CLASSES, VALUES = Labels(np.int32, -1), Labels(np.float32, np.nan)


def several_labels(classes: int) -> Labels:
    """Any number of so many classes a row."""
    return Labels(np.int8, -1, classes)


def make_row_files(
    cache: Path,
    inputs: dict,
    rows: Callable[[Preparing], Iterable[Encoded]],
    title: str,
    texts: int,
    labels: Labels,
    vocab_size: int,
) -> Path:
    """The folder of a split's files, which is made if it does not exist.

    inputs: JSON-able description of all that shapes the files; rows: yields the rows, and updates the progress bar; title: of
    that bar; texts: T; labels: how the rows' labels are stored.
    """

    def make(folder: Path) -> None:
        with Preparing(title) as shown:
            _write(folder, rows(shown), np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), texts, labels, inputs)

    folder, inputs = row_folder(cache, inputs), {"format": FORMAT} | inputs
    return make_verified(folder, make, FILES)


def as_given(value: float) -> float:
    """A regression's label as written in its file: 0.2, although it is stored as the float32 0.20000000298."""
    stored = np.float32(value)
    return float(str(stored)) if stored == value else value  # a user's own data may have float64


def row_folder(cache: Path, inputs: dict) -> Path:
    """The folder that `make_row_files` makes."""
    return cache / f"texts-{fingerprint({'format': FORMAT} | inputs)}"


def row_hash(texts: bytes) -> int:
    """A hash of a row's texts, which may be encoded in any way."""
    return int.from_bytes(hashlib.blake2b(texts, digest_size=8).digest(), "little")


def name_of(folder: Path, rows: np.ndarray) -> str:
    """A name for rows of a folder's files, which differs for other rows or other files."""
    return f"{folder.name}-{hashlib.sha256(rows.tobytes()).hexdigest()[:8]}"


def _write(folder: Path, rows: Iterable[Encoded], dtype: np.dtype, texts: int, stored: Labels, inputs: dict) -> None:
    offsets, labels, hashes = [0], [], []
    with closing(ShardWriter(folder / "ids.bin")) as file:
        for ids_of_row, label, hashed in rows:
            for ids in ids_of_row:
                offsets.append(offsets[-1] + len(ids))
                file.write(ids.astype(dtype, copy=False))
            file.end_shard(SHARD_BYTES)
            labels.append(label)
            hashes.append(hashed)
        file.end_shard()
    arrays = {
        "offsets": np.array(offsets, np.int64),
        "hashes": np.array(hashes, np.uint64),
        "labels": stored.array(labels),
    }
    checksums = {"ids.bin": file.shards}
    for name, array in arrays.items():
        with closing(ShardWriter(folder / f"{name}.bin")) as file:
            file.write(array)
            file.end_shard()
        checksums[f"{name}.bin"] = file.shards
    meta = {"format": FORMAT, "dtype": dtype.name, "texts": texts, "rows": len(labels), "tokens": offsets[-1]}
    write_meta(folder, meta | {"checksums": checksums, "inputs": inputs})


class RowFiles:
    """A split's files, memory-mapped; `labels`: how the rows' labels are stored."""

    def __init__(self, folder: Path, labels: Labels):
        self.folder = folder
        meta = read_meta(folder)
        self.rows, self.texts = meta["rows"], meta["texts"]
        self.dtype = np.dtype(meta["dtype"])
        self.offsets = self._read("offsets", np.int64, self.rows * self.texts + 1)
        self.hashes = self._read("hashes", np.uint64, self.rows)
        self.labels = self._read("labels", labels.dtype, self.rows * labels.width).reshape(labels.shape)
        if (folder / "ids.bin").stat().st_size != meta["tokens"] * self.dtype.itemsize:
            raise damaged(folder / "ids.bin", f"it should hold {meta['tokens']:,} tokens")
        self.labelled = labels.known(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """(rows, T): tokens of each text, uncut."""
        return np.diff(self.offsets).reshape(self.rows, self.texts)

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.memmap(self.folder / "ids.bin", self.dtype, "r") if self.offsets[-1] else np.zeros(0, self.dtype)

    def ids(self, row: int) -> list[np.ndarray]:
        """Token ids of each of a row's T texts."""
        first = row * self.texts
        return [self._ids[self.offsets[i] : self.offsets[i + 1]] for i in range(first, first + self.texts)]

    def _read(self, name: str, dtype, count: int) -> np.ndarray:
        array = np.fromfile(self.folder / f"{name}.bin", dtype)
        if len(array) != count:
            raise damaged(self.folder / f"{name}.bin", f"it should hold {count:,} numbers")
        return array

    def __getstate__(self):
        # a memmap would be pickled with all that it maps: spawned workers open the file again
        return {name: value for name, value in self.__dict__.items() if name != "_ids"}
