"""A grid of runs and the table that they make: `python run.py grid --config conf/paper/table2.yaml`.

Each cell is a run NAME/SLUG of `fit`, then of `test` if the table shows a test/… value, in its own process. It is finished when
fit has written result.json (test: test.json), so the same command continues where the last one stopped, and makes the table
when nothing is left to run. If `pretraining` lists a cell's value on each axis that it names, a `fit` with these arguments
instead of the axes' runs first, as NAME/SLUG-pretraining, and the cell starts from its weights; with `convert` these first pass
through a `convert` with those arguments, as NAME/SLUG-converted. The grid file:

    name: table2                              # results go to runs/table2/
    arguments: --trainer.precision bf16-mixed # of every cell; the axes override them, --arguments overrides the axes
    axes:                                     # the cells are their product; each value is what it adds to the command line
      model: {Transformer: --model.pretrained runs/t, "Linformer, 128": --model.pretrained runs/l}
      task: {SST-2: --config conf/finetune/sst2.yaml, IMDB: --config conf/finetune/imdb.yaml}
      seed: {1: --seed_everything 1, 2: --seed_everything 2}   # neither rows nor columns: the table shows the median
    table: {rows: model, columns: task, value: {SST-2: val/accuracy, IMDB: test/accuracy}, scale: 100, decimals: 1}
    measures: {tokens/s: result.json throughput.tokens_per_second, at 16: length_sweep.csv perplexity length=16}  # more columns
    paper: {"Linformer, 128": {SST-2: 93.1}}  # shown below the row
    skip: [{model: Transformer, task: IMDB}]  # cells left out
    pretraining:
      model: {"Linformer, 128": --config conf/pretrain/small.yaml}
      task: {SST-2: --data.source texts/, IMDB: --data.source films/}
    convert: --max_length 2048                # of the pretraining's weights, before they are trained on
"""

import shlex
from pathlib import Path

from lit_linformer.data.notes import note
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.run import run_cells, until_stopped
from lit_linformer.studies.grid.table import not_found, write_table
from lit_linformer.utils.arguments import FLAG, Setting, parse, several, whole, word
from lit_linformer.utils.environment import command_line, run_command
from lit_linformer.utils.errors import UserError

SETTINGS = {
    "config": Setting(word("FILE"), "the grid file, such as conf/paper/table2.yaml", required=True),
    "jobs": Setting(
        whole("N", 1), "cells at a time, which share the GPUs evenly; share the processor among them with OMP_NUM_THREADS", 1
    ),
    "only": Setting(several(word("AXIS=VALUE")), "run only these cells", []),
    "arguments": Setting(
        word('"--SETTING VALUE …"'), "appended to every cell's command line; with other ones take another --name", ""
    ),
    "name": Setting(word("NAME"), "results go to runs/NAME/ (default: the name in the file)"),
    "print_commands": Setting(FLAG, "only print the commands of unfinished cells, one on each line, for a job array", False),
}


def main(argv: list[str]) -> None:
    """Runs what is unfinished and writes the table; raises ValueError for a bad file and at the end if cells failed."""
    given = parse("grid", __doc__, SETTINGS, argv)
    grid = read_grid(Path(given["config"]), given["name"], given["arguments"])
    cells = grid.select(given["only"])
    if given["print_commands"]:
        for cell in cells:
            if left := cell.left():
                print(" && ".join(shlex.join([*run_command(), *_as_a_job(words)]) for words in left))
        return
    command = command_line(["grid", *argv])
    write_table(grid, command)  # so that `report` recognises the grid even while it runs
    try:
        failed = until_stopped(lambda: run_cells(cells, given["jobs"]))
    finally:
        folder = write_table(grid, command)
    print((folder / "table.md").read_text(encoding="utf-8"), end="", flush=True)
    for name in not_found(grid):
        measure = grid.measures[name]
        note(f"measures.{name}: no finished run's {measure.file} has {measure.value}{' in such a row' * bool(measure.where)}")
    if failed:
        names = ", ".join(str(cell) for cell in failed[:4]) + (", …" if len(failed) > 4 else "")
        raise UserError(
            f"{len(failed)} of {len(cells)} cells failed: {names}; their output is in {folder}/*.log",
            "the same command again continues",
        )


def _as_a_job(words: list[str]) -> list[str]:
    """Adds what makes a line resume its run when a cluster restarts the job."""
    return words if words[0] != "fit" or "--ckpt_path" in words else [*words, "--ckpt_path", "auto"]
