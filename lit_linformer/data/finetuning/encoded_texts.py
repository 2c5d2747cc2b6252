"""Encoded rows: labelled texts → one file of token ids on the disk → batches of bos A eos, or bos A eos eos B eos.

Shapes: B rows of the file, T texts per row (1, or 2 for pairs), R rows of tokens (B, or more if long texts have several
windows), L tokens of the longest of them.
"""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset

from lit_linformer.data.finetuning.labelled_rows import LabelledRow, LabelledSource
from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.finetuning.text_tasks import TextTask
from lit_linformer.data.loader import FILLER
from lit_linformer.data.pieces import encode_texts, size_of
from lit_linformer.data.progress_bar import Preparing
from lit_linformer.data.row_files import CLASSES, VALUES, Encoded, Labels, RowFiles, make_row_files, row_hash, several_labels
from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.model.heads import IGNORED


def encoded_files(cache: Path, source: LabelledSource, split: str, tokenizer: Tokenizer) -> Path:
    """The folder of a split's files, which is made if it does not exist."""
    task = source.task

    def rows(shown: Preparing) -> Iterator[Encoded]:
        read: deque[LabelledRow] = deque()  # but not yet tokenised

        def texts() -> Iterator[str]:
            for row in source.rows(split):
                read.append(row)
                yield from (text.strip() for text in row.texts)

        ids = encode_texts(texts(), tokenizer)
        for first in ids:
            row = read.popleft()
            yield [first, *(next(ids) for _ in row.texts[1:])], row.label, text_hash(row.texts)
            shown.update(sum(map(size_of, row.texts)), source.fraction)
        if source.skipped:
            rank_zero_warn(f"{source.source}: {source.skipped} lines of the {split} split have too few fields: skipped")

    title = f"Tokenising {source.source}, {split}"
    inputs = inputs_of(source, split, tokenizer)
    return make_row_files(cache, inputs, rows, title, len(task.columns), stored_labels(task), len(tokenizer))


def stored_labels(task: TextTask) -> Labels:
    """How the labels of a task are stored."""
    if task.labels is None:
        return VALUES
    return several_labels(len(task.labels)) if task.several_labels else CLASSES


def inputs_of(source: LabelledSource, split: str, tokenizer: Tokenizer) -> dict:
    """All that shapes a split's files; the tokenizer's whole content is part of it."""
    task = source.task
    return {
        "tokenizer": tokenizer.of_plain_text,
        "source": source.stamp(split),
        "split": split,
        "columns": [task.columns, task.label_column, task.headerless],
        "labels": [task.labels, task.label_range, *([task.label_separator] if task.several_labels else [])],
        "keep_empty": source.keep_empty,
    }


def text_hash(texts: tuple[str, ...]) -> int:
    """A hash of a row's texts, ignoring white space around them."""
    return row_hash(json.dumps([text.strip() for text in texts]).encode())


class EncodedTexts(Dataset):
    """Rows as batches. Items are whole batches, keyed by the (epoch, index) of each row; the index FILLER gives bos eos.

    Items hold input_ids (R, L) int64, padded on the right to the longest row of the batch; attention_mask (R, L) bool,
    only if a row has padding; labels (B,) int64, float32 for a regression, or (B, C) float32 where a row may have several of C
    classes (absent if there are none; -100 in a filler row); index (B,) int64, the row's number in its file from 0, -1 for a
    filler row; and, only if windows are allowed, document (R,) int64, which of the B rows of the file a row of tokens
    belongs to.

    rows: which rows of the files to use, in this order, None: all; by_length: sort them, the longest first, so that a batch
    has rows of about the same length.
    """

    def __init__(self, files: RowFiles, layout: RowLayout, rows: np.ndarray | None = None, by_length: bool = False):
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
            stored = self.files.labels
            filler = np.full_like(stored[0], IGNORED)  # -100, in an int8, too
            labels = np.stack([filler if row == FILLER else stored[row] for row in rows])
            batch["labels"] = torch.from_numpy(labels.astype(np.int64 if stored.dtype == np.int32 else np.float32))
        return batch
