"""A grid and its cells, each of which is a run."""

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path

from lit_linformer.runs.folder import CONFIG, CONVERSION, RESULT, TEST, checkpoints
from lit_linformer.runs.place import RUNS
from lit_linformer.runs.record import RunRecord, of_split
from lit_linformer.studies.grid.measures import Measure
from lit_linformer.utils.arguments import check_choice
from lit_linformer.utils.errors import SettingError

PRETRAINED, CONVERTED = "-pretraining", "-converted"  # suffixes to a cell's name, for the runs that come before it


@dataclass
class Cell:
    """One run: its value on each axis, and the arguments of its `fit`.

    pretraining: the run whose weights it starts from; conversion: the arguments of the `convert` between the two, if any.
    """

    values: dict[str, str]
    name: str
    fit: list[str]
    metric: str
    root: Path = RUNS
    pretraining: "Cell | None" = None
    conversion: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.root / self.name

    @property
    def converted(self) -> Path:
        return self.root / f"{self.name}{CONVERTED}"

    @property
    def log(self) -> Path:
        return self.root / f"{self.name}.log"

    @property
    def tested(self) -> bool:
        """Whether the table shows a result of `test`."""
        return of_split(self.metric, "test")

    @property
    def begun(self) -> bool:
        """Whether any part of it was ever started: by a grid, which leaves a log, or by a line of --print_commands."""
        return self.log.exists() or any((self.root / f"{self.name}{end}").exists() for end in ("", PRETRAINED))

    def __str__(self) -> str:
        return " · ".join(self.values.values())

    def left(self) -> list[list[str]]:
        """The commands still to be run, without `python run.py`; none when finished."""
        test = ["test", "--config", str(self.run_dir / CONFIG), "--name", self.name]
        tests, run = [test] if self.tested else [], RunRecord(self.run_dir)
        if run.result:
            return [] if run.tested else tests
        # auto: a run that was killed before its first last.ckpt has nothing to continue from, and starts from scratch.
        fit = [*self.fit, "--ckpt_path", "auto"] if checkpoints(self.run_dir) else self.fit
        before = self.pretraining.left() if self.pretraining else []
        if self.pretraining and self.conversion and (before or not self._is_converted(self.pretraining)):
            before.append(self.conversion)
        return [*before, fit, *tests]

    def _is_converted(self, pretraining: "Cell") -> bool:
        """Whether the conversion is one of the current pretraining, which may have been deleted and run again since."""
        with contextlib.suppress(OSError):
            made, of = (path.stat().st_mtime for path in (self.converted / CONVERSION, pretraining.run_dir / RESULT))
            return made >= of
        return False

    def parts(self) -> list[tuple[str, list[str], Path]]:
        """Its parts, in order: (what it is in words, its arguments, its folder)."""
        of = []
        if self.pretraining:
            of.append(("its pretraining", self.pretraining.fit, self.pretraining.run_dir))
        if self.conversion:
            of.append(("its conversion", self.conversion, self.converted))
        return [*of, ("it", self.fit, self.run_dir)]

    def value(self) -> float | None:
        """The table's value, at the best validation if that was recorded; None while unfinished."""
        if self.left():
            return None
        run = RunRecord(self.run_dir)
        result = run.tested if self.tested else run.result
        metrics = {**result.get("metrics", {}), **result.get("best_metrics", {})}
        metrics = {name: math.nan if value is None else value for name, value in metrics.items()}  # JSON knows no NaN
        if not isinstance(metrics.get(self.metric), int | float):
            file, there = self.run_dir / (TEST if self.tested else RESULT), ", ".join(metrics) or "none, it holds no metric"
            raise SettingError("table.value", self.metric, there, more=f", which {file} does not hold")
        return float(metrics[self.metric])


@dataclass
class Grid:
    """A grid file, read and checked."""

    name: str
    axes: dict[str, dict[str, str]]
    rows: str
    columns: str
    metrics: dict[str, str]  # column → metric
    scale: float
    decimals: int
    paper: dict[str, dict[str, str]]  # row → column → the number as it was written
    cells: list[Cell]
    measures: dict[str, Measure] = field(default_factory=dict)

    @property
    def begun(self) -> list[str]:
        """Rows with a cell that was ever started; all rows before the first cell is."""
        rows = dict.fromkeys(cell.values[self.rows] for cell in self.cells if cell.begun)
        return [row for row in self.axes[self.rows] if row in rows or not rows]

    def select(self, only: list[str]) -> list[Cell]:
        """The cells that ``--only AXIS=VALUE …`` selects."""
        chosen: dict[str, list[str]] = {}
        for word in only:
            axis, _, value = word.partition("=")
            check_choice("only", axis, self.axes)
            chosen.setdefault(axis, []).append(check_choice(f"only {axis}", value, self.axes[axis]))
        cells = [cell for cell in self.cells if all(cell.values[axis] in values for axis, values in chosen.items())]
        if not cells:
            raise SettingError("only", " ".join(only), "another cell", more=", which skip leaves out")
        return cells
