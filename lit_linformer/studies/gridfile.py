"""What a grid file says: cells that are runs, and the table that they make. grid.py runs them and tells the format."""

import contextlib
import itertools
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.runs.folder import check_name, checkpoints
from lit_linformer.studies.configs import read_config
from lit_linformer.studies.settings import check_choice, check_number, meant

KEYS = ["name", "arguments", "axes", "table", "paper", "skip"]
TABLE_KEYS = ["rows", "columns", "value", "scale", "decimals"]
OURS = ["--name", "--ckpt_path", "--overwrite", "--trainer.default_root_dir"]  # the grid finds its runs by these


@dataclass
class Cell:
    """One run: the value that it has on each axis, and how `run.py` is called for it."""

    values: dict[str, str]
    name: str
    fit: list[str]
    metric: str
    root: Path = Path("runs")

    @property
    def run_dir(self) -> Path:
        return self.root / self.name

    @property
    def log(self) -> Path:
        return self.root / f"{self.name}.log"

    def __str__(self) -> str:
        return " · ".join(self.values.values())

    def left(self) -> list[list[str]]:
        """The commands that are still to be run, without `python run.py`; none when finished."""
        test = ["test", "--config", str(self.run_dir / "config.yaml"), "--name", self.name]
        tests = [test] if self.metric.startswith("test/") else []
        if read_json(self.run_dir / "result.json") is not None:
            return tests if read_json(self.run_dir / "test.json") is None else []
        # auto: a run that was killed before its first last.ckpt has nothing to go on from, and starts anew.
        return [[*self.fit, "--ckpt_path", "auto"] if checkpoints(self.run_dir) else self.fit, *tests]

    def value(self) -> float | None:
        """What the table shows of the cell, at its best validation where that was written down; None while unfinished."""
        if self.left():
            return None
        file = self.run_dir / ("test.json" if self.metric.startswith("test/") else "result.json")
        result = read_json(file) or {}
        metrics = {**result.get("metrics", {}), **result.get("best_metrics", {})}
        metrics = {name: math.nan if value is None else value for name, value in metrics.items()}  # JSON knows no NaN
        if not isinstance(metrics.get(self.metric), int | float):
            there = ", ".join(metrics) or "none, it holds no metric"
            raise ValueError(f"table.value is {self.metric!r}, which {file} does not hold; allowed: {there}")
        return float(metrics[self.metric])


@dataclass
class Grid:
    """What a grid file says, checked."""

    name: str
    axes: dict[str, dict[str, str]]
    rows: str
    columns: str
    metrics: dict[str, str]  # column → metric
    scale: float
    decimals: int
    paper: dict[str, dict[str, str]]  # row → column → the number as it was written
    cells: list[Cell]

    def select(self, only: list[str]) -> list[Cell]:
        """The cells that ``--only AXIS=VALUE …`` leaves."""
        chosen: dict[str, list[str]] = {}
        for word in only:
            axis, _, value = word.partition("=")
            check_choice("only", axis, self.axes)
            chosen.setdefault(axis, []).append(check_choice(f"only {axis}", value, self.axes[axis]))
        cells = [cell for cell in self.cells if all(cell.values[axis] in values for axis, values in chosen.items())]
        if not cells:
            raise ValueError(f"only is {' '.join(only)}, which skip leaves out; allowed: another cell")
        return cells


def read_grid(path: Path, name: str | None = None, arguments: str = "") -> Grid:
    """The grid in a file; raises ValueError, in one line, for whatever could go wrong before the first cell runs."""
    spec = _mapping(_load(path), str(path), KEYS)
    axes = _mapping(spec.get("axes"), "axes")
    axes = {axis: _mapping(values, f"axes.{axis}") for axis, values in axes.items()}
    table = _mapping(spec.get("table"), "table", TABLE_KEYS)
    rows, columns = (check_choice(f"table.{key}", table.get(key), axes) for key in ("rows", "columns"))
    if rows == columns:
        raise ValueError(f"table.columns is {columns!r}, which are the rows too; allowed: another of {', '.join(axes)}")
    metrics = table.get("value")
    if isinstance(metrics, dict):
        _mapping(metrics, "table.value", axes[columns], kind="column")
        if missing := [column for column in axes[columns] if column not in metrics]:
            raise ValueError(f"table.value names nothing for column {missing[0]!r}; allowed: one name, or one for each column")
    else:
        metrics = dict.fromkeys(axes[columns], metrics)
    if wrong := [metric for metric in metrics.values() if not isinstance(metric, str) or not metric]:
        raise ValueError(f"table.value is {wrong[0]!r}; allowed: a metric's name, as val/accuracy, or one for each column")
    paper = _mapping(spec.get("paper") or {}, "paper", axes[rows], kind="row", empty=True)
    for row, numbers in paper.items():
        for column, value in _mapping(numbers, f"paper.{row}", axes[columns], kind="column").items():
            check_number(f"paper.{row}.{column}", value)
    name = check_name(name if name is not None else spec.get("name") or path.stem)
    common, last = _words("arguments", spec.get("arguments", "")), _words("--arguments", arguments)
    words = {axis: {key: _words(f"axes.{axis}.{key}", text) for key, text in axes[axis].items()} for axis in axes}
    return Grid(
        name=name,
        axes=axes,
        rows=rows,
        columns=columns,
        metrics=metrics,
        scale=check_number("table.scale", table.get("scale", "1")),
        decimals=int(check_number("table.decimals", table.get("decimals", "1"), whole=True, most=10)),
        paper=paper,
        cells=_cells(name, words, common, last, _skipped(spec.get("skip"), axes), lambda values: metrics[values[columns]]),
    )


def _cells(name: str, words: dict, common: tuple, last: tuple, skip: list[dict], metric: Any) -> list[Cell]:
    """The product of the axes. On a command line a --config after a setting would override it, hence all of them go first."""
    cells: dict[str, Cell] = {}
    for keys in itertools.product(*words.values()):
        values = dict(zip(words, keys, strict=True))
        if any(left_out.items() <= values.items() for left_out in skip):
            continue
        parts = [common, *(words[axis][key] for axis, key in values.items()), last]
        slug = "-".join(filter(None, (re.sub("[^a-z0-9]+", "-", key.lower()).strip("-") for key in keys)))
        cell = Cell(values, f"{name}/{slug}", [], metric(values))
        cell.fit = ["fit", *(word for configs, _ in parts for word in configs), *(word for _, rest in parts for word in rest)]
        cell.fit += ["--name", cell.name]
        if not slug or slug in cells:
            other = f"as {cells[slug]} is" if slug else "which is nothing"
            raise ValueError(
                f"axes: the cell {cell} would be run {slug!r}, {other}; allowed: values of different letters or digits"
            )
        cells[slug] = cell
    if not cells:
        raise ValueError("skip leaves no cell; allowed: fewer entries")
    return list(cells.values())


def _skipped(entries: Any, axes: dict[str, dict]) -> list[dict[str, str]]:
    if entries and not isinstance(entries, list):
        raise ValueError(f"skip is {entries!r}; allowed: a list of mappings, as [{{{next(iter(axes))}: …}}]")
    for entry in entries or []:
        for axis, value in _mapping(entry, "skip", axes, kind="axis").items():
            check_choice(f"skip.{axis}", value, axes[axis])
    return entries or []


def _load(path: Path) -> Any:
    # Every scalar stays the text it is: 1e-3 and on are names here.
    return yaml.load(read_config(path, "a grid file, as conf/paper/table2.yaml"), yaml.BaseLoader)


def _mapping(value: Any, where: str, allowed: Any = None, kind: str = "key", empty: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict) or not (value or empty):
        raise ValueError(f"{where} is {value!r}; allowed: a mapping" + (f" of {', '.join(allowed)}" if allowed else ""))
    for key in value:
        if allowed is not None and key not in allowed:
            raise ValueError(f"{where} names no {kind} by {key!r}{meant(key, allowed)}; allowed: {', '.join(allowed)}")
    return value


def _words(where: str, text: Any) -> tuple[list[str], list[str]]:
    """The words of a piece of command line: those of its --config files, and the others."""
    try:
        if not isinstance(text, str):
            raise ValueError("no text")
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{where} is {text!r} ({error}); allowed: a piece of command line, as --model.lr 1e-3") from error
    configs, others = [], []
    left = iter(words)
    for word in left:
        key, equals, value = word.partition("=")
        if key in OURS:
            raise ValueError(f"{where} holds {key}, which the grid sets itself; allowed: all settings but {', '.join(OURS)}")
        if key not in ("--config", "-c"):
            others.append(word)
            continue
        value = value if equals else next(left, "")
        if not Path(value).is_file():
            raise ValueError(f"{where} holds --config {value}, which is no file; allowed: a file, seen from {Path.cwd()}")
        configs += ["--config", value]
    return configs, others


def read_table(folder: Path) -> Grid:
    """The grid that left table.json in a folder; its cells tell values, but cannot be run. ValueError for another file."""
    try:
        table = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        cells, medians = table["cells"], table["medians"]
        names = [key for key in cells[0] if key not in ("run", "metric", "value")]
        axes = {axis: dict.fromkeys(cell[axis] for cell in cells) for axis in names}
        rows = table.get("rows") or next(axis for axis in names if set(axes[axis]) <= set(medians))
        columns = table.get("columns") or next(axis for axis in names if axis != rows)
        return Grid(
            name=table["name"],
            axes={**axes, rows: dict.fromkeys(medians)},
            rows=rows,
            columns=columns,
            metrics={cell[columns]: cell["metric"] for cell in cells},
            scale=table["scale"],
            decimals=table.get("decimals", 1),
            paper={row: {column: f"{value:g}" for column, value in of.items()} for row, of in table["paper"].items()},
            cells=[
                Cell({axis: cell[axis] for axis in names}, Path(cell["run"]).name, ["fit"], cell["metric"], folder)
                for cell in cells
            ],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{folder}/table.json is no grid's table; allowed: what `python run.py grid` writes") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """None for a file that is missing or not whole."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def aligned(lines: list[list[str]], right: bool = False, words: int = 0) -> str:
    """A Markdown table, its first line the head, that reads well on a terminal too.

    Columns stand at the left, or with ``right`` at the right but for the first ``words``.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = [right and place >= words for place in range(len(widths))]
    rules = ["-" * (width - 1) + ":" if at_right else "-" * width for width, at_right in zip(widths, to_right, strict=True)]
    padded = (
        [text.rjust(w) if at_right else text.ljust(w) for text, w, at_right in zip(line, widths, to_right, strict=True)]
        for line in (lines[0], rules, *lines[1:])
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)
