"""Encoded rows: labelled texts → one file of token ids on the disk → batches of bos A eos, or bos A eos eos B eos.

The files hold every text whole; it is cut when it is read, so another max_length needs no new tokenising.

    texts-<fingerprint>/ids.bin        all texts of all rows, one after the other; uint16, or uint32 for more than 65,536 ids
    texts-<fingerprint>/offsets.bin    where each text starts in it, and where the last one ends; int64
    texts-<fingerprint>/labels.bin     class numbers (-1: none) as int32, or values (NaN: none) as float32
    texts-<fingerprint>/hashes.bin     a hash of each row's texts, to find rows that occur in two splits; uint64
    texts-<fingerprint>/meta.json      counts, checksums, and all that shaped the files

Shapes: B rows of the file, T texts a row (1, or 2 for pairs), R rows of tokens (B, more if long texts have several
windows), L tokens of the longest of them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset

from lit_linformer.data.cache import damaged, fingerprint, make_once, read_json
from lit_linformer.data.checksums import SHARD_BYTES, ShardWriter, mark_verified, verify
from lit_linformer.data.finetuning.labelled_rows import LabelledSource, Row
from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.loader import FILLER
from lit_linformer.data.pieces import encode_texts, size_of
from lit_linformer.data.pretraining.masking import IGNORED
from lit_linformer.data.progress_bar import Progress
from lit_linformer.data.tokenizer import Tokenizer

FORMAT = 1  # raise it when the files' meaning changes: old caches are then not found
FILES = ["ids.bin", "offsets.bin", "hashes.bin", "labels.bin"]
BATCH_CHARACTERS = 1_000_000  # read at once


def make_text_files(cache: Path, source: LabelledSource, split: str, tokenizer: Tokenizer, progress: bool = True) -> Path:
    """The folder of a split's files, made if it is not there.

    Args:
        cache: Folder that holds it.
        source: Where the rows are.
        split: Which of them.
        tokenizer: Its whole content is part of the fingerprint.
        progress: False for silence.
    """
    task = source.task
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer.sha256,
        "source": source.stamp(split),
        "split": split,
        "columns": [task.columns, task.label_column, task.headerless],
        "labels": [task.labels, task.label_range],
        "keep_empty": source.keep_empty,
    }

    def make(folder: Path) -> None:
        offsets, labels, hashes = [0], [], []
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
        made.append(folder)
        with (
            Progress(f"Tokenising {source.source}, {split}", show=progress) as shown,
            closing(ShardWriter(folder / "ids.bin")) as file,
        ):
            for batch in _batches(source.rows(split)):
                texts = [text.strip() for row in batch for text in row.texts]
                for ids in encode_texts(texts, tokenizer, dtype):
                    offsets.append(offsets[-1] + len(ids))
                    file.write(ids)
                file.end_shard(SHARD_BYTES)
                labels += [row.label for row in batch]
                hashes += [text_hash(row.texts) for row in batch]
                shown.update(sum(map(size_of, texts)), source.fraction)
            file.end_shard()
        none = -1 if task.labels else np.nan
        arrays = {
            "offsets": np.array(offsets, np.int64),
            "hashes": np.array(hashes, np.uint64),
            "labels": np.array([none if label is None else label for label in labels], _label_dtype(task.labels)),
        }
        checksums = {"ids.bin": file.shards}
        for name, array in arrays.items():
            with closing(ShardWriter(folder / f"{name}.bin")) as file:
                file.write(array)
                file.end_shard()
            checksums[f"{name}.bin"] = file.shards
        if source.skipped:
            rank_zero_warn(f"{source.source}: {source.skipped} lines of the {split} split have too few fields: skipped")
        counts = {"rows": len(labels), "tokens": offsets[-1], "skipped": source.skipped}
        meta = {"format": FORMAT, "dtype": dtype.name, "texts": len(task.columns), **counts}
        (folder / "meta.json").write_text(json.dumps(meta | {"checksums": checksums, "inputs": inputs}, indent=1))

    made: list[Path] = []
    folder = make_once(cache / f"texts-{fingerprint(inputs)}", make)
    if made:
        mark_verified(folder, FILES)
    return folder


def verify_text_files(folder: Path, tokenizer: Tokenizer, when: str) -> None:
    """ValueError where the files are not what was written; `when` as `checksums.verify` has it."""
    verify(folder, read_json(folder / "meta.json"), FILES, len(tokenizer), when)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += sum(map(len, row.texts))
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def text_hash(texts: tuple[str, ...]) -> int:
    """The same for rows with the same texts; white space around them does not count."""
    text = json.dumps([text.strip() for text in texts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _label_dtype(labels) -> type:
    return np.int32 if labels else np.float32


class TextFiles:
    """A split's files, memory-mapped.

    Args:
        folder: What `make_text_files` returned.
        classes: Labels are class numbers, not values.
    """

    def __init__(self, folder: Path, classes: bool):
        self.folder = folder
        meta = read_json(folder / "meta.json")
        self.rows, self.texts, self._ids = meta["rows"], meta["texts"], None
        self.dtype = np.dtype(meta["dtype"])
        self.offsets = self._read("offsets", np.int64, self.rows * self.texts + 1)
        self.hashes = self._read("hashes", np.uint64, self.rows)
        self.labels = self._read("labels", _label_dtype(classes), self.rows)
        if (folder / "ids.bin").stat().st_size != meta["tokens"] * self.dtype.itemsize:
            raise damaged(folder / "ids.bin", f"it should hold {meta['tokens']:,} tokens")
        self.labelled = bool((self.labels >= 0).all()) if classes else bool(np.isfinite(self.labels).all())

    @property
    def lengths(self) -> np.ndarray:
        """(rows, T): tokens of each text, uncut."""
        return np.diff(self.offsets).reshape(self.rows, self.texts)

    def ids(self, row: int) -> list[np.ndarray]:
        """Token ids of a row's texts."""
        if self._ids is None:
            file = self.folder / "ids.bin"
            self._ids = np.memmap(file, self.dtype, "r") if file.stat().st_size else np.zeros(0, self.dtype)
        first = row * self.texts
        return [self._ids[self.offsets[i] : self.offsets[i + 1]] for i in range(first, first + self.texts)]

    def _read(self, name: str, dtype, count: int) -> np.ndarray:
        array = np.fromfile(self.folder / f"{name}.bin", dtype)
        if len(array) != count:
            raise damaged(self.folder / f"{name}.bin", f"it should hold {count:,} numbers")
        return array

    def __getstate__(self):
        # a memmap would be pickled with all that it maps: spawned workers open the file again
        return self.__dict__ | {"_ids": None}


class EncodedTexts(Dataset):
    """Rows as batches. An item is a whole batch, its key the (epoch, index) of every row; FILLER gives bos eos.

    Items hold input_ids (R, L) int64, padded on the right to the longest row of the batch; attention_mask (R, L) bool,
    only where a row has pads; labels (B,) int64, or float32 of a regression (absent where there are none; -100 in a
    filler row); index (B,) int64, the row's number in its file from 0, -1 for a filler; and, only if windows are allowed,
    document (R,) int64, which of the B a row of tokens belongs to.

    Args:
        files: A split's files.
        layout: How texts become rows of tokens.
        rows: Which rows to present, in this order; None: all, as they are in the file.
        by_length: Present the longest first, so that consecutive batches hold rows of a length.
    """

    def __init__(self, files: TextFiles, layout: RowLayout, rows: np.ndarray | None = None, by_length: bool = False):
        self.files, self.layout = files, layout
        self.rows = np.arange(files.rows) if rows is None else rows
        lengths = layout.lengths(files.lengths[self.rows])
        if by_length:
            order = np.argsort(-lengths, kind="stable")
            self.rows, lengths = self.rows[order], lengths[order]
        self.lengths = lengths  # tokens that each row costs, with bos and eos, over all its windows
        self.labelled = files.labelled

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        rows = [FILLER if index == FILLER else int(self.rows[index]) for _, index in keys]
        batch = self.layout.batch([None if row == FILLER else self.files.ids(row) for row in rows])
        batch["index"] = torch.tensor(rows)
        if self.labelled:
            labels = [IGNORED if row == FILLER else self.files.labels[row].item() for row in rows]
            dtype = torch.float32 if self.files.labels.dtype == np.float32 else torch.int64
            batch["labels"] = torch.tensor(labels, dtype=dtype)
        return batch
