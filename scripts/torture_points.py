"""Points of scripts/torture.py's runs: each action of a process, logged to a file, and the one at which it is killed.

It logs files of the round's folder that are opened, renamed and removed (by Python's audit events, so whichever library does
that, and before it is done) and hooks of Lightning (before the other callbacks'), each with the optimiser step: a resumed run
passes the same points as one that was left alone.
"""

import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

FILES, RENAMES = "files of a checkpoint", "between renames"
START, GOING_ON, PREPARATION, BEFORE = "start", "going on", "preparation", "validation before training"
TRAINING, VALIDATION, END = "training", "validation", "end"
PHASES = (START, PREPARATION, BEFORE, TRAINING, VALIDATION, FILES, RENAMES, GOING_ON, END)
# Which phase begins with a hook. None: the one that the process began with.
STAGES = {
    "on_sanity_check_start": BEFORE, "on_sanity_check_end": None, "on_train_start": TRAINING, "on_validation_start": VALIDATION,
    "on_validation_end": TRAINING, "on_train_end": END,
}  # fmt: skip
HOOKS = (
    "setup on_fit_start on_sanity_check_start on_validation_batch_start on_validation_epoch_end on_sanity_check_end "
    "on_train_start on_train_batch_start on_before_optimizer_step on_train_batch_end on_validation_start on_validation_end "
    "on_save_checkpoint on_train_end on_fit_end teardown"
).split()
CHANGES = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove", "os.mkdir": "make"}


@dataclass(frozen=True)
class Point:
    """Something that a process does for the ``count``-th time; in the run left alone ``rank`` did it after ``seconds``."""

    label: str
    count: int
    phase: str
    rank: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """Where a run is killed.

    Args:
        point: the point; or, with an empty label, a time in seconds since the start.
        everyone: all processes, or only the point's rank.
        cut: instead of killing at once, let the file that is being opened grow to that many bytes at most.
    """

    point: Point
    everyone: bool
    cut: int | None = None

    def __str__(self) -> str:
        who = "all" if self.everyone else f"process {self.point.rank}"
        if not self.point.label:
            return f"{who}, after {self.point.seconds:.2f} s"
        how = "before" if self.cut is None else f"cut off at {self.cut} bytes:"
        return f"{who}, {how} {self.point.label}" + (f" #{self.point.count}" if self.point.count > 1 else "")


class Watch:
    """Logs the points of this process to a file, one per line, and kills it at the one of ``kill``."""

    def __init__(self, folder: Path, told: Path, rank: int, kill: Kill | None):
        self.folder, self.rank = str(folder), rank
        mine = kill is not None and (kill.everyone or kill.point.rank == rank)
        self.kill = kill if mine else None
        self.began = GOING_ON if any(folder.glob("runs/*/checkpoints/*")) else START
        self.stage, self.step, self.armed = self.began, None, False
        self.counts: Counter[str] = Counter()
        self.thread, self.started = threading.get_ident(), time.monotonic()
        self.file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._tell(self.began, "the start")
        sys.addaudithook(self._audit)

    def hook(self, name: str, step: int) -> None:
        if name in STAGES:
            self.stage = STAGES[name] or self.began
            self.step = step if self.stage in (TRAINING, VALIDATION, END) else None
        elif self.step is not None:
            self.step = step
        self._at(self.stage, name)

    def _audit(self, event: str, arguments: tuple) -> None:
        # TensorBoard writes in a thread of its own, at no fixed moment: only kills at random times hit that.
        if (event != "open" and event not in CHANGES) or threading.get_ident() != self.thread:
            return
        path, verb, folder = arguments[0], CHANGES.get(event), -1
        if event == "open":
            verb = "write" if arguments[2] & (os.O_WRONLY | os.O_RDWR) else "read"
        elif event in ("os.remove", "os.rmdir"):
            folder = arguments[1]
        if isinstance(path, int) or not (name := self._name(path, folder)):
            return
        phase = PREPARATION if name.startswith("cache") and verb != "read" else self.stage
        if name.startswith("checkpoints/") and verb != "read":
            phase = FILES if verb in ("write", "make") else RENAMES
        self._at(phase, f"{verb} {name}" + (f" → {self._name(arguments[1])}" if verb == "rename" else ""))

    def _name(self, path: Any, folder: int = -1) -> str:
        """A path below the round's folder, without what differs from run to run; "" for one elsewhere."""
        path = os.fsdecode(path)
        if folder >= 0:  # shutil.rmtree names files relative to their folder's descriptor
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        if not path.startswith(self.folder + "/"):
            return ""
        name = re.sub(r"events\.out\.\S+", "events", path[len(self.folder) + 1 :].removeprefix("runs/torture/"))
        return re.sub(r"-[0-9a-f]{16}\b", "", re.sub(r"\.\d+\.tmp", ".tmp", name))

    def _at(self, phase: str, what: str) -> None:
        label = what if self.step is None else f"step {self.step}: {what}"
        self.counts[label] += 1
        if self.armed:  # the file stayed shorter than the limit
            self._die()
        self._tell(phase, label)
        kill = self.kill
        if kill is None or (kill.point.label, kill.point.count) != (label, self.counts[label]):
            return
        if kill.cut is None:
            self._die()
        self.armed = True
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores: the write would raise an error instead
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.cut, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _tell(self, phase: str, label: str) -> None:
        line = f"{time.monotonic() - self.started:.3f}\t{phase}\t{self.counts[label]}\t{label}\n"
        os.write(self.file, line.encode())

    def _die(self) -> None:
        if self.kill.everyone:
            os.killpg(0, signal.SIGKILL)  # a group of only the run's processes
        os.kill(os.getpid(), signal.SIGKILL)


def read_points(told: Path, rank: int) -> list[Point]:
    points = []
    for line in told.read_text(encoding="utf-8").splitlines() if told.exists() else []:
        seconds, phase, count, label = line.split("\t")
        points.append(Point(label, int(count), phase, rank, float(seconds)))
    return points


watching: Watch | None = None


class Hooks(Callback):
    """Lightning's hooks as points. In the run's config, so that the command that resumes is the one that was killed."""


def _hook(name: str):
    def hook(self, trainer, *arguments, **settings) -> None:
        if watching is not None:
            watching.hook(name, trainer.global_step)

    return hook


for _name in HOOKS:
    setattr(Hooks, _name, _hook(_name))
