"""Where the rows of Long Range Arena's tasks come from: generated here, or read from files in their authors' layout.

A row is ([symbols of each of its texts], label): symbols are numbers from 0, uint8. A source has `fraction`, the share of a
split that was read so far, or 0 if it is not known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.text_tasks import TextTask, find_task
from lit_linformer.data.longrange import listops, pathfinder
from lit_linformer.data.pretraining.token_files import SPLITS
from lit_linformer.data.reading import readable, stamps, text_lines
from lit_linformer.utils.environment import cores
from lit_linformer.utils.errors import SettingError, UserError

Rows = Iterator[tuple[list[np.ndarray], int]]
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_BYTES = 1 + 3 * 32 * 32  # of an image, label first
GRAY = np.array([299, 587, 114]) / 1000  # ITU-R BT.601; TensorFlow's rgb_to_grayscale, with 0.2989, differs slightly


@dataclass(frozen=True)
class LongTask:
    """A task of Long Range Arena.

    Args:
        name: Value of data.task.
        labels: Names of the classes.
        symbols: Number of different symbols.
        texts: Texts in a row: 1, or 2 to be compared.
        rows: Rows of train, validation and test if they are generated; None: they are read from files.
        pixels: Pixels of an image; 0: rows are not images.
    """

    name: str
    labels: tuple[str, ...]
    symbols: int = 256
    texts: int = 1
    rows: tuple[int, int, int] | None = None
    pixels: int = 0

    @property
    def text_task(self) -> TextTask:
        """This task in the form of a fine-tuning task."""
        return TextTask(self.name, (("text",),) * self.texts, labels=self.labels, submission=(f"{self.name}.tsv",))


TASKS = {
    task.name: task
    for task in (
        LongTask("listops", tuple(map(str, range(10))), len(listops.SYMBOLS), rows=(96_000, 2_000, 2_000)),
        LongTask("text", ("neg", "pos")),
        LongTask("retrieval", ("different", "related"), texts=2),
        LongTask("image", CIFAR_CLASSES, pixels=1024),
        LongTask("pathfinder", ("two lines", "one line"), rows=(160_000, 20_000, 20_000), pixels=1024),
    )
}


class TextSource(LabelledSource):
    """IMDB byte by byte, from any of the layouts that FineTuningData reads (`data.task: IMDB`)."""

    def __init__(self, source: str, cache: Path):
        super().__init__(source, find_task("IMDB"), cache=cache)

    def rows(self, split: str) -> Rows:
        for row in super().rows(split):
            yield [np.frombuffer(text.strip().encode(), np.uint8) for text in row.texts], row.label


class FileSource:
    """Rows of a task's files in a folder, named as in FROM_FILES."""

    fraction = 0.0

    def __init__(self, task: str, source: str):
        contents, self.names, self.read = FROM_FILES[task]
        self.folder = Path(source)
        if not self.splits():
            raise SettingError("data.source", source, f"a folder with {contents}", more=", where none is found")

    def files(self, split: str) -> list[Path]:
        return sorted(self.folder.glob(self.names[split])) if split in self.names else []

    def splits(self) -> list[str]:
        return [split for split in SPLITS if self.files(split)]

    def missing(self, split: str) -> ValueError:
        """The error to raise for a required split that is missing."""
        return SettingError("data.source", str(self.folder), self.names[split], more=f", which has no {split} split")

    def stamp(self, split: str):
        return stamps(self.files(split), self.folder)

    def rows(self, split: str) -> Rows:
        return self.read(self.files(split))


def papers(files: list[Path]) -> Rows:
    """Pairs of papers of the ACL Anthology Network: label, two ids, two texts, separated by tabs; no header, no quoting."""
    for path in files:
        for number, line, _ in text_lines(path, "data.source"):
            label, *fields = line.split("\t")
            if len(fields) != 4 or label not in ("0", "1", "0.0", "1.0"):
                raise UserError(
                    f"data.source: {path}:{number} has the label {label!r} and {len(fields)} fields more",
                    "0 or 1, two ids and two texts, with a tab between each",
                )
            yield [np.frombuffer(text.encode(), np.uint8) for text in fields[2:]], int(float(label))


def images(files: list[Path]) -> Rows:
    """CIFAR-10's binary version, its pixels as shades of gray."""
    for path in files:
        with readable(path, "data.source"), open(path, "rb") as file:
            size = path.stat().st_size
            if size % CIFAR_BYTES:
                raise UserError(f"data.source: {path} has {size} bytes", f"{CIFAR_BYTES} for each image of 32 × 32")
            for number in range(1, size // CIFAR_BYTES + 1):
                record = file.read(CIFAR_BYTES)
                if record[0] >= len(CIFAR_CLASSES):
                    raise UserError(f"data.source: {path}, image {number} has the label {record[0]}", "0 to 9")
                colours = np.frombuffer(record, np.uint8, offset=1).reshape(3, -1)
                yield [(GRAY @ colours).round().astype(np.uint8)], record[0]


# What a folder should hold, in words, and as patterns for each split's files; and the function that reads the files.
FROM_FILES: dict[str, tuple[str, dict[str, str], Callable[[list[Path]], Rows]]] = {
    "listops": (
        "*_train.tsv, *_val.tsv and *_test.tsv",
        {"train": "*_train.tsv", "validation": "*_val.tsv", "test": "*_test.tsv"},
        listops.read,
    ),
    "retrieval": (
        "*.train.tsv, *.eval.tsv and *.test.tsv",
        {"train": "*.train.tsv", "validation": "*.eval.tsv", "test": "*.test.tsv"},
        papers,
    ),
    "image": (
        "data_batch_1.bin … data_batch_5.bin and test_batch.bin (CIFAR-10's binary version)",
        {"train": "data_batch_*.bin", "test": "test_batch.bin"},
        images,
    ),
}


BENCHMARK = "hard"  # the level of generated rows that is Long Range Arena's
GENERATORS = {"listops": listops, "pathfinder": pathfinder}  # modules with LEVELS and row(split, level, number)
# To be increased when the same settings give other rows than before, so that old cached rows are not used.
VERSIONS = {"listops": 1, "pathfinder": 2}
FEW = 1000  # so few rows are drawn before worker processes would have started


class GeneratedSource:
    """ListOps or Pathfinder, made by a process on each core: a row is a function of its number, the split and the level."""

    fraction = 0.0

    def __init__(self, name: str, rows: dict[str, int], level: str):
        self.name, self.counts, self.level = name, rows, level
        if level not in (levels := GENERATORS[name].LEVELS):
            raise SettingError("data.level", level, ", ".join(levels), when=f"with data.task {name}")

    def splits(self) -> list[str]:
        return list(self.counts)

    def stamp(self, split: str):
        level = None if (self.name, self.level) == ("listops", BENCHMARK) else self.level  # as before ListOps had levels
        return ["generated", VERSIONS[self.name], self.name, self.counts[split], level, 0]  # 0: the seed of all rows

    def rows(self, split: str) -> Rows:
        count = self.counts[split]
        row = partial(GENERATORS[self.name].row, split, self.level)
        workers = cores() if count > FEW else 0
        own = torch.Generator()  # so the model's initialisation does not depend on the cache
        made = DataLoader(range(count), batch_size=None, collate_fn=row, num_workers=workers, generator=own)
        for number, each in enumerate(made, 1):
            self.fraction = number / count
            yield each
