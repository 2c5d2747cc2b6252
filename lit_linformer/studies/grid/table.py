"""A grid's table: made from its runs, written as Markdown and JSON, and read again by `report`."""

import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

from lit_linformer.runs.place import run_folder
from lit_linformer.studies.grid import measures
from lit_linformer.studies.grid.cell import Cell, Grid
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.files import write_json, write_text
from lit_linformer.utils.markdown import of_words

OF_CELLS = ("run", "metric", "value")  # keys of each cell in table.json, besides the axes


def summary(grid: Grid) -> dict[str, Any]:
    """Values, medians and the paper's numbers, in the table's unit (× scale)."""
    cells, places = [], {}  # (row, column): its cells and their values
    for cell in grid.cells:
        value = None
        with contextlib.suppress(ValueError):  # raised if its metric is missing, which run_cells has reported
            value = cell.value()
        value = value and value * grid.scale
        cells.append({**cell.values, "run": cell.name, "metric": cell.metric, "value": value})
        places.setdefault((cell.values[grid.rows], cell.values[grid.columns]), []).append((cell, value))
    medians: dict[str, dict[str, Any]] = {row: {} for row in grid.axes[grid.rows]}
    measured = []
    for (row, column), here in places.items():
        done = [value for _, value in here if value is not None]
        if any(map(math.isnan, done)):  # NaN cannot be ordered
            done = [math.nan] * len(done)
        if done:
            found = {"median": measures.median(done), "min": min(done), "max": max(done)}
            medians[row][column] = found | {"runs": len(done), "of": len(here)}
        if grid.measures:
            runs = [cell.run_dir for cell, _ in here if not cell.left()]
            measured.append({"row": row, "column": column, "values": measures.medians(grid.measures, runs)})
    return {
        "name": grid.name,
        "scale": grid.scale,
        "cells": cells,
        "medians": medians,
        "measured": measured,
        "averages": {row: _average(grid, [entry["median"] for entry in medians[row].values()]) for row in medians},
        "paper": {row: {column: _as_written(number) for column, number in of.items()} for row, of in grid.paper.items()},
    }


def _as_written(number: str) -> float:
    """The number, whose str is the text again: 94.0, but 94 as a whole number."""
    return int(number) if number.isdecimal() else float(number)


def _average(grid: Grid, numbers: list[float]) -> float | None:
    """The average over all columns, or None: averages over fewer are not comparable."""
    return statistics.fmean(numbers) if len(numbers) == len(grid.axes[grid.columns]) else None


def markdown(grid: Grid, table: dict[str, Any]) -> str:
    """The table as aligned Markdown, which is also shown on the terminal; only rows with a cell that was started."""

    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.{grid.decimals}f}"

    def entry(of: dict[str, Any] | None) -> str:
        if of is None or of["of"] == 1:
            return show(of and of["median"])
        runs = f"{of['runs']} of {of['of']}" if of["runs"] < of["of"] else of["runs"]
        return f"{show(of['median'])} ({show(of['min'])}–{show(of['max'])}; {runs} runs)"

    columns = list(grid.axes[grid.columns])
    lines = [[grid.rows, *columns, "average"]]
    for row in grid.begun:
        medians = table["medians"][row]
        lines.append([row, *(entry(medians.get(column)) for column in columns), show(table["averages"][row])])
        if numbers := grid.paper.get(row):  # as the paper prints them
            average = _average(grid, [float(number) for number in numbers.values()])
            lines.append([f"{row}: paper", *(numbers.get(column, "–") for column in columns), show(average)])
    return of_words(lines, right=True, words=1)


def measured(table: dict[str, Any]) -> str:
    """The second table, of the grid's measures besides its value: a row for each cell that has any; "" if none has."""
    entries = table.get("measured") or []
    found = [entry for entry in entries if any(value is not None for value in entry["values"].values())]
    if not found:
        return ""
    by_column = len({entry["column"] for entry in entries}) > 1
    lines = [[table["rows"], *([table["columns"]] if by_column else []), *found[0]["values"]]]
    for entry in found:
        place = [entry["row"], *([entry["column"]] if by_column else [])]
        lines.append([*place, *(measures.shown(value) for value in entry["values"].values())])
    return of_words(lines, right=True, words=1 + by_column)


def not_found(grid: Grid) -> list[str]:
    """The measures that no finished cell has, perhaps for a wrong name."""
    done = [cell.run_dir for cell in grid.cells if not cell.left()]
    return [name for name, value in measures.medians(grid.measures, done).items() if done and value is None]


def write_table(grid: Grid, command: str) -> Path:
    """Writes table.md and table.json into the grid's folder, which it returns."""
    folder, table, begun = run_folder(grid.name), summary(grid), grid.begun
    form = {"command": command, "rows": grid.rows, "columns": grid.columns, "decimals": grid.decimals}
    parts = [f"# {grid.name}\n", f"{heading(grid)}\n`{command}`\n", markdown(grid, table), measured({**form, **table})]
    if left := [row for row in grid.axes[grid.rows] if row not in begun]:
        parts.append(f"Not started: {'; '.join(left)}\n")
    write_text(folder / "table.md", "\n".join(filter(None, parts)))
    write_json(folder / "table.json", {**form, **table}, indent=2)
    return folder


def heading(grid: Grid) -> str:
    """What the table shows, in one line."""
    by_column = [f"{column}: {metric}" for column, metric in grid.metrics.items()]
    what = ", ".join(by_column) if len(set(grid.metrics.values())) > 1 else next(iter(grid.metrics.values()))
    over = [axis for axis in grid.axes if axis not in (grid.rows, grid.columns)]
    how = f"; median (min–max; how many) over {', '.join(over)}" if over else ""
    return f"{what}{f' × {grid.scale:g}' if grid.scale != 1 else ''}{how}"


def read_table(folder: Path) -> Grid:
    """The grid that wrote a folder's table.json; its cells have values, but cannot be run. ValueError for another file."""
    try:
        table = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        cells, rows, columns = table["cells"], table["rows"], table["columns"]
        names = [key for key in cells[0] if key not in OF_CELLS]
        axes = {axis: dict.fromkeys(cell[axis] for cell in cells) for axis in names}
        return Grid(
            name=table["name"],
            axes={**axes, rows: dict.fromkeys(table["medians"])},
            rows=rows,
            columns=columns,
            metrics={cell[columns]: cell["metric"] for cell in cells},
            scale=table["scale"],
            decimals=table["decimals"],
            paper={row: {column: str(value) for column, value in of.items()} for row, of in table["paper"].items()},
            cells=[
                Cell({axis: cell[axis] for axis in names}, Path(cell["run"]).name, ["fit"], cell["metric"], folder)
                for cell in cells
            ],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}/table.json is no grid's table", "what `python run.py grid` writes") from error
