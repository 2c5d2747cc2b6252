"""The table of tasks, GLUE's nine and IMDB, as on the Hugging Face hub and in the benchmarks' own files; a task of your own.

A column may have several names: the hub's first, then that of GLUE's TSV files. `label_of` converts what a file holds to a
class number or a value.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_linformer.data.tables import TABLES, column_names, kind_of
from lit_linformer.utils.errors import SettingError, UserError, meant, shown

CLASSIFICATION_METRICS = ("accuracy", "f1", "macro_f1", "matthews")
REGRESSION_METRICS = ("pearson", "spearman")
SEVERAL_METRICS = ("micro_f1", "macro_f1", "accuracy")  # where a row may have several labels
LARGEST = (2 - 2**-23) * 2.0**127  # the largest float32, as which labels are stored


# A class number, a regression's value, or a 0 or 1 for each class where a row may have several.
Label = int | float | Sequence[int]


@dataclass(frozen=True)
class TextTask:
    """A task on one text or on a pair of texts.

    Args:
        name: Its name, as GLUE writes it.
        columns: For each text, the names that its column may have.
        label_column: The names that the label's column may have.
        labels: Names of the classes in the hub's order, class 0 first; None: regression.
        metrics: Names of the metrics, whose mean is the task's score.
        hub: Name and configuration of the hub's data set.
        folder: Name of the folder in which the benchmark's own files come.
        label_range: Least and greatest target of a regression; -1, outside of it, means that there is no label.
        evaluation: Names of the evaluation sets; "" if there is only one.
        headerless: Columns of a TSV file that has no header line.
        submission: Names of the files for GLUE's site, one for each evaluation set.
        submits_names: Those files hold class names, not numbers, as GLUE's site expects for some tasks.
        unlabelled_test: The test set's labels are not public.
        ragged: The TSV files are known to hold lines with too few fields: they are skipped.
        validation_fraction: Share of the training rows to hold out; None: the data set has a validation split.
        label_separator: What separates the labels in a cell, where a row may have several of them, or none; None: it has one.
    """

    name: str
    columns: tuple[tuple[str, ...], ...]
    label_column: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    hub: tuple[str, str] | None = None
    folder: str | None = None
    label_range: tuple[float, float] | None = None
    evaluation: tuple[str, ...] = ("",)
    headerless: tuple[str, ...] | None = None
    submission: tuple[str, ...] = ("predictions.tsv",)
    submits_names: bool = False
    unlabelled_test: bool = False
    ragged: bool = False
    validation_fraction: float | None = None
    label_separator: str | None = None

    @property
    def several_labels(self) -> bool:
        """Whether a row may have any number of the classes; a label is then a 0 or 1 for each class."""
        return self.label_separator is not None

    def splits(self, kind: str) -> list[str]:
        """Splits of a kind ("train", "validation", "test"); the last two have one for each evaluation set."""
        return [kind] if kind == "train" else [f"{kind}_{name}" if name else kind for name in self.evaluation]

    def label_name(self, label: Label | None) -> str | float | list[str] | None:
        """The name of a class, by its number, or those of several; a regression's value as it is."""
        if self.labels is None or label is None:
            return label
        if self.several_labels:
            return [name for name, there in zip(self.labels, label, strict=True) if there]
        return self.labels[int(label)]


def _glue(name: str, config: str, *columns: tuple[str, ...], **settings) -> TextTask:
    settings = {"submission": (f"{name}.tsv",)} | settings
    return TextTask(name, columns, hub=("nyu-mll/glue", config), folder=name, unlabelled_test=True, **settings)


_SENTENCES = (("sentence1",), ("sentence2",))
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = (
    _glue(
        "CoLA", "cola", ("sentence",), labels=("unacceptable", "acceptable"), metrics=("matthews",),
        headerless=("source", "label", "star", "sentence"),
    ),
    _glue("SST-2", "sst2", ("sentence",), labels=("negative", "positive")),
    _glue(
        "MRPC", "mrpc", ("sentence1", "#1 String"), ("sentence2", "#2 String"), label_column=("label", "Quality"),
        labels=("not_equivalent", "equivalent"), metrics=("accuracy", "f1"),
    ),
    _glue(
        "STS-B", "stsb", *_SENTENCES, label_column=("label", "score"), label_range=(0.0, 5.0), metrics=("pearson", "spearman"),
    ),
    _glue(
        "QQP", "qqp", ("question1",), ("question2",), label_column=("label", "is_duplicate"),
        labels=("not_duplicate", "duplicate"), metrics=("accuracy", "f1"), ragged=True,
    ),
    _glue(
        "MNLI", "mnli", ("premise", "sentence1"), ("hypothesis", "sentence2"), label_column=("label", "gold_label"),
        labels=("entailment", "neutral", "contradiction"), evaluation=("matched", "mismatched"),
        submission=("MNLI-m.tsv", "MNLI-mm.tsv"), submits_names=True,
    ),
    _glue("QNLI", "qnli", ("question",), ("sentence",), labels=_ENTAILMENT, submits_names=True),
    _glue("RTE", "rte", *_SENTENCES, labels=_ENTAILMENT, submits_names=True),
    _glue("WNLI", "wnli", *_SENTENCES, labels=("not_entailment", "entailment")),
    TextTask(
        "IMDB", (("text",),), labels=("neg", "pos"), hub=("stanfordnlp/imdb", "plain_text"), folder="aclImdb",
        submission=("IMDB.tsv",), submits_names=True, validation_fraction=0.1,
    ),
)  # fmt: skip


def find_task(name: str) -> TextTask:
    """The task of that name, whatever its case and punctuation."""
    found = {_key(task.name): task for task in TASKS}
    if _key(name) in found:
        return found[_key(name)]
    near = difflib.get_close_matches(_key(name), found, 1)
    hint = f"; did you mean {found[near[0]].name!r}?" if near else ""
    raise SettingError("data.task", name, f"{', '.join(task.name for task in TASKS)}{hint}")


def own_task(
    columns: list[str],
    label_column: str = "label",
    labels: list[str] | None = None,
    metrics: list[str] | None = None,
    label_separator: str | None = None,
) -> TextTask:
    """A task that is not in the table; without labels it is a regression."""
    if len(columns) not in (1, 2) or not all(columns) or len(set(columns)) != len(columns):
        raise SettingError("data.columns", columns, "one column of texts, or two of pairs")
    if label_column in columns or not label_column:
        raise SettingError("data.label_column", label_column, "another column than data.columns")
    if labels is not None and (len(labels) < 2 or len(set(labels)) != len(labels) or not all(labels)):
        raise SettingError("data.labels", labels, "two or more different names, or none for regression")
    if label_separator is not None:
        _check_separator(label_separator, labels)
    known = (*CLASSIFICATION_METRICS, *SEVERAL_METRICS[:1], *REGRESSION_METRICS)
    if labels is None:
        kind, allowed, default = "a regression (data.labels is not given)", REGRESSION_METRICS, REGRESSION_METRICS
    elif label_separator is not None:
        kind, allowed, default = "several labels a row (data.label_separator)", SEVERAL_METRICS, SEVERAL_METRICS[:1]
    else:
        kind, allowed, default = "a classification", CLASSIFICATION_METRICS, CLASSIFICATION_METRICS[:1]
    metrics = list(default if metrics is None else metrics)
    if not metrics or len(set(metrics)) != len(metrics):
        raise SettingError("data.metrics", metrics, f"one or more of {', '.join(allowed)}")
    for metric in metrics:
        if metric in allowed:
            continue
        if metric in known:
            raise UserError(f"data.metrics has {metric!r}, which is not for {kind}", ", ".join(allowed))
        near = meant(metric, known) or ", or one of your own (docs/finetuning.md)"
        raise UserError(f"data.metrics has {metric!r}", f"{', '.join(allowed)}{near}")
    return TextTask(
        "your own",
        tuple((column,) for column in columns),
        (label_column,),
        tuple(labels) if labels is not None else None,
        tuple(metrics),
        submits_names=True,
        validation_fraction=0.1,
        label_separator=label_separator,
    )


def _check_separator(separator: str, labels: list[str] | None) -> None:
    if labels is None:
        raise SettingError("data.label_separator", separator, "none without data.labels, which makes it a regression")
    if held := [name for name in labels if separator in name]:  # each name holds an empty separator
        more = f", which the label {held[0]!r} holds"
        raise SettingError("data.label_separator", separator, "characters that no label has, such as '|'", more=more)


def _key(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def chosen_task(
    task: str | None,
    columns: list | None,
    label_column: str,
    labels: list | None,
    metrics: list | None,
    source: str | None = None,
    label_separator: str | None = None,
) -> TextTask:
    """The task that `data.task` names, or the one that the other settings describe; ValueError for both, or neither."""
    if task is not None:
        own = {"columns": columns, "labels": labels, "metrics": metrics, "label_separator": label_separator}
        own["label_column"] = None if label_column == "label" else label_column  # the default
        if given := [name for name, value in own.items() if value is not None]:
            raise SettingError(f"data.{given[0]}", own[given[0]], "none, since the task sets it", when=f"with data.task {task}")
        return find_task(task)
    if columns is None:
        names = ", ".join(task.name for task in TASKS)
        if source is not None and kind_of(Path(source)) in TABLES and Path(source).is_file():
            there = ", ".join(map(shown, column_names(Path(source), "data.source")))
            raise UserError("data.columns is not given", f"the one of texts, or the two of pairs, of {source}'s {there}")
        raise UserError("data.task is not given", f"{names}, or data.columns, which describes a task of your own")
    return own_task(columns, label_column, labels, metrics, label_separator)


def label_of(value, task: TextTask) -> Label | None:
    """A label's class number, or the value of a regression; None if there is no label: null, an empty cell, or the hub's -1.

    Where a row may have several labels, a tuple with a 0 or 1 for each class: an empty cell or list has none of them.
    """
    if value is None:
        return None
    if task.several_labels:
        numbers = [one for one in value if not isinstance(one, str)] if isinstance(value, list) else []
        if len(set(map(str, numbers))) < len(numbers):
            allowed = "each label once: names or numbers of classes, not a 0 or 1 for each class"
            raise UserError(f"label is {value}", allowed)
        found = {_class(name, task.labels) for name in label_names(value, task)} - {None}
        return tuple(int(number in found) for number in range(len(task.labels)))
    if value == "":
        return None
    return _number(value, task.label_range) if task.labels is None else _class(value, task.labels)


def label_names(value, task: TextTask) -> list:
    """The labels in a cell, as the file gives them: one, or those of a list or between separators."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and task.label_separator is not None:
        return [name.strip() for name in value.split(task.label_separator) if name.strip()]
    return [value]


def as_typed(names: Iterable[str]) -> str:
    """Names of classes as a user types them for data.labels, with quotes around what YAML would read as something else."""
    plain = re.compile(r"(?!(?:yes|no|on|off|true|false|null|y|n)$)[a-z](?:[\w /-]*[\w/-])?", re.IGNORECASE)
    return f"[{','.join(name if plain.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in names)}]"


def _class(value, labels: tuple[str, ...]) -> int | None:
    text = str(value)
    if isinstance(value, bool):  # JSON's true is Python's True
        name, number = text.lower(), str(int(value))
    else:
        name = number = _whole(text)
    for each, names in ((text, labels), (name, list(map(_whole, labels)))):
        if each in names:
            return names.index(each)
    allowed = ", ".join(map(repr, labels))
    # If names are numbers themselves, such as stars from 1 to 5, a 0 is none of them, not the first one.
    if not any(_is_integer(label.replace(".", "", 1)) for label in labels):
        if _is_integer(number) and -1 <= int(number) < len(labels):
            return int(number) if int(number) >= 0 else None
        allowed += f", or their numbers 0 to {len(labels) - 1} (-1: no label)"
    elif number == "-1":
        return None
    raise SettingError("label", value, allowed)


def _number(value, allowed: tuple[float, float] | None) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an int too large for a float
        number = math.nan
    if allowed is None:
        if not math.isfinite(number):
            raise SettingError("label", value, "a finite number (give data.labels for names of classes)")
        if abs(number) > LARGEST:
            raise SettingError("label", value, "a finite number in 32 bits, so up to 3.4e38")
        return number
    if number == -1:
        return None
    if not allowed[0] <= number <= allowed[1]:
        raise SettingError("label", value, f"a number from {allowed[0]:g} to {allowed[1]:g}")
    return number


def _whole(text: str) -> str:
    """A whole number without its ".0": pandas writes 1 as 1.0 if the column lacks a number."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
