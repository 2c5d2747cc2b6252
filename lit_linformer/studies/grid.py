"""A grid of runs and the table that they make: `python run.py grid --config conf/paper/table2.yaml`.

Each cell is a run NAME/SLUG of `fit`, then of `test` where the table shows a test/… value, in a process of its own. It is
finished when fit has written result.json (test: test.json), so the same command goes on wherever the last one stopped, and
makes the table when nothing is left. The grid file:

    name: table2                              # results go to runs/table2/
    arguments: --trainer.precision bf16-mixed # of every cell; the axes override them, --arguments overrides the axes
    axes:                                     # the cells are their product; each value is what it adds to the command line
      model: {Transformer: --model.pretrained runs/t, "Linformer, 128": --model.pretrained runs/l}
      task: {SST-2: --config conf/finetune/sst2.yaml, IMDB: --config conf/finetune/imdb.yaml}
      seed: {1: --seed_everything 1, 2: --seed_everything 2}   # neither rows nor columns: the table shows the median
    table: {rows: model, columns: task, value: {SST-2: val/accuracy, IMDB: test/accuracy}, scale: 100, decimals: 1}
    paper: {"Linformer, 128": {SST-2: 93.1}}  # shown below the row
    skip: [{model: Transformer, task: IMDB}]  # cells left out
"""

import contextlib
import fcntl
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lit_linformer.studies.gridfile import Cell, Grid, aligned, read_grid
from lit_linformer.studies.settings import check_choice, check_number, help_shown, parse
from lit_linformer.utils.files import json_text, last_line, write_text

SETTINGS = {
    "config": ("FILE", "the grid file; required"),
    "jobs": ("N", "cells at a time (default 1); share the processor among them with OMP_NUM_THREADS"),
    "only": ("AXIS=VALUE", "run these cells only; may stand several times"),
    "arguments": ('"--SETTING VALUE …"', "to the end of every cell's command line; the same one each time, or another --name"),
    "name": ("NAME", "results go to runs/NAME/ (default: the name in the file)"),
    "print_commands": ("true", "run nothing, print the commands of each unfinished cell, a line a cell: for a job array"),
}
RUN_PY = Path(__file__).resolve().parents[2] / "run.py"
PATIENCE = 15.0  # seconds that a run has to end by itself after Ctrl-C


def main(argv: list[str]) -> None:
    """Runs what is unfinished and writes the table; raises ValueError for a bad file and at the end if cells failed."""
    if help_shown(argv, "grid --config FILE [--SETTING VALUE …]", SETTINGS, 36, __doc__):
        return
    given = parse("grid", SETTINGS, argv)
    if "config" not in given:
        raise ValueError("--config is not given; allowed: a grid file, as conf/paper/table2.yaml")
    last = {key: values[-1] for key, values in given.items()}
    jobs = int(check_number("jobs", last.get("jobs", "1"), whole=True, least=1))
    only_print = check_choice("print_commands", last.get("print_commands", "false"), ["true", "false"]) == "true"
    grid = read_grid(Path(last["config"]), last.get("name"), last.get("arguments", ""))
    cells = grid.select(given.get("only", []))
    if only_print:
        for cell in cells:
            if left := cell.left():
                print(" && ".join(shlex.join(_command(words)) for words in left))
        return
    command = shlex.join(["python", "run.py", "grid", *argv])
    write_table(grid, command)  # by this file `report` knows a grid, be it at work
    try:
        failed = _until_stopped(cells, jobs)
    finally:
        folder = write_table(grid, command)
    print((folder / "table.md").read_text(encoding="utf-8"), end="", flush=True)
    if failed:
        names = ", ".join(str(cell) for cell in failed[:4]) + (", …" if len(failed) > 4 else "")
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {names}; their output is in {folder}/*.log; "
            "allowed: the same command again continues"
        )


def _command(words: list[str]) -> list[str]:
    return [sys.executable, os.path.relpath(RUN_PY) if RUN_PY.is_relative_to(Path.cwd()) else str(RUN_PY), *words]


class Job:
    """A cell that is running. Its log is its lock: the run's processes hold it too, even when the grid itself was killed."""

    def __init__(self, cell: Cell, label: str):
        self.cell, self.label = cell, label
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(cell.log, "ab")
        try:
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if another grid has it
        except OSError:
            self.log.close()
            raise
        self.began = time.monotonic()

    def start(self, words: list[str]) -> None:
        """Starts one command, in a session of its own: what Ctrl-C stops, the grid stops, with all children of its."""
        if words[0] == "fit":
            (self.cell.run_dir / "test.json").unlink(missing_ok=True)  # of the weights before
        self.words = words
        self.log.write(f"$ {shlex.join(_command(words))}\n".encode())
        self.log.flush()
        self.process = subprocess.Popen(
            _command(words), stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def error(self) -> str:
        """The run's last error line, or its last line, or what is known."""
        if self.process.returncode < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        if self.process.returncode == 0:
            missing = "test.json" if self.words[0] == "test" else "result.json"
            return f"{self.words[0]} ended, but {self.cell.run_dir} holds no whole {missing}"
        return last_line(self.cell.log).removeprefix("error: ") or f"exit status {self.process.returncode}"


def _until_stopped(cells: list[Cell], jobs: int) -> list[Cell]:
    """run_cells, which Ctrl-C, a closed terminal and a cluster's SIGTERM stop alike."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    # Under nohup SIGHUP is ignored, and stays so.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        return run_cells(cells, jobs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def run_cells(cells: list[Cell], jobs: int = 1) -> list[Cell]:
    """Runs what is left of the cells, ``jobs`` at a time; returns those that failed."""
    failed, queue, running = [], [], []
    for number, cell in enumerate(cells, 1):
        label = f"[{number}/{len(cells)}] {cell}"
        if cell.left():
            queue.append((cell, label))
        else:
            _report(cell, label, None, failed)
    try:
        while queue or running:
            while queue and len(running) < jobs:
                if job := _start(*queue.pop(0)):
                    running.append(job)
            for job in [job for job in running if job.process.poll() is not None]:
                left = job.cell.left()
                if left and left[0][0] != job.words[0]:  # after fit, test
                    job.start(left[0])
                    continue
                running.remove(job)
                job.log.close()
                if left:
                    print(f"{job.label}: failed ({time.monotonic() - job.began:.0f} s): {job.error()}", flush=True)
                    failed.append(job.cell)
                else:
                    _report(job.cell, job.label, time.monotonic() - job.began, failed)
            time.sleep(0.1)
    finally:
        _stop(running)
    return failed


def _start(cell: Cell, label: str) -> Job | None:
    try:
        job = Job(cell, label)
    except BlockingIOError:
        print(f"{label}: left alone, it is already running (its log {cell.log} is locked)", flush=True)
        return None
    left = cell.left()
    if not left:  # another grid has finished it in the meantime
        job.log.close()
        _report(cell, label, None, [])
        return None
    job.start(left[0])
    goes_on = " goes on" if "--ckpt_path" in left[0] else ""
    print(f"{label}: {left[0][0]}{goes_on} → {cell.log}", flush=True)
    return job


def _report(cell: Cell, label: str, seconds: float | None, failed: list[Cell]) -> None:
    """The line of a finished cell; a warning where its command line was another one."""
    try:
        when = "finished before" if seconds is None else f"{seconds:.0f} s"
        print(f"{label}: {cell.metric} {cell.value():.4g} ({when})", flush=True)
    except ValueError as error:
        failed.append(cell)
        print(f"{label}: failed: {error}", flush=True)
    with contextlib.suppress(OSError), open(cell.log, encoding="utf-8", errors="replace") as file:
        fits = [line for line in file if line.startswith("$ ") and "run.py fit " in line]
        if fits and shlex.join(cell.fit) not in fits[-1]:
            print(f"  warning: it ran with other settings than the grid's; to run it again delete {cell.run_dir}", flush=True)


def _stop(running: list[Job]) -> None:
    """Asks, waits, kills: the children's children too."""
    for number in (signal.SIGINT, signal.SIGKILL):
        for job in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(job.process.pid, number)
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: no more waiting
            for job in running:
                job.process.wait(max(0.0, deadline - time.monotonic()))


def summary(grid: Grid) -> dict[str, Any]:
    """Values, medians and the paper's numbers, in the table's unit (× scale)."""
    cells = []
    for cell in grid.cells:
        value = None
        with contextlib.suppress(ValueError):  # its metric is missing: run_cells has said so
            value = cell.value()
        cells.append({**cell.values, "run": cell.name, "metric": cell.metric, "value": value and value * grid.scale})
    medians: dict[str, dict[str, Any]] = {row: {} for row in grid.axes[grid.rows]}
    for row, column in ((row, column) for row in medians for column in grid.axes[grid.columns]):
        here = [cell["value"] for cell in cells if (cell[grid.rows], cell[grid.columns]) == (row, column)]
        done = [value for value in here if value is not None]
        if any(math.isnan(value) for value in done):  # has no place in an order
            done = [math.nan] * len(done)
        if done:
            median = statistics.median(done)
            medians[row][column] = {"median": median, "min": min(done), "max": max(done), "runs": len(done), "of": len(here)}
    return {
        "name": grid.name,
        "scale": grid.scale,
        "cells": cells,
        "medians": medians,
        "averages": {row: _average(grid, [entry["median"] for entry in medians[row].values()]) for row in medians},
        "paper": {row: {column: float(number) for column, number in numbers.items()} for row, numbers in grid.paper.items()},
    }


def _average(grid: Grid, numbers: list[float]) -> float | None:
    """Only over all the columns: over fewer it would compare nothing."""
    return statistics.fmean(numbers) if len(numbers) == len(grid.axes[grid.columns]) else None


def markdown(grid: Grid, table: dict[str, Any]) -> str:
    """The table as aligned Markdown, which is what the terminal shows too."""

    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.{grid.decimals}f}"

    def entry(of: dict[str, Any] | None) -> str:
        if of is None or of["of"] == 1:
            return show(of and of["median"])
        runs = f"{of['runs']} of {of['of']}" if of["runs"] < of["of"] else of["runs"]
        return f"{show(of['median'])} ({show(of['min'])}–{show(of['max'])}; {runs} runs)"

    columns = list(grid.axes[grid.columns])
    lines = [[grid.rows, *columns, "average"]]
    for row, medians in table["medians"].items():
        lines.append([row, *(entry(medians.get(column)) for column in columns), show(table["averages"][row])])
        if numbers := grid.paper.get(row):  # as the paper prints them
            average = _average(grid, [float(number) for number in numbers.values()])
            lines.append([f"{row}: paper", *(numbers.get(column, "–") for column in columns), show(average)])
    return aligned([[text.replace("|", "\\|") for text in line] for line in lines])


def write_table(grid: Grid, command: str) -> Path:
    """Writes table.md and table.json into the grid's folder, which it returns."""
    folder, table = Path("runs", grid.name), summary(grid)
    write_text(folder / "table.md", f"# {grid.name}\n\n{heading(grid)}\n`{command}`\n\n{markdown(grid, table)}")
    form = {"command": command, "rows": grid.rows, "columns": grid.columns, "decimals": grid.decimals}
    write_text(folder / "table.json", json_text({**form, **table}, indent=2) + "\n")
    return folder


def heading(grid: Grid) -> str:
    """What the table shows, in one line."""
    by_column = [f"{column}: {metric}" for column, metric in grid.metrics.items()]
    what = ", ".join(by_column) if len(set(grid.metrics.values())) > 1 else next(iter(grid.metrics.values()))
    over = [axis for axis in grid.axes if axis not in (grid.rows, grid.columns)]
    how = f"; median (min–max; how many) over {', '.join(over)}" if over else ""
    return f"{what}{f' × {grid.scale:g}' if grid.scale != 1 else ''}{how}"
