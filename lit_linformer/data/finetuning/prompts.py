"""Texts, or pairs of texts, to classify, for `predict`."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.finetuning.text_tasks import TextTask, label_of
from lit_linformer.data.loader import by_length
from lit_linformer.data.notes import note
from lit_linformer.data.pieces import encode_texts
from lit_linformer.data.prompts import Prompt, at, given_texts, is_table, no_prompts, text_prompts
from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.utils.errors import SettingError, UserError, shortened


def read_texts(
    text: str | list[str] | None,
    text_pair: str | list[str] | None,
    file: str | None,
    task: TextTask,
    empty_texts: str = "error",
) -> list[Prompt]:
    """Texts, or pairs of texts: `text` with `text_pair`, then those of `file`.

    Args:
        text: A text, or a list of them.
        text_pair: For a task on pairs: as many second texts.
        file: A table with the task's columns, labels optional; or a text on each line, the two of a pair separated by a tab.
        task: Its columns and labels.
        empty_texts: For a table, as in `LabelledSource`.
    """
    pair = len(task.columns) == 2
    firsts, seconds = given_texts(text), given_texts(text_pair)
    if not pair and text_pair is not None:
        raise SettingError("data.text_pair", text_pair, "none, since the task has one text per row")
    if pair and len(firsts) != len(seconds):
        raise UserError(f"data.text_pair has {len(seconds)} texts", f"as many as data.text, {len(firsts)}")
    given = [Prompt(a.where, a.texts + b.texts) for a, b in zip(firsts, seconds, strict=True)] if pair else firsts
    found = list(_checked(given))
    if file is not None:
        found += _table_texts(file, task, empty_texts) if is_table(file) else _checked(_line_texts(file, pair))
    if not found:
        raise no_prompts(file)
    return found


def _checked(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    for prompt in prompts:
        if not all(each.strip() for each in prompt.texts):
            given = prompt.texts[0] if len(prompt.texts) == 1 else list(prompt.texts)
            raise SettingError(prompt.where, given, "something to classify")
        yield prompt


def _line_texts(file: str, pair: bool) -> Iterator[Prompt]:
    for prompt in text_prompts(file):
        fields = tuple(prompt.texts[0].split("\t"))
        if len(fields) != 1 + pair:
            allowed = "two texts divided by a tab" if pair else "one text without a tab"
            raise UserError(f"{prompt.where} has {len(fields)} fields", allowed)
        yield prompt._replace(texts=fields)


def _table_texts(file: str, task: TextTask, empty_texts: str) -> Iterator[Prompt]:
    """Rows with their labels, as far as they are the task's: none is needed, and a column of that name may hold anything."""
    source = LabelledSource(file, task, empty_texts, setting="data.file")
    strange, first = 0, ""
    for (_, unit, number), texts, value in source.texts("train", needs_label=False):
        place, label = at(file, unit, number), None
        try:
            label = label_of(value, task)
        except UserError:
            strange, first = strange + 1, first or f"{shortened(repr(value))} in {place}"
        yield Prompt(place, texts, {unit: number}, label)
    if strange:
        note(f"labels that are not the task's are left out, {strange:,} in all, the first {first}")


def text_loader(prompts: list[Prompt], tokenizer: Tokenizer, layout: RowLayout, task: TextTask, batch_size: int) -> DataLoader:
    """Batches as in training, of texts of about the same length, without labels to learn from.

    index: the texts' numbers in the order given. Also what predictions.jsonl has for each text: texts, a string or
    [string, string]; places, {"line": 3} of data.file; golds, the label given there (a class name, or a value), or None.
    """
    ids = encode_texts((each.strip() for prompt in prompts for each in prompt.texts), tokenizer)
    encoded = [[next(ids) for _ in prompt.texts] for prompt in prompts]
    lengths = np.array([[len(ids) for ids in row] for row in encoded])
    if cut := int(layout.is_cut(lengths).sum()):
        windows = f"{layout.max_windows} windows of " if layout.max_windows > 1 else ""
        note(f"{cut:,} of {len(prompts):,} texts cut at {windows}data.max_length = {layout.max_length}")
    if (row := layout.too_long(lengths)) is not None:
        raise UserError(
            f"{prompts[row].where}: {[shortened(text) for text in prompts[row].texts]} is too long for "
            f"data.truncation {layout.truncation}",
            f"a text that is not cut leaves room in data.max_length = {layout.max_length}",
        )

    def collate(rows: list[int]) -> dict:
        batch, chosen = layout.batch([encoded[row] for row in rows]), [prompts[row] for row in rows]
        return batch | {
            "index": torch.tensor(rows),
            "texts": [list(each.texts) if layout.pair else each.texts[0] for each in chosen],
            "places": [dict(each.place) for each in chosen],
            "golds": [task.label_name(each.label) for each in chosen],
        }

    batches = by_length(layout.lengths(lengths).tolist(), batch_size)
    return DataLoader(batches, batch_size=None, collate_fn=collate, generator=torch.Generator())
