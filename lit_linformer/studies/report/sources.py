"""Reads the folders given to `report`: grids, benchmarks, spectra and runs, finished or not."""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_linformer.runs.folder import CONFIG, TOKENIZER
from lit_linformer.runs.record import RunRecord, of_class
from lit_linformer.studies.grid.cell import CONVERTED, PRETRAINED, Cell, Grid
from lit_linformer.studies.grid.measures import median
from lit_linformer.studies.grid.table import read_table
from lit_linformer.utils.environment import without_folders
from lit_linformer.utils.errors import SettingError
from lit_linformer.utils.files import flat, last_line, read_json
from lit_linformer.utils.markdown import code

HOLDS = "the folder of a grid (table.json), a benchmark (benchmark.json), a spectrum (spectrum.json) or a run (config.yaml)"

# Columns of a curve: what training had cost so far.
SPENT = ("tokens", "seconds", "training_seconds", "cpu_seconds")

# Data settings that do not affect the validation rows.
OF_TRAINING = {"batch_size", "global_batch_size", "eval_batch_size", "mask_rate", "num_workers", "cache_dir", "verify", "seed"}


@dataclass
class Run(RunRecord):
    """One run of `fit`.

    Args:
        label: its name.
        log: the file with its output, if it belongs to a grid.
        missing: what a grid's cell still lacks, in words; "" if it is finished.
        before: the pretraining of a grid's cell; if its folder is missing, its cost counts as zero.
    """

    label: str
    log: Path | None = None
    missing: str = ""
    before: RunRecord | None = None

    @cached_property
    def curve(self) -> list[dict[str, float]]:
        """The curve, including the cost of the run before it."""
        rows = RunRecord(self.folder).curve
        return [row | {key: row[key] + spent for key, spent in self._spent.items() if key in row} for row in rows]

    def last(self, name: str, otherwise: Any = None) -> Any:
        """The last value, including the cost of the run before it."""
        found = self.result.get(name)
        return super().last(name, otherwise) if found is None or name not in self._spent else found + self._spent[name]

    @cached_property
    def _spent(self) -> dict[str, float]:
        """The cost of the run before it, if there is one."""
        return {name: self.before.last(name, 0) for name in SPENT} if self.before else {}

    @property
    def finished(self) -> bool:
        """Whether it has a result.json or, for runs from before there was one, was validated at its last step."""
        return not self.missing and (bool(self.result) or 0 < self.setting("trainer.max_steps", 0) <= self.last("step", 0))

    @property
    def pretraining(self) -> bool:
        """Whether it pretrains, judged by its curve or, without one, by its data and its metric."""
        if self.curve:
            return "perplexity" in self.curve[0]
        if self.result.get("best_metrics"):
            return False  # validated without PerplexityCurve: shown by its scores
        return self.of_texts and self.monitor.endswith("perplexity")

    @property
    def of_texts(self) -> bool:
        """Whether its data are texts to pretrain on, and not generated rows, a task's, or data of the user's own."""
        return of_class(self.setting("data.class_path"), "PretrainingData")

    @property
    def transformer(self) -> bool:
        """Whether its attention is exact; an unknown class counts as not exact."""
        from lit_linformer.model import ATTENTIONS

        with contextlib.suppress(ValueError):
            return ATTENTIONS.find(self.encoder("attention")).exact
        return False

    @property
    def teacher(self) -> float | None:
        """The teacher's perplexity, if this is a distillation that was validated."""
        return self.result.get("metrics", {}).get("val/teacher_perplexity")

    def points(self, by: str = "tokens") -> dict[float, float]:
        """Perplexity by tokens seen, or by another column of the curve, such as seconds."""
        rows = (row for row in self.curve if {"tokens", "perplexity", by} <= row.keys())
        return {row[by]: row["perplexity"] for row in rows if not math.isnan(row[by])}

    def state(self) -> str:
        """Empty for a finished run; otherwise how far it got, and its last log line."""
        if self.finished:
            return ""
        said = last_line(self.log)
        parts = ["failed" if said.startswith("error: ") else self.missing or "unfinished"]
        if self.curve:
            parts.append(f"validated up to step {self.curve[-1].get('step', 0):,.0f}")
        planned = ((self.setting(f"trainer.max_{unit}", -1), unit) for unit in ("steps", "epochs"))
        parts += [f"planned: {number:,} {unit}" for number, unit in planned if number > 0]
        parts += [f"the end of its log: {code(said)}"] if said else []
        return "; ".join(parts)

    @cached_property
    def text(self) -> tuple:
        """What perplexity depends on besides the model: two runs are comparable only if all of it agrees."""
        file = self.folder / TOKENIZER
        tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        kind, settings = str(self.setting("data.class_path")), self.setting("data.init_args", {}) or {}
        if not self.of_texts:  # any setting of which may affect the validation rows
            names = sorted(settings.keys() - OF_TRAINING)
        elif settings.get("validation_source"):
            names = ["validation_source", "column", "document_start", "max_length"]
        else:
            names = ["source", "validation_fraction", "column", "document_start", "max_length"]
        found = (kind, *(settings.get(name) for name in names))
        limit, batch = self.setting("trainer.limit_val_batches"), None
        if isinstance(limit, float) and limit == 1:  # all; the whole number 1 is one batch
            limit = None
        if limit is not None:  # then the rows of a batch, of all processes, decide which rows are read
            batch = settings.get("eval_batch_size") or settings.get("batch_size")
            batch = f"{batch} × {(self.result.get('environment') or {}).get('processes', 1)}"
        return (*map(str, found), tokenizer, str(limit), str(batch))


@dataclass
class Group:
    """Runs that differ only in what the median is taken over, usually the seed: one line of a figure and of a table."""

    label: str
    panel: str
    runs: list[Run]
    paper: str = ""

    @property
    def used(self) -> list[Run]:
        """The validated runs that are finished, or all validated ones if none is; if none was validated, the finished ones."""
        validated, finished = [run for run in self.runs if run.curve], [run for run in self.runs if run.finished]
        return [run for run in validated if run in finished] or validated or finished

    @property
    def transformer(self) -> bool:
        return any(run.transformer for run in self.runs)

    def median(self, by: str = "tokens") -> dict[float, float]:
        """{tokens: median perplexity} where all used runs were validated; or by the median of another column there."""
        points = [run.points() for run in self.used]
        return {at: median(of[tokens] for of in points) for tokens, at in self.at(by).items()}

    def at(self, by: str) -> dict[float, float]:
        """{tokens: median of another column of the curve}, where all used runs were validated."""
        needed = {"tokens", "perplexity", by}
        curves = [{row["tokens"]: row[by] for row in run.curve if needed <= row.keys()} for run in self.used]
        common = sorted(set.intersection(*map(set, curves))) if curves else []
        found = {tokens: median(of[tokens] for of in curves) for tokens in common}
        return {tokens: value for tokens, value in found.items() if not math.isnan(value)}

    def comparable(self, other: "Group") -> bool:
        """Whether both were validated on the same text at the same n."""
        texts = {run.text for group in (self, other) for run in group.used}
        return len(texts) == 1 and self.same("max_length") == other.same("max_length")

    def unlike(self, other: "Group") -> int:
        """The number of settings in which their first runs differ."""
        ours, theirs = (next((flat(run.config) for run in group.runs if run.config), {}) for group in (self, other))
        return sum(ours.get(name) != theirs.get(name) for name in ours.keys() | theirs.keys())

    def same(self, name: str) -> Any:
        """An encoder setting that all runs share, else None."""
        found = {str(run.encoder(name)) for run in self.runs if run.config}
        return found.pop() if len(found) == 1 else None


@dataclass
class Source:
    """What one folder holds.

    Args:
        kind: grid, benchmark, spectrum or run.
        folder: where.
        content: the JSON of a grid, benchmark or spectrum.
        grid: if it is one; its cells' runs are in ``runs``, in their order.
        runs: all runs of a grid, or the one run.
    """

    kind: str
    folder: Path
    content: dict[str, Any] = field(default_factory=dict)
    grid: Grid | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def pretraining(self) -> bool:
        return any(run.pretraining for run in self.runs) or (
            self.grid is not None and all(metric.endswith("perplexity") for metric in self.grid.metrics.values())
        )

    @property
    def finished(self) -> int:
        """How many of its parts are finished."""
        if self.kind == "benchmark":
            cells = self.content["cells"].values()
            return sum(any(entry["status"] != "failed" for entry in cell["models"].values()) for cell in cells)
        return 1 if self.kind == "spectrum" else sum(run.finished for run in self.runs)


def find(given: list[str]) -> tuple[list[Source], list[str]]:
    """Contents of the folders, or else of their subfolders two levels deep, without duplicates; and what could not be read.

    ValueError for a folder that holds nothing measured.
    """
    found: dict[tuple[str, Path], Source] = {}
    unread: list[str] = []
    for word in given:
        folder = Path(word)
        if not folder.is_dir():
            raise SettingError("source", folder, HOLDS, more=", which is no folder")
        broken: list[str] = []
        here = list(_read(folder)) or list(_below(folder, broken))
        if not here and not broken:
            raise SettingError("source", folder, f"{HOLDS}, or one with these in it", more=", which holds nothing measured")
        unread += broken
        for source in here:
            found.setdefault((source.kind, source.folder.resolve()), source)
    sources = list(found.values())
    cells = {run.folder.resolve() for source in sources if source.kind == "grid" for run in source.runs}
    return [source for source in sources if source.kind != "run" or source.folder.resolve() not in cells], unread


def _below(folder: Path, unread: list[str], levels: int = 2) -> Iterator[Source]:
    for child in sorted(path for path in folder.iterdir() if path.is_dir()):
        here: list[Source] = []
        try:
            here = list(_read(child))
        except ValueError as error:
            unread.append(str(error).removeprefix("source is "))
        yield from here
        if not here and levels > 1:
            yield from _below(child, unread, levels - 1)


def _read(folder: Path) -> Iterator[Source]:
    """The sources that a folder holds; a run's folder may hold its spectrum, too."""
    if (folder / "table.json").is_file():
        grid = read_table(folder)
        yield Source("grid", folder, read_json(folder / "table.json"), grid, [_cell(cell) for cell in grid.cells])
    is_run = (folder / CONFIG).is_file()
    for name, needed in (("benchmark", {"command", "settings", "environment", "cells"}), ("spectrum", {"runs", "threshold"})):
        for file in (folder / f"{name}.json", *([folder / name / f"{name}.json"] if is_run else [])):
            if not file.is_file():
                continue
            content = read_json(file)
            if content is not None and needed <= content.keys():
                yield Source(name, file.parent, content=content)
            elif content is None or "history" not in content:  # with a history it is the Spectrum callback's
                raise SettingError("source", folder, f"one that `{name}` wrote", more=f", whose {file.name} is not whole")
    if is_run and not RunRecord(folder).conversion:  # a conversion: others start from it, and nothing was trained
        yield Source("run", folder, runs=[Run(folder, without_folders(str(folder)))])


def _cell(cell: Cell) -> Run:
    run = Run(cell.run_dir, str(cell), cell.log)
    begins = Path(str(run.setting("model.init_args.pretrained"))).name
    if begins in (f"{cell.name}{PRETRAINED}", f"{cell.name}{CONVERTED}"):  # a folder of that name may be an earlier grid's
        run.before = RunRecord(cell.root / f"{cell.name}{PRETRAINED}")
    if left := cell.left():
        run.missing = "not tested yet" if left[0][0] == "test" else "unfinished" if run.config else "not started"
        return run
    try:
        cell.value()
    except ValueError as error:
        run.missing = str(error)
    return run
