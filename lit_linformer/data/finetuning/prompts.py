"""Texts, or pairs of texts, to classify, for `predict`."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.pieces import encode_texts
from lit_linformer.data.prompts import read_prompts, shortened
from lit_linformer.data.tokenizer import Tokenizer


def read_texts(
    text: str | list[str] | None, text_pair: str | list[str] | None, file: str | None, pair: bool
) -> list[tuple[str, ...]]:
    """Texts, or pairs of texts, to classify: `text` with `text_pair`, then the lines of `file`, a pair's divided by a tab."""
    firsts, seconds = ([each] if isinstance(each, str) else list(each or []) for each in (text, text_pair))
    if not pair and text_pair is not None:
        raise ValueError(f"data.text_pair is {text_pair!r}; allowed: none, for the task has one text a row")
    if pair and len(firsts) != len(seconds):
        raise ValueError(f"data.text_pair has {len(seconds)} texts; allowed: as many as data.text, {len(firsts)}")
    found = [("data.text", texts) for texts in (zip(firsts, seconds, strict=True) if pair else zip(firsts))]
    if file is None and not found:
        read_prompts(None, None)  # which says what to give
    for where, line in read_prompts(None, file) if file is not None else []:
        fields = tuple(line.split("\t"))
        if len(fields) != 1 + pair:
            allowed = "two texts divided by a tab" if pair else "one text without a tab"
            raise ValueError(f"{where} has {len(fields)} fields; allowed: {allowed}")
        found.append((where, fields))
    for where, texts in found:
        if not all(each.strip() for each in texts):
            raise ValueError(f"{where}: {texts} holds an empty text; allowed: something to classify")
    return [texts for _, texts in found]


def text_loader(texts: list[tuple[str, ...]], tokenizer: Tokenizer, layout: RowLayout, batch_size: int) -> DataLoader:
    """Batches as training has them, without labels, in the order given; texts: a string or [string, string] of each."""
    ids = encode_texts((each.strip() for row in texts for each in row), tokenizer)
    encoded = [[next(ids) for _ in row] for row in texts]
    if (row := layout.too_long(np.array([[len(ids) for ids in row] for row in encoded]))) is not None:
        raise ValueError(
            f"data.text or data.file: {[shortened(text) for text in texts[row]]} is too long for data.truncation "
            f"{layout.truncation}; allowed: a text that is not cut leaves room in data.max_length = {layout.max_length}"
        )

    def collate(rows: list[int]) -> dict:
        batch = layout.batch([encoded[row] for row in rows])
        batch["index"] = torch.tensor(rows)
        return batch | {"texts": [list(texts[row]) if layout.pair else texts[row][0] for row in rows]}

    return DataLoader(range(len(texts)), batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
