"""A summary of labelled rows: counts of rows, tokens and labels, and the share of rows that are cut."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lit_linformer.data.finetuning.encoded_texts import EncodedTexts
from lit_linformer.data.finetuning.text_tasks import TextTask, as_typed
from lit_linformer.data.row_files import as_given
from lit_linformer.data.summary import Summary

FEW = 5  # so few different integers may well be classes
MOST_WINDOWS = 10_000  # largest data.max_windows
MANY = 0.1  # smallest share of cut rows that calls for a hint


def of_rows(sets: Mapping[str, EncodedTexts], task: TextTask) -> Summary:
    """For each split rows (or pairs), tokens (of whole texts), cut (the share of rows that are cut), and the labels."""
    return {split: _of_rows(rows, task) for split, rows in sets.items()}


def _of_rows(rows: EncodedTexts, task: TextTask) -> dict[str, Any]:
    lengths = rows.files.lengths[rows.rows]
    kind = "pairs" if len(task.columns) == 2 else "rows"
    cut = round(float(rows.layout.is_cut(lengths).mean()), 4) if len(rows) else 0.0
    told = {kind: len(rows), "tokens": int(lengths.sum()), "cut": cut, "max_length": rows.layout.max_length}
    if rows.layout.max_windows > 1:
        told["max_windows"] = rows.layout.max_windows
    values = rows.files.labels[rows.rows]
    if not rows.labelled or not len(rows):
        return told
    if task.labels is None:
        mean = float(f"{values.mean(dtype=np.float64):.6g}")
        return told | {"values": {"least": as_given(values.min()), "mean": mean, "greatest": as_given(values.max())}}
    counts = values.sum(0) if task.several_labels else np.bincount(values, minlength=len(task.labels))
    return told | {"labels": dict(zip(task.labels, counts.tolist(), strict=True))}


def cut_hint(sets: Mapping[str, EncodedTexts], summary: Summary, longest: int | None) -> str | None:
    """How to keep rows whole, if many are cut; `longest`: the most tokens that the model reads, if known."""
    split = max(summary, key=lambda split: summary[split]["cut"])
    if summary[split]["cut"] < MANY:
        return None
    layout, lengths = sets[split].layout, sets[split].files.lengths[sets[split].rows]
    ways = []
    if longest is not None and longest > layout.max_length:
        ways.append(f"data.max_length up to the model's {longest} cuts fewer")
    if not layout.pair and layout.stride > 0:
        windows = np.ceil(np.quantile(replace(layout, max_windows=MOST_WINDOWS).windows(lengths[:, 0]), 0.95))
        ways.append(f"data.max_windows {windows:.0f} reads 95 % of them whole, in windows")
    if not ways:
        ways.append("a model with a longer model.encoder.max_length cuts fewer (`convert --max_length` makes one)")
    return (
        f"{summary[split]['cut']:.0%} of the {split} rows are cut at data.max_length = {layout.max_length}: {'; '.join(ways)}"
    )


def leaked_hint(sets: Mapping[str, EncodedTexts]) -> str | None:
    """A hint if rows held out of the training rows have the texts of rows that are trained on."""
    train, held_out = sets.get("train"), sets.get("validation")
    if train is None or held_out is None or train.files.folder != held_out.files.folder:
        return None
    hashes = train.files.hashes
    count = int(np.isin(hashes[held_out.rows], hashes[train.rows]).sum())
    if not count:
        return None
    told = f"{count:,} of {len(held_out):,} held-out rows have the text of a training row"
    return f"{told}: data.drop_leaked true trains without those"


def missing_hints(summary: Summary) -> Iterator[str]:
    """Hints on classes without training rows, which a model learns never to predict, and on those without validation rows."""
    train = summary.get("train", {}).get("labels", {})
    if missing := [name for name, count in train.items() if count == 0]:
        yield f"no training row has the label {_either(missing)}: is data.labels what you meant?"
    for split, told in summary.items():
        counts = told.get("labels", {}) if split.startswith("validation") else {}
        if missing := [name for name, count in counts.items() if count == 0 and train.get(name)]:
            more = "more validation rows might: data.validation_fraction"
            yield f"no {split} row has the label {_either(missing)}: val/score says nothing about it ({more})"


def _either(names: list[str]) -> str:
    return " or ".join([*map(repr, names[:FEW]), *[f"{len(names) - FEW} others"] * (len(names) > FEW)])


def class_hint(sets: Mapping[str, EncodedTexts], task: TextTask) -> str | None:
    """A hint if a user's own task is a regression on what look like class numbers."""
    if task.labels is not None or task.label_range is not None or "train" not in sets:
        return None
    rows = sets["train"]
    values = np.unique(rows.files.labels[rows.rows])
    if not 2 <= len(values) <= FEW or (values != values.round()).any():
        return None
    names = as_typed([f"{value:.0f}" for value in values])
    label = task.label_column[0]
    return f"{label} is predicted as a number, since data.labels is not given; as classes with --data.labels '{names}'"
