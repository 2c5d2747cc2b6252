"""Reads and checks a grid file; command.py describes the format."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.runs.folder import check_name
from lit_linformer.studies.grid.cell import CONVERTED, PRETRAINED, Cell, Grid
from lit_linformer.studies.grid.measures import Measure
from lit_linformer.studies.grid.table import OF_CELLS
from lit_linformer.utils.arguments import check_choice, check_number
from lit_linformer.utils.configs import check_command, read_config
from lit_linformer.utils.errors import SettingError, UserError, meant

KEYS = ["name", "arguments", "axes", "table", "measures", "paper", "skip", "pretraining", "convert"]
TABLE_KEYS = ["rows", "columns", "value", "scale", "decimals"]
OURS = ["--name", "--ckpt_path", "--overwrite", "--trainer.default_root_dir", "--from"]  # set by the grid, to find its runs


def read_grid(path: Path, name: str | None = None, arguments: str = "") -> Grid:
    """Reads a grid file; ValueError, in one line, for anything that can be checked before the first cell runs."""
    # Every scalar stays text: 1e-3 and on are names here.
    what = "a grid file, as conf/paper/table2.yaml"
    spec = yaml.load(read_config(path, what), yaml.BaseLoader)
    check_command(path, spec, "grid", what)
    spec = _mapping(spec, str(path), KEYS)
    axes = _mapping(spec.get("axes"), "axes")
    axes = {axis: _mapping(values, f"axes.{axis}") for axis, values in axes.items()}
    if taken := [axis for axis in axes if axis in OF_CELLS]:
        raise UserError(f"axes names {taken[0]!r}, by which table.json has something else of each cell", "another name")
    table = _mapping(spec.get("table"), "table", TABLE_KEYS)
    rows, columns = (check_choice(f"table.{key}", table.get(key), axes) for key in ("rows", "columns"))
    if rows == columns:
        raise SettingError("table.columns", columns, f"another of {', '.join(axes)}", more=", which are the rows too")
    metrics = table.get("value")
    if isinstance(metrics, dict):
        _mapping(metrics, "table.value", axes[columns], kind="column")
        if missing := [column for column in axes[columns] if column not in metrics]:
            raise UserError(f"table.value names nothing for column {missing[0]!r}", "one name, or one for each column")
    else:
        metrics = dict.fromkeys(axes[columns], metrics)
    if wrong := [metric for metric in metrics.values() if not isinstance(metric, str) or not metric]:
        raise SettingError("table.value", wrong[0], "a metric's name, as val/accuracy, or one for each column")
    paper = _mapping(spec.get("paper") or {}, "paper", axes[rows], kind="row", empty=True)
    for row, numbers in paper.items():
        for column, value in _mapping(numbers, f"paper.{row}", axes[columns], kind="column").items():
            check_number(f"paper.{row}.{column}", value)
    measures = _mapping(spec.get("measures") or {}, "measures", empty=True)
    name = check_name(name if name is not None else spec.get("name") or path.stem)
    common, last = split_words("arguments", spec.get("arguments", "")), split_words("--arguments", arguments)
    words = {axis: {key: split_words(f"axes.{axis}.{key}", text) for key, text in axes[axis].items()} for axis in axes}
    before = _mapping(spec.get("pretraining") or {}, "pretraining", axes, kind="axis", empty=True)
    before = {axis: _mapping(of, f"pretraining.{axis}", axes[axis], kind="value") for axis, of in before.items()}
    before = {axis: {key: split_words(f"pretraining.{axis}.{key}", of[key]) for key in of} for axis, of in before.items()}
    if "convert" in spec and not before:
        raise SettingError("convert", spec["convert"], "with pretraining, whose weights it converts", more=" without it")
    conversion = split_words("convert", spec.get("convert", ""))[1]
    return Grid(
        name=name,
        axes=axes,
        rows=rows,
        columns=columns,
        metrics=metrics,
        scale=check_number("table.scale", table.get("scale", "1")),
        decimals=int(check_number("table.decimals", table.get("decimals", "1"), whole=True, least=0, most=10)),
        paper=paper,
        measures={key: Measure.parse(key, text) for key, text in measures.items()},
        cells=_cells(
            name, words, before, conversion, common, last, _skipped(spec.get("skip"), axes), lambda of: metrics[of[columns]]
        ),
    )


def _cells(
    name: str, words: dict, before: dict, conversion: list[str], common: tuple, last: tuple, skip: list[dict], metric: Any
) -> list[Cell]:
    """The product of the axes, each cell with what has to run before it."""
    cells: dict[str, Cell] = {}
    for keys in itertools.product(*words.values()):
        values = dict(zip(words, keys, strict=True))
        if any(left_out.items() <= values.items() for left_out in skip):
            continue
        slug = "-".join(filter(None, (re.sub("[^a-z0-9]+", "-", key.lower()).strip("-") for key in keys)))
        cell = Cell(values, f"{name}/{slug}", [], metric(values))
        cell.fit = _fit([common, *(words[axis][key] for axis, key in values.items()), last], cell.name)
        if before and all(values[axis] in before[axis] for axis in before):
            cell.pretraining = first = Cell(values, f"{cell.name}{PRETRAINED}", [], "")
            first.fit = _fit([common, *(before[axis][values[axis]] for axis in before), last], first.name)
            begins = first.run_dir
            if conversion:
                names = ["--from", str(begins), "--name", f"{cell.name}{CONVERTED}", "--overwrite", "true"]
                begins, cell.conversion = cell.converted, ["convert", *conversion, *names]
            cell.fit += ["--model.pretrained", str(begins)]
        if not slug or slug in cells:
            other = f"as {cells[slug]} is" if slug else "which is nothing"
            raise UserError(f"axes: the cell {cell} would be run {slug!r}, {other}", "values of different letters or digits")
        cells[slug] = cell
    before_it = ((slug, folder.name) for slug, cell in cells.items() for *_, folder in cell.parts()[:-1])
    if twice := [slug for slug, name in before_it if name in cells]:
        raise UserError(f"axes: a cell and what comes before {twice[0]!r} would be one run", "other values")
    if not cells:
        raise UserError("skip leaves no cell", "fewer entries")
    return list(cells.values())


def _fit(parts: list[tuple[list[str], list[str]]], name: str) -> list[str]:
    """Joins pieces of a command line. A --config after a setting would override it, so all of them go first."""
    configs, others = ([word for part in parts for word in part[place]] for place in (0, 1))
    return ["fit", *configs, *others, "--name", name]


def _skipped(entries: Any, axes: dict[str, dict]) -> list[dict[str, str]]:
    if entries and not isinstance(entries, list):
        raise SettingError("skip", entries, f"a list of mappings, as [{{{next(iter(axes))}: …}}]")
    for entry in entries or []:
        for axis, value in _mapping(entry, "skip", axes, kind="axis").items():
            check_choice(f"skip.{axis}", value, axes[axis])
    return entries or []


def _mapping(value: Any, where: str, allowed: Any = None, kind: str = "key", empty: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict) or not (value or empty):
        raise SettingError(where, value, "a mapping" + (f" of {', '.join(allowed)}" if allowed else ""))
    for key in value:
        if allowed is not None and key not in allowed:
            raise UserError(f"{where} names no {kind} by {key!r}{meant(key, allowed)}", ", ".join(allowed))
    return value


def split_words(where: str, text: Any) -> tuple[list[str], list[str]]:
    """Splits a piece of a command line into its --config files and the other words."""
    try:
        if not isinstance(text, str):
            raise ValueError("no text")
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(where, text, "a piece of command line, as --model.lr 1e-3", more=f" ({error})") from error
    configs, others = [], []
    left = iter(words)
    for word in left:
        key, equals, value = word.partition("=")
        if key in OURS:
            raise UserError(f"{where} holds {key}, which the grid sets itself", f"all settings but {', '.join(OURS)}")
        if key not in ("--config", "-c"):
            others.append(word)
            continue
        value = value if equals else next(left, "")
        if not Path(value).is_file():
            raise UserError(f"{where} holds --config {value}, which is no file", f"a file, seen from {Path.cwd()}")
        configs += ["--config", value]
    return configs, others
