"""The runs of scripts/torture.py: processes that tell each thing that they do, and die at the one that they were told.

Told are files of the round's folder that are opened, renamed and removed (by Python's audit events, so whatever library does
it, and before it is done) and hooks of Lightning (before the other callbacks'), each with the optimiser step: a run that goes
on passes the same points as one that was left alone.
"""

import contextlib
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lit_linformer.cli import main as command

ROOT = Path(__file__).resolve().parents[1]

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


# A step has two batches. Validations follow batches 3, 6, …: in the middle of a step, after steps that are saved, after others.
CONFIG = """
seed_everything: 3
name: torture
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 9
  accumulate_grad_batches: 2
  val_check_interval: 3
  check_val_every_n_epoch: null
  gradient_clip_val: 1.0
  log_every_n_steps: 1
  callbacks:
    - class_path: torture_runs.Hooks
    - class_path: lit_linformer.callbacks.PerplexityCurve
model:
  class_path: lit_linformer.tasks.MLM
  init_args:
    encoder: {max_length: 32, hidden_size: 16, num_layers: 2, num_heads: 2, intermediate_size: 32, projection_dim: 8,
      local_width: 3, norm: pre, dropout: 0.2, attention_dropout: 0.1}
    lr: 1.0e-2
    warmup_steps: 3
data:
  class_path: lit_linformer.data.PretrainingData
  init_args: {source: ../text.txt, cache_dir: cache, vocab_size: 300, validation_fraction: 0.05, test_fraction: 0.1,
    max_length: 32, batch_size: 2, seed: 3}
last:
  every_n_steps: 2
"""
TIMEOUT = ["--trainer.strategy.timeout", "0:01:00"]
DDP = ["--config", str(ROOT / "conf/trainer/ddp.yaml"), "--trainer.accelerator", "cpu", *TIMEOUT]
FSDP = [
    "--config",
    str(ROOT / "conf/trainer/fsdp.yaml"),
    "--trainer.accelerator",
    "cpu",
    "--trainer.precision",
    "32-true",
    *TIMEOUT,
]
CASES = {
    "plain-1": (1, []),
    "plain-2": (2, [*DDP, "--trainer.devices", "2"]),
    "sharded-1": (1, [*FSDP, "--trainer.devices", "1"]),
    "sharded-2": (2, [*FSDP, "--trainer.devices", "2"]),
}
ALONE = (START, PREPARATION, GOING_ON)  # phases in which the processes are not connected yet: all are killed
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
HANGS = 600.0  # seconds after which a start that should have ended long ago is called hanging


@dataclass(frozen=True)
class Point:
    """Something that a process does for the ``count``-th time: ``rank`` of the run left alone did it after ``seconds``."""

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
    """Tells the points of this process into a file, a line each, and ends it at the one of ``kill``."""

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
        # TensorBoard writes in a thread of its own, at no fixed moment: only kills at random times meet that.
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
        """A path below the round's folder, without what differs from run to run; nothing for one elsewhere."""
        path = os.fsdecode(path)
        if folder >= 0:  # shutil.rmtree names what is in a folder by that folder's descriptor
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        if not path.startswith(self.folder + "/"):
            return ""
        name = re.sub(r"events\.out\.\S+", "events", path[len(self.folder) + 1 :].removeprefix("runs/torture/"))
        return re.sub(r"-[0-9a-f]{16}\b", "", re.sub(r"\.\d+\.tmp", ".tmp", name))

    def _at(self, phase: str, what: str) -> None:
        label = what if self.step is None else f"step {self.step}: {what}"
        self.counts[label] += 1
        if self.armed:  # the file was shorter than that
            self._die()
        self._tell(phase, label)
        kill = self.kill
        if kill is None or (kill.point.label, kill.point.count) != (label, self.counts[label]):
            return
        if kill.cut is None:
            self._die()
        self.armed = True
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores: the write would be an error instead
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.cut, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _tell(self, phase: str, label: str) -> None:
        line = f"{time.monotonic() - self.started:.3f}\t{phase}\t{self.counts[label]}\t{label}\n"
        os.write(self.file, line.encode())

    def _die(self) -> None:
        if self.kill.everyone:
            os.killpg(0, signal.SIGKILL)  # a group of the run's processes alone
        os.kill(os.getpid(), signal.SIGKILL)


def read_points(told: Path, rank: int) -> list[Point]:
    points = []
    for line in told.read_text(encoding="utf-8").splitlines() if told.exists() else []:
        seconds, phase, count, label = line.split("\t")
        points.append(Point(label, int(count), phase, rank, float(seconds)))
    return points


watching: Watch | None = None


class Hooks(Callback):
    """Lightning's hooks as points. Of a run's config, so that the command that goes on is the one that was killed."""


def _hook(name: str):
    def hook(self, trainer, *arguments, **settings) -> None:
        if watching is not None:
            watching.hook(name, trainer.global_step)

    return hook


for _name in HOOKS:
    setattr(Hooks, _name, _hook(_name))


@dataclass
class Start:
    """What became of one start of the command: a status a process, and the points that they passed."""

    statuses: list[int]
    points: list[Point]
    phase: str  # in which the first process that was killed was
    seconds: float
    hung: bool
    log: str

    @property
    def killed(self) -> bool:
        return any(status in KILLED for status in self.statuses)


def launch(case: str, folder: Path, number: int, kill: Kill | None) -> Start:
    """Starts the case's command in the folder, the ``number``-th time there, kills it, and waits for all of it to end."""
    folder.mkdir(exist_ok=True)
    # TensorBoard takes a run's files in the order of the second in which they were begun.
    while any(int(path.name.split(".")[3]) >= int(time.time()) for path in folder.glob("runs/*/events.out.tfevents.*")):
        time.sleep(0.05)
    processes, port, began, started, group = CASES[case][0], free_port(), time.monotonic(), [], 0
    told = [folder / f"points-{number}-{rank}.txt" for rank in range(processes)]
    try:
        for rank in range(processes):
            arguments = (case, rank, group, port, folder, number, told[rank], kill)
            started.append(get_context("fork").Process(target=child, args=arguments))
            started[-1].start()
            group = group or started[0].pid
            with contextlib.suppress(OSError):  # the child does it too: whoever is first
                os.setpgid(started[-1].pid, group)
        hung = not end(started, kill, told)
    finally:
        for process in started:
            process.kill()
            process.join()
    seconds = time.monotonic() - began
    points = [read_points(path, rank) for rank, path in enumerate(told)]
    statuses = [process.exitcode for process in started]
    log = (folder / f"log-{number}.txt").read_text(encoding="utf-8", errors="replace")
    return Start(statuses, [point for of in points for point in of], _phase(kill, statuses, points), seconds, hung, log)


def _phase(kill: Kill | None, statuses: list[int], points: list[list[Point]]) -> str:
    """In which a run was killed: the point's, or the last that was told by the first process that was killed."""
    if kill is not None and kill.point.label:
        began = points[kill.point.rank][0].phase if points[kill.point.rank] else START
        return began if kill.point.phase == START else kill.point.phase  # a start that goes on has its own name
    killed = [of for status, of in zip(statuses, points, strict=True) if status in KILLED and of]
    return killed[0][-1].phase if killed else START


def end(started: list, kill: Kill | None, told: list[Path]) -> bool:
    """Waits for all processes to end, after killing them if their kill is one at a time; False if they do not."""
    waiting = [process.sentinel for process in started]
    if kill is not None and not kill.point.label and not connection.wait(waiting, kill.point.seconds):
        phases = [([None, *read_points(path, 0)][-1] or Point("", 0, START, 0, 0)).phase for path in told]
        everyone = kill.everyone or any(phase in ALONE for phase in phases)
        for process in started if everyone else [started[kill.point.rank]]:
            process.kill()
    until = time.monotonic() + HANGS
    while waiting and (ended := connection.wait(waiting, max(0.0, until - time.monotonic()))):
        waiting = [sentinel for sentinel in waiting if sentinel not in ended]
        if kill is not None and kill.everyone and any((process.exitcode or 0) < 0 for process in started):
            for process in started:
                process.kill()
    return not waiting


def child(case: str, rank: int, group: int, port: int, folder: Path, number: int, told: Path, kill: Kill | None) -> None:
    """A process of the command, in a group that it shares with the other one of its start alone."""
    os.setpgid(0, group)
    os.chdir(folder)
    log = os.open(f"log-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    processes, overlay = CASES[case]
    if processes > 1:
        os.environ |= {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    global watching
    watching = Watch(folder, told, rank, kill)
    try:
        command(["fit", "--config", "../torture.yaml", *overlay, "--ckpt_path", "auto"])
    finally:
        sys.stdout.flush()


def free_port() -> int:
    """Below those that the system hands out to others: nobody takes it before it is used."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    sys.exit("error: no port from 20000 to 32000 is free")
