"""An Optuna study whose trials are runs, each in its own process, watched through the curve that it writes.

    runs/NAME/
      study.db                     SQLite: values, curves and states of all trials; several processes may work on it
      trial-000/, trial-000.log    an ordinary run, and what it printed; pruned.json if it was ended early
      study.md, best.yaml, slices.png, importance.png

The process that holds the lock on a trial's log runs it, as with a grid's cells. If a trial counts as running in the study, but
its log is not locked, the process that ran it was killed: the next one that looks for work resumes the trial.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lit_linformer.runs.folder import MARKER, PRUNED, is_run
from lit_linformer.runs.place import run_folder
from lit_linformer.runs.record import RunRecord
from lit_linformer.studies.grid.cell import Cell
from lit_linformer.studies.grid.run import RunningCell
from lit_linformer.studies.tune.space import Axis, Space
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import write_json

STUDY = "tune"  # its name in the database; each study has its own database
REFUSED = 2  # exit status of a run that ended with a one-line error
MOST_REFUSED = 4  # this many refused trials in a row may just have impossible values; with more, something else is wrong


class RunningTrial(RunningCell):
    """A trial that is running."""

    def __init__(self, cell: Cell, label: str, trial: Trial):
        super().__init__(cell, label)
        self.trial = trial
        self.known: dict[int, float] = {}  # {step: value} that the study knows
        self.looked = False
        self.pruned: str | None = None  # why
        self.begun = _began_at(cell.run_dir)


class Study:
    """A study in runs/NAME, which is created or resumed.

    Args:
        space: where to search.
        fit: the command line of a trial, without the settings that vary: fit --config …
        metric: what trials are compared by, such as val/perplexity.
        mode: min or max.

    Raises UserError if NAME is a run, or a study of something else.
    """

    def __init__(self, space: Space, fit: list[str], metric: str, mode: str):
        self.space, self.fit, self.metric = space, fit, metric
        self.folder = run_folder(space.name)
        if is_run(self.folder):
            raise SettingError("name", space.name, "another --name", more=f", and {self.folder} is a run")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / "study.lock")
        asked = {axis.setting: axis.told() for axis in space.axes}
        with self._lock:
            # Seconds that a process waits for another one's write.
            waits = {"connect_args": {"timeout": 60}}
            self._storage = RDBStorage(f"sqlite:///{self.folder / 'study.db'}", engine_kwargs=waits)
            self._open({"space": asked, "fit": fit, "metric": [metric, mode], "first": [dict(one) for one in space.first]})
        self.failed: list[RunningTrial] = []  # neither finished nor pruned: for the next start to resume
        self._own: set[int] = set()  # numbers of trials that this process runs
        self._waiting: list[int] = []
        self._refused = 0  # trials in a row

    def _open(self, asked: dict[str, Any]) -> None:
        if optuna.get_all_study_summaries(self._storage):
            self.optuna = optuna.load_study(study_name=STUDY, storage=self._storage, pruner=_pruner(self.space))
            if (before := dict(self.optuna.user_attrs)) == asked:
                return
            if self._has_runs():
                raise _difference(before, asked, self.folder)
            optuna.delete_study(study_name=STUDY, storage=self._storage)  # none of its trials ever began to train
        direction = "maximize" if asked["metric"][1] == "max" else "minimize"
        self.optuna = optuna.create_study(
            study_name=STUDY, storage=self._storage, direction=direction, pruner=_pruner(self.space)
        )
        for key, value in asked.items():
            self.optuna.set_user_attr(key, value)
        for values in self.space.first:
            self.optuna.enqueue_trial(values)

    def trials(self) -> list[FrozenTrial]:
        """Trials that have begun."""
        return [one for one in self.optuna.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def _has_runs(self) -> bool:
        """Whether a trial ever began to train."""
        return any(is_run(self.folder / run_name(one.number)) for one in self.trials())

    def finished(self) -> list[FrozenTrial]:
        return [one for one in self.trials() if one.state == TrialState.COMPLETE]

    def todo(self) -> Iterator[RunningTrial | None]:
        """The next trial to run; None while only other processes have work, since one of them may be killed."""
        while True:
            with self._lock:
                job = self._left_behind() or self._new()
            waiting = self._at_work()
            if job is None and not waiting and not self._own:
                return
            if job is None and waiting and waiting != self._waiting:
                print(f"waiting for {', '.join(map(run_name, waiting))}, which other processes run", flush=True)
                self._waiting = waiting
            yield job

    def _left_behind(self) -> RunningTrial | None:
        for number in self._at_work():
            study_id = self._storage.get_study_id_from_name(self.optuna.study_name)
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            with contextlib.suppress(BlockingIOError):
                if job := self._claim(Trial(self.optuna, trial_id)):
                    return job
        return None

    def _new(self) -> RunningTrial | None:
        count = len(self.trials())
        if count >= self.space.trials:
            return None
        # A new sampler for each trial, so that a resumed study draws what it would have drawn.
        self.optuna.sampler = TPESampler(seed=count)
        return self._claim(self.optuna.ask())

    def _claim(self, trial: Trial) -> RunningTrial | None:
        """Locks a trial. BlockingIOError if another process runs it, None if it has ended. Values already drawn are kept."""
        words = {axis.setting: axis.word(_draw(trial, axis)) for axis in self.space.axes}
        shown = {setting: f"{setting.rpartition('.')[2]} {word}" for setting, word in words.items()}
        cell = Cell(shown, f"{self.space.name}/{run_name(trial.number)}", [], self.metric)
        cell.fit = [*self.fit, *(part for name, word in words.items() for part in (f"--{name}", word)), "--name", cell.name]
        job = RunningTrial(cell, f"[{trial.number + 1}/{self.space.trials}] {cell}", trial)
        # Read only now that its log is locked: until then the process that ran it could end it.
        told = self.optuna.get_trials(deepcopy=False)[trial.number]
        if told.state != TrialState.RUNNING:
            job.log.close()
            return None
        job.known = dict(told.intermediate_values)
        self._own.add(trial.number)
        return job

    def _at_work(self) -> list[int]:
        """Numbers of trials that other processes run, or that were left behind."""
        ours = self._own | {job.trial.number for job in self.failed}
        return [one.number for one in self.trials() if one.state == TrialState.RUNNING and one.number not in ours]

    def watch(self, job: RunningTrial) -> None:
        """Reports a trial's new validations to the study, and ends the trial if the pruner says so."""
        if (self._report(job) or not job.looked) and job.pruned is None and job.trial.should_prune():
            step = max(job.known)
            job.pruned = f"{self.metric} {job.known[step]:.4g} at step {step:,} is behind the others"
            job.process.terminate()  # the run ends after its step, with last.ckpt written
        job.looked = True

    def _report(self, job: RunningTrial) -> bool:
        new = {step: value for step, value in read_curve(job.cell.run_dir, self.metric).items() if step not in job.known}
        for step, value in new.items():
            job.trial.report(value, step)
        job.known |= new
        return bool(new)

    def ended(self, job: RunningTrial) -> None:
        """Records a trial's outcome. UserError if it was refused, and no run of the study ever began."""
        self._report(job)
        seconds, number, status = time.monotonic() - job.began, job.trial.number, job.process and job.process.returncode
        if not job.cell.left():
            value = job.cell.value()
            if math.isfinite(value):
                self.optuna.tell(number, value)
            else:
                self._prune(job, f"{self.metric} is {value}")
            print(f"{job.label}: {self.metric} {value:.4g} ({seconds:.0f} s)", flush=True)
        elif job.pruned is not None or status == REFUSED:
            # Refused before it trained: for its values; for another reason if it trained before, or others are refused, too.
            refused = job.pruned is None and _began_at(job.cell.run_dir) == job.begun
            self._refused = self._refused + 1 if refused else 0
            if refused and (job.begun or self._refused > MOST_REFUSED or not self._has_runs()):
                raise UserError(job.error())  # the next start tries it again
            why = job.pruned or job.error()
            self._prune(job, why)
            print(f"{job.label}: ended early ({seconds:.0f} s): {why}", flush=True)
        else:
            self.failed.append(job)
            print(f"{job.label}: failed ({seconds:.0f} s): {job.error()}", flush=True)
        self._own.discard(number)

    def _prune(self, job: RunningTrial, why: str) -> None:
        if is_run(job.cell.run_dir):
            told = {"study": self.space.name, "trial": job.trial.number, "why": why}
            write_json(job.cell.run_dir / PRUNED, told)
        job.trial.set_user_attr("why", why)
        self.optuna.tell(job.trial.number, state=TrialState.PRUNED)


def _began_at(run_dir: Path) -> int | None:
    """When a run last began to train, as a file's time; None: never."""
    marker = run_dir / MARKER
    return marker.stat().st_mtime_ns if marker.exists() else None


def run_name(number: int) -> str:
    return f"trial-{number:03d}"


def read_curve(run_dir: Path, metric: str) -> dict[int, float]:
    """{step: value} of a run's validations, without the untrained model's."""
    rows = RunRecord(run_dir).curve
    column = next((name for name in (metric, metric.removeprefix("val/")) if rows and name in rows[-1]), None)
    return {int(row["step"]): row[column] for row in rows if row["step"] > 0} if column else {}


def _difference(before: dict[str, Any], asked: dict[str, Any], folder: Path) -> UserError:
    """The error for the first setting in which a study differs from the one in its folder."""
    allowed = f"what it began with, or another --name than that of {folder}"
    for setting in {**before["space"], **asked["space"]}:
        old, new = (of["space"].get(setting, "not varied") for of in (before, asked))
        if old != new:
            return UserError(f"space {setting} is {new}, and was {old} when the study began", allowed)
    key = next(key for key in ("first", "fit", "metric") if before[key] != asked[key])
    new, old = (of[key] if key == "first" else repr(" ".join(of[key])) for of in (asked, before))
    return UserError(f"{key} is {new}, and was {old} when the study began", allowed)


def _pruner(space: Space) -> BasePruner:
    if space.pruner == "median":
        return MedianPruner(n_startup_trials=space.prune_after)
    return SuccessiveHalvingPruner() if space.pruner == "halving" else NopPruner()


def _draw(trial: Trial, axis: Axis) -> Any:
    if axis.ends is None:
        return trial.suggest_categorical(axis.setting, axis.choices)
    low, high = axis.ends
    if axis.whole:
        return trial.suggest_int(axis.setting, int(low), int(high), log=axis.log)
    return trial.suggest_float(axis.setting, low, high, log=axis.log)
