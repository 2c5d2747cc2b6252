"""A search for the settings with which a model learns best: `python run.py tune --config … --space conf/tune/lr.yaml`.

Each trial is a run of `fit`, runs/NAME/trial-000 and so on, in a process of its own. Optuna (pip install 'lit-linformer[tune]')
chooses its values from the results of earlier trials, and stops it early if its validations fall behind theirs. The same
command resumes an interrupted study; if it is started twice, or on several machines that share runs/, these divide the trials
among them. It writes runs/NAME/study.md with a table, slices.png and importance.png, and best.yaml for `fit --config`. The
space file:

    name: lr                                  # results go to runs/lr/ (default: the file's name)
    trials: 20
    space:                                    # settings as on the command line
      model.lr: {log: [1e-4, 1e-2]}           # between two numbers, on a logarithmic scale
      model.encoder.dropout: {range: [0.0, 0.3]}
      model.warmup_steps: {range: [20, 300]}  # whole numbers, since both ends are
      model.encoder.projection: [linear, conv, mean]  # one of these
    first: [{model.lr: 1e-3}]                 # tried before any others
    pruner: median                            # or halving (successive halving), or none
    prune_after: 4                            # finished trials before the median of their validations stops any

Trials are compared by their best validation, in the metric `best.monitor`. More --trials later extend the study.
"""

from pathlib import Path
from typing import Any

from lit_linformer.utils.arguments import Setting, parse, several, whole, word
from lit_linformer.utils.environment import command_line
from lit_linformer.utils.errors import UserError

SETTINGS = {
    "config": Setting(several(word("FILE")), "config of every trial, as for fit", required=True),
    "space": Setting(word("FILE"), "what to search, such as conf/tune/lr.yaml", required=True),
    "trials": Setting(whole("N", 1), "number of trials in all (default: that in the file, or 20)"),
    "jobs": Setting(
        whole("N", 1), "trials at a time, which share the GPUs evenly; share the processor among them with OMP_NUM_THREADS", 1
    ),
    "arguments": Setting(
        word('"--SETTING VALUE …"'), "added to every trial's command line; the same in each start of a study", ""
    ),
    "name": Setting(word("NAME"), "results go to runs/NAME/ (default: the name in the file)"),
}


def main(argv: list[str]) -> None:
    """Runs the trials that are left of the study; UserError for bad settings and for failed trials."""
    given = parse("tune", __doc__, SETTINGS, argv)
    from lit_linformer.cli.quick_checks import check_quickly
    from lit_linformer.studies.grid.file import split_words
    from lit_linformer.studies.tune.space import read_space

    space = read_space(Path(given["space"]), given["name"], given["trials"])
    configs, others = split_words("--arguments", given["arguments"])
    fit = ["fit", *(part for file in given["config"] for part in ("--config", file)), *configs, *others]
    named = {other.partition("=")[0] for other in others}
    for axis in space.axes:
        if f"--{axis.setting}" in named:
            raise UserError(f"--arguments holds --{axis.setting}, which the space varies", "other settings")
    check_quickly([*fit, *(f"--{axis.setting}=0" for axis in space.axes)])
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError("tune needs optuna, not installed here", "pip install 'lit-linformer[tune]'", when="after") from error
    _search(space, fit, given["jobs"], command_line(["tune", *argv]))


def _search(space: Any, fit: list[str], jobs: int, command: str) -> None:
    from lit_linformer.studies.grid.run import run_jobs, until_stopped
    from lit_linformer.studies.tune.page import write_page
    from lit_linformer.studies.tune.study import Study

    study = Study(space, fit, *_goal(fit))
    try:
        until_stopped(lambda: run_jobs(study.todo(), jobs, study.ended, study.watch))
    finally:
        table = write_page(study, command)
    print(table, end="", flush=True)
    if study.failed:
        names = ", ".join(job.cell.run_dir.name for job in study.failed)
        raise UserError(
            f"{len(study.failed)} of {space.trials} trials failed: {names}; their output is in {study.folder}/*.log",
            "the same command again continues",
        )
    if not study.finished():
        raise UserError(f"no trial of {study.folder} has finished", "another space, under another --name")
    best = study.folder / "best.yaml"
    print(f"{study.folder / 'study.md'}; the best: python run.py fit --config {best}", flush=True)


def _goal(fit: list[str]) -> tuple[str, str]:
    """The metric by which checkpoints, and so trials, are compared; and min or max."""
    from lit_linformer.callbacks import best_of
    from lit_linformer.cli.class_paths import check_class_paths, classes_given
    from lit_linformer.cli.given import given_settings

    check_class_paths(fit)
    given = given_settings(fit)
    return best_of(classes_given(fit)["model"], given.get("best.monitor"), given.get("best.mode"))
