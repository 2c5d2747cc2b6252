"""Rows: a source of labelled texts, named by one string, as a stream of (texts, label) for each of its splits.

LabelledSource("hub:nyu-mll/glue:sst2", find_task("SST-2"))     a Hugging Face data set, or a local copy in its layout
LabelledSource("reviews.csv", own_task(["text"]))               a table, all of it training rows
LabelledSource("glue/", find_task("SST-2"))                     a folder that holds, directly or one folder below:
    train.tsv, train.csv, train.jsonl, …             tables, as data/tables.py reads them
    train-00000-of-00001.parquet     the hub's layout
    train/pos/0_9.txt                a folder for each class, as aclImdb has them
"""

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from lit_linformer.data.cache import fingerprint, make_once, read_whole
from lit_linformer.data.finetuning.split_files import SplitFiles, find_files
from lit_linformer.data.finetuning.text_tasks import Label, TextTask, as_typed, label_names, label_of
from lit_linformer.data.reading import LONGEST_LINE, hub_stamp, load_hub, stamps, text_lines
from lit_linformer.data.tables import TABLE_FILES, TABLES, hub_rows, is_number, kind_of, row_name, table_rows
from lit_linformer.utils.errors import SettingError, UserError, shown

ALIASES = {"train": ("train",), "validation": ("validation", "dev", "valid", "val"), "test": ("test",)}
EMPTY_TEXTS = ("error", "keep")
MOST_NAMES, LONGEST_NAME = 20, 100  # class names in an error message: how many at most, and of how many characters
SOURCES = "a folder, a table, hub:NAME or hub:NAME:CONFIG"


class LabelledRow(NamedTuple):
    texts: tuple[str, ...]
    label: Label | None


class LabelledSource:
    """Rows of a source, split by split; each split can be read any number of times.

    Args:
        source: "hub:NAME", "hub:NAME:CONFIG", a folder or a table.
        task: Its columns and labels.
        empty_texts: "error" refuses a row with a blank text, "keep" takes it as it is.
        cache: Folder in which the names of a hub data set's splits are kept, so that a second start does not need the hub.
        setting: What error messages call the source.
    """

    def __init__(
        self,
        source: str,
        task: TextTask,
        empty_texts: str = "error",
        cache: Path | None = None,
        setting: str = "data.source",
    ):
        self.source, self.task, self.cache, self.setting = source, task, cache, setting
        self.of_data = setting.startswith("data.")  # so messages may name other settings of data
        self.keep_empty = empty_texts == "keep"
        self.hub: list[str | None] | None = None
        self.skipped = 0  # ragged lines in the split that was read last
        self.fraction = 0.0  # share of the split read so far, for progress bars
        self._found: dict[str, SplitFiles | None] = {}
        if source.startswith("hub:"):
            name, _, config = source[4:].partition(":")
            if not name or ":" in config or source.endswith(":"):
                raise SettingError(self.setting, source, "hub:NAME or hub:NAME:CONFIG")
            self.hub = [name, config or None]
        elif not source:
            raise SettingError(self.setting, "", SOURCES)

    # Which splits there are

    @property
    def is_table(self) -> bool:
        """Whether it is a single file, whose rows both `fit` and `test` use."""
        return not self.hub and Path(self.source).is_file()

    def splits(self) -> list[str]:
        """The task's splits that the source has; a table's rows are training rows, though `test` reads them, too."""
        if self.is_table:
            return ["train"] if self.find("train") else []
        wanted = [split for kind in ALIASES for split in self.task.splits(kind)]
        return [split for split in wanted if self.find(split) is not None]

    def find(self, split: str) -> SplitFiles | None:
        """Where a split is; None if there is none."""
        if split not in self._found:
            self._found[split] = self._find(split)
        return self._found[split]

    def _find(self, split: str) -> SplitFiles | None:
        if self.hub:
            found = [name for name in _names(split) if name in self._hub_splits]
            return SplitFiles("hub", found[0], []) if found else None
        root, classes = Path(self.source), self.task.labels or ()
        if root.is_file():
            if not split.startswith(("train", "test")):
                return None
            if kind_of(root) not in TABLES:
                raise SettingError(self.setting, self.source, f"a table ({TABLE_FILES}), or a folder")
            return SplitFiles("file", self.source, [root])
        if not root.is_dir():
            raise SettingError(self.setting, self.source, SOURCES, more=", which is not there")
        folders = [root, *(root / name for name in self._below() if (root / name).is_dir())]
        found = [
            files
            for folder, name in itertools.product(folders, _names(split))
            for files in find_files(folder, name, classes, self.setting)
        ]
        if len(found) > 1:
            names = " and ".join(files.name for files in found)
            raise SettingError(self.setting, self.source, "once", more=f", which has the {split} split twice, in {names}")
        if found and found[0].kind == "folders" and len(self.task.columns) == 2:
            raise UserError(f"{self.setting}: {found[0].name} has one text in each file", "tables with both columns of a pair")
        if split == "train" and found and found[0].kind == "folders":
            there = {file.parent.name for file in found[0].files}
            if missing := ", ".join(repr(name) for name in classes if name not in there):
                allowed = "a folder of .txt files for each class"
                raise UserError(f"{self.setting}: {found[0].name} has no texts of {missing}", allowed)
        return found[0] if found else None

    def missing(self, split: str, instead: str = "") -> ValueError:
        """The error to raise for a required split that is missing; `instead`: what else is allowed."""
        if self.hub:
            allowed = ", ".join(self._hub_splits)
        elif Path(self.source).is_file():
            allowed = "a folder with a file for each split"
        else:
            name = _names(split)[0]
            files = [f"{other}.tsv" for other in _names(split)[:2]] + [f"{name}.csv", f"{name}.jsonl"]
            files += [f"{name}-00000-of-00001.parquet"]
            allowed = f"{', '.join(files)} or {name}/LABEL/*.txt, there or in {', '.join(self._below())}"
        return SettingError(self.setting, self.source, f"{allowed}{instead}", more=f", which has no {split} split")

    def empty(self, split: str) -> ValueError:
        """The error to raise for a split without rows."""
        return SettingError(self.setting, self.source, "1 row or more", more=f", whose {split} split is empty")

    def _below(self) -> list[str]:
        """Names of subfolders that may hold the splits instead."""
        config = self.task.hub[1] if self.task.hub else None
        return [name for name in dict.fromkeys((self.task.folder, config, "plain_text", "data")) if name]

    @cached_property
    def _hub_rows(self):
        return load_hub(*self.hub, None, self.source, self.setting)

    @cached_property
    def _hub_splits(self) -> list[str]:
        if self.cache is None:
            return list(self._hub_rows)

        def make(folder: Path) -> None:
            (folder / "splits.json").write_text(json.dumps(list(self._hub_rows)))

        folder = make_once(self.cache / f"splits-{fingerprint(self.stamp())}", make)
        return read_whole(folder / "splits.json")

    def stamp(self, split: str | None = None) -> dict:
        """JSON-able description of a split's content, without reading it. A hub data set has one for all its splits."""
        if self.hub:
            return hub_stamp(*self.hub)
        there = self.find(split)
        root = None if there and there.kind == "file" else Path(self.source)
        return {"files": stamps(there.files, root)} if there else {}

    # Its rows

    def rows(self, split: str) -> Iterator[LabelledRow]:
        """Rows of a split, checked, with labels as class numbers or values; ValueError for a bad row."""
        labels: set[bool] = set()
        for where, texts, value in self.texts(split):
            label = self.label(where, value)
            labels.add(label is not None)
            if not split.startswith("test"):
                if label is None:
                    there = value not in (None, "")  # -1
                    found = f"the label {value}, which stands for none" if there else "no label"
                    named = f", or {str(value)!r} among data.labels" if there and self.task.labels and not self.task.hub else ""
                    raise UserError(f"{self.setting}: {row_name(where)} has {found}", f"one in every {split} row{named}")
            elif len(labels) == 2:
                other = "no label, though others have one" if label is None else "a label, though others have none"
                raise UserError(f"{self.setting}: {row_name(where)} has {other}", "one in all rows of a split, or in none")
            yield LabelledRow(texts, label)
        if not labels:
            raise self.empty(split)

    def label(self, where: tuple, value: object) -> Label | None:
        """The class number or value of a label, or the classes of several, that the file gives as `value`."""
        if isinstance(value, dict) or (isinstance(value, list) and not self.task.several_labels):
            one = "a text or a number: a row has one label, unless data.label_separator allows several"
            allowed = "a list of names or numbers" if self.task.several_labels else one
            raise UserError(f"{self.setting}: {row_name(where)}: label is {value}", allowed)
        try:
            return label_of(value, self.task)
        except ValueError as error:
            raise UserError(f"{self.setting}: {row_name(where)}: {error}{self._names_there()}") from error

    def _names_there(self) -> str:
        """For an error about a label: the classes in the training rows; empty if one is a number, or one of the task's."""
        if self.task.hub or self.find("train") is None:
            return ""
        values = (value for _, _, value in self.texts("train", needs_label=False) if value not in (None, ""))
        found = sorted({str(name) for value in values for name in label_names(value, self.task)})
        few = len(found) <= MOST_NAMES and all(len(name) <= LONGEST_NAME for name in found)
        names = few and not any(map(is_number, found)) and not set(found) & set(self.task.labels or ())
        return f", here --data.labels {shlex.quote(as_typed(found))}" if names else ""

    def texts(self, split: str, needs_label: bool = True) -> Iterator[tuple[tuple, tuple[str, ...], object]]:
        """((file, "line" or "row", number), texts, label as the file gives it) of a split's rows.

        needs_label: whether there must be a column of labels, in all splits except test.
        """
        there = self.find(split)
        if there is None:
            raise self.missing(split)
        self.skipped = 0
        for where, texts, value in self._read(there, needs_label and not split.startswith("test")):
            for column, text in zip(self.task.columns, texts, strict=True):
                if not isinstance(text, str):
                    kind = "nothing" if text is None else type(text).__name__
                    raise UserError(f"{self.setting}: {row_name(where)}: {column[0]!r} is {kind}", "text")
                if len(text) > LONGEST_LINE:
                    raise self._too_long(where, "characters")
                if not self.keep_empty and (not text or text.isspace()):
                    keeping = ", or none with data.empty_texts keep" if self.of_data else ""
                    raise UserError(f"{self.setting}: {row_name(where)}: {column[0]!r} is empty", f"text{keeping}")
            yield where, tuple(texts), value

    def _read(self, there: SplitFiles, needs_label: bool) -> Iterator[tuple[tuple, Sequence, object]]:
        if there.kind == "hub":
            yield from self._hub(there.name, needs_label)
        for number, path in enumerate(there.files):
            if there.kind == "folders":
                self.fraction = number / len(there.files)
                yield (path, "row", 1), (self._whole(path),), path.parent.name
                continue
            choose = partial(self._columns, needs_label=needs_label)
            ragged = self._skip if self.task.ragged else None
            for fraction, where, (*texts, label) in table_rows(path, choose, self.setting, self._headerless, ragged):
                self.fraction = (number + fraction) / len(there.files)
                yield where, texts, label

    def _headerless(self, fields: list[str]) -> tuple[str, ...] | None:
        return None if set(self.task.columns[0]) & set(fields) else self.task.headerless

    def _skip(self) -> None:
        self.skipped += 1

    def _hub(self, split: str, needs_label: bool):
        rows = self._hub_rows[split]
        place = f"{self.source!r}, split {split}"
        chosen = self._columns(place, rows.column_names, needs_label)
        # class numbers are the data set's own: its classes may be the task's in another order, so their names decide
        feature = rows.features[chosen[-1]] if chosen[-1] else None
        names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list's elements, or of the one label
        by_name = names is not None and set(names) == set(self.task.labels or ())
        for fraction, where, (*texts, label) in hub_rows(rows, chosen, place, self.setting):
            self.fraction = fraction
            if by_name and isinstance(label, list):
                label = [names[number] for number in label]
            elif by_name and label is not None and label >= 0:
                label = names[label]
            yield where, texts, label

    def _whole(self, path: Path) -> str:
        if path.stat().st_size > LONGEST_LINE:
            raise self._too_long((path, "row", 1), "bytes")
        return "\n".join(line for _, line, _ in text_lines(path, self.setting))

    def _too_long(self, where: tuple, unit: str) -> ValueError:
        return UserError(f"{self.setting}: {row_name(where)} has a text of more than {LONGEST_LINE:,} {unit}", "up to that")

    def _columns(self, where, names: Iterable[str], needs_label: bool) -> list[str | None]:
        """Names of the columns of the texts and the label here; None for a label column that is missing and not needed."""
        chosen: list[str | None] = []
        for aliases in (*self.task.columns, self.task.label_column):
            found = next((name for name in aliases if name in names), None)
            is_label = aliases == self.task.label_column
            if found is None and (needs_label or not is_label):
                chosen_by = f" (data.{'label_column' if is_label else 'columns'})" if self.of_data else ""
                raise UserError(
                    f"{self.setting}: {where} has no column {' or '.join(map(repr, aliases))}{chosen_by}",
                    f"those that are there, {', '.join(map(shown, names))}",
                )
            chosen.append(found)
        return chosen


def _names(split: str) -> list[str]:
    """What a split may be called: validation_matched → validation_matched, dev_matched, …"""
    kind, _, rest = split.partition("_")
    return [f"{alias}_{rest}" if rest else alias for alias in ALIASES[kind]]
