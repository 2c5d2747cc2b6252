"""predictions.jsonl in the run folder: what `predict` predicted, and each row that `validate` or `test` classified."""

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_linformer.data.row_files import as_given
from lit_linformer.utils.files import json_text, write_lines

FILE = "predictions.jsonl"
LONGEST = 300  # characters of a text on the terminal
SHOWN = 10  # how many rows `predict` shows on the terminal


class PredictionWriter(Callback):
    """Prints the first texts with their most probable fillings or labels, and writes all as JSON lines.

    A task's predict_step returns a list of records: {text, mask?, top: [{token or label, probability}, …]} or {text, value}.
    Anything else that a module of your own returns, such as a tensor, is written one row per line, and not printed. If a batch
    has an `index`, (R,) for R records, which numbers their texts, the records are sorted by it.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []  # each record's number and JSON: a tenth of the memory that the record takes
        self._shown: list[tuple[int, dict[str, Any]]] = []  # the first records and their numbers

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.predict_loop.return_predictions = False  # else Lightning keeps all of them, too
        self._lines, self._shown = [], []  # of an earlier predict

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        found, index = _records(outputs), batch.get("index") if isinstance(batch, dict) else None
        known = isinstance(index, Tensor) and len(index) == len(found)
        numbers = index.tolist() if known else range(len(self._lines), len(self._lines) + len(found))
        numbered = list(zip(numbers, found, strict=True))
        self._lines += [(number, json_text(record)) for number, record in numbered]
        self._shown = sorted([*self._shown, *numbered], key=itemgetter(0))[:SHOWN]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:  # each process has found the same
            return
        from rich.console import Console

        path = Path(trainer.default_root_dir) / FILE
        written = ""
        if not trainer.fast_dev_run:
            written = f" → {path}{_replaced(path)}"
            write_lines(path, (line for _, line in sorted(self._lines, key=itemgetter(0))))
        console, count, shown = Console(), len(self._lines), [record for _, record in self._shown]
        if not shown or not all(map(_fits_table, shown)):
            console.print(f"{count} prediction{'s' * (count != 1)}{written}", highlight=False, markup=False)
            return
        console.print(_table(shown, getattr(getattr(trainer.datamodule, "tokenizer", None), "mask_token", None)))
        rest = f", of which the first {SHOWN} are shown" if count > SHOWN else ""
        what = ("mask" if "mask" in shown[0] else "text") + "s" * (count > 1)
        console.print(f"{count:,} {what}{written}{rest}", highlight=False, markup=False, soft_wrap=True)


class EvaluationWriter(Callback):
    """Writes each row of an evaluation, for error analysis.

    A line has split; line, or row, its number in the file; text, or a pair's [text, text]; label, the gold one, if there is
    one; prediction and probabilities by class, or the value of a regression. Rows that are not texts have index instead of
    line and text.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            write_evaluation(trainer, pl_module, "validation")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write_evaluation(trainer, pl_module, "test")


def write_evaluation(trainer: Trainer, pl_module: LightningModule, kind: str) -> None:
    """Writes the rows that a module has classified (kind: validation or test); nothing for other modules."""
    data, found = trainer.datamodule, getattr(pl_module, "results", None)
    task = getattr(pl_module, "text_task", None)
    results = list(found.values()) if isinstance(found, dict) and task is not None else []
    there = results and all("logits" in result for result in results)
    if not there or not trainer.is_global_zero or trainer.fast_dev_run:
        return
    path = Path(trainer.default_root_dir) / FILE
    sets = zip(task.splits(kind), results, strict=True)
    records = (record for split, result in sets for record in evaluated(data, split, result, pl_module))
    replaced = _replaced(path)
    count = write_lines(path, map(json_text, records))
    print(f"{count:,} rows{_wrong(results, task)} → {path}{replaced}", flush=True)


def evaluated(data: Any, split: str, result: dict[str, Any], pl_module: Any) -> Iterator[dict[str, Any]]:
    """Records of a split in the order of its file; `result`: what `Scores.results` returns, with logits."""
    task, targets, numbers = pl_module.text_task, result["targets"], result["index"].tolist()
    labels: list = [None] * len(numbers) if targets is None else targets.tolist()
    if targets is not None and not task.several_labels:
        labels = list(map(as_given, labels))
    rows = zip(numbers, labels, pl_module.predicted(result["logits"]), strict=True)
    row = next(rows, None)
    for number, told in _told(data, split, numbers):
        if row is None:
            return
        if row[0] == number:  # else trainer.limit_val_batches has left it out
            label = {} if row[1] is None else {"label": task.label_name(row[1])}
            yield {"split": split, **told, **label, **row[2]}
            row = next(rows, None)


def _told(data: Any, split: str, numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, place in the file and text of each row of the split; if rows are not texts, the numbers of those evaluated."""
    if not hasattr(data, "evaluated_texts"):
        yield from ((number, {"index": number}) for number in numbers)
        return
    for number, place, texts in data.evaluated_texts(split):
        yield number, {**place, "text": texts[0] if len(texts) == 1 else list(texts)}


def _replaced(path: Path) -> str:
    return " (which replaces an earlier one)" if path.exists() else ""


def _wrong(results: list[dict[str, Any]], task: Any) -> str:
    known = [result for result in results if result["targets"] is not None]
    if task.labels is None or not known:
        return ""
    wrong = ((result["predictions"] != result["targets"]).reshape(len(result["index"]), -1).any(1) for result in known)
    return f", {sum(int(rows.sum()) for rows in wrong):,} of them wrong"


def _fits_table(record: dict[str, Any]) -> bool:
    """Whether the record is one of our tasks'; in a module of your own these names may mean anything."""
    texts, top, value = record.get("text"), record.get("top"), record.get("value")
    told = isinstance(texts, str) or (isinstance(texts, list) and all(isinstance(text, str) for text in texts))
    ranked = isinstance(top, list) and all(
        isinstance(found, dict) and "probability" in found and found.keys() & {"label", "token"} for found in top
    )
    return told and (ranked or (top is None and isinstance(value, int | float)))


def _table(records: list[dict[str, Any]], mask: str | None = None) -> Any:
    """Records as a table; of a long text the part around its mask, or its beginning."""
    from rich.table import Table
    from rich.text import Text

    of_masks, shown = "mask" in records[0], len(records[0].get("top", ())[:5])
    labelled = any("label" in record for record in records)
    heads = ["mask"] * of_masks + ["label"] * labelled
    heads += [f"{rank}." for rank in range(1, shown + 1)] + ["value"] * (shown == 0)
    table = Table("text", *heads, show_lines=True)
    for record in records:
        texts = [record["text"]] if isinstance(record["text"], str) else record["text"]
        text = "\n".join(_part(each, mask, record.get("mask", 0)) for each in texts)
        cells = [str(record["mask"])] if of_masks else []
        label = record.get("label", "")
        cells += [", ".join(label) if isinstance(label, list) else str(label)] if labelled else []
        cells += [f"{_name(found)}\n{found['probability']:.1%}" for found in record.get("top", ())[:5]]
        cells += [f"{record['value']:.6g}"] if "value" in record else []
        table.add_row(*(Text(cell) for cell in (text, *cells)))
    return table


def _part(text: str, mask: str | None, number: int) -> str:
    """LONGEST characters of a text, around the mask of this number, from 1; 0: its beginning."""
    at = -1
    for _ in range(number if mask else 0):
        at = text.find(mask, at + 1)
    first = max(0, min(at - LONGEST // 2, len(text) - LONGEST))
    return f"{'…' * (first > 0)}{text[first : first + LONGEST]}{'…' * (first + LONGEST < len(text))}"


def _records(outputs: Any) -> list[dict[str, Any]]:
    found = _plain(outputs)
    rows = found if isinstance(found, list) and not isinstance(outputs, tuple) else [found]
    return [row if isinstance(row, dict) else {"prediction": row} for row in rows if row is not None]


def _plain(value: Any) -> Any:
    """Converted for JSON, however deeply tensors and arrays are nested in it."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _name(found: dict[str, Any]) -> str:
    """A label, or a token; a token of white space alone, such as a line feed, as a Python literal."""
    return found["label"] if "label" in found else found["token"].strip() or repr(found["token"])
