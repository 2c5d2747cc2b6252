"""The runs of scripts/torture.py: processes that are started, killed at a given point, and waited for."""

import contextlib
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path

import torture_points
from torture_points import GOING_ON, PREPARATION, START, Kill, Point, Watch, read_points

from lit_linformer.cli import main as command

ROOT = Path(__file__).resolve().parents[1]

# A step has two batches. Validations follow batches 3, 6, …: in the middle of a step, after saved steps, after others.
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
    - class_path: torture_points.Hooks
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
FSDP = ["--config", str(ROOT / "conf/trainer/fsdp.yaml"), "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
FSDP += TIMEOUT
# Validations at the end of each pass (some five steps here), as in fine-tuning.
PASSES = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "3", "--trainer.val_check_interval", "1.0"]
PASSES += ["--trainer.check_val_every_n_epoch", "1", "--data.batch_size", "16"]
CASES = {
    "plain-1": (1, []),
    "passes-1": (1, PASSES),
    "plain-2": (2, [*DDP, "--trainer.devices", "2"]),
    "sharded-1": (1, [*FSDP, "--trainer.devices", "1"]),
    "sharded-2": (2, [*FSDP, "--trainer.devices", "2"]),
}
ALONE = (START, PREPARATION, GOING_ON)  # phases in which the processes are not connected yet: all are killed
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
HANGS = 600.0  # seconds after which a start counts as hanging


@dataclass
class Start:
    """The outcome of one start of the command: each process's exit status, and the points that they passed."""

    statuses: list[int]
    points: list[Point]
    phase: str  # of the first process that was killed
    seconds: float
    hung: bool
    log: str

    @property
    def killed(self) -> bool:
        return any(status in KILLED for status in self.statuses)


def launch(case: str, folder: Path, number: int, kill: Kill | None) -> Start:
    """Starts the case's command in the folder for the ``number``-th time, kills it, and waits for all processes to end."""
    folder.mkdir(exist_ok=True)
    # TensorBoard orders a run's files by the second in which they were created.
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
            with contextlib.suppress(OSError):  # the child does it too, whichever is first
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
    """The phase in which a run was killed: the point's, or the last that the first killed process logged."""
    if kill is not None and kill.point.label:
        began = points[kill.point.rank][0].phase if points[kill.point.rank] else START
        return began if kill.point.phase == START else kill.point.phase  # a start that resumes has its own name
    killed = [of for status, of in zip(statuses, points, strict=True) if status in KILLED and of]
    return killed[0][-1].phase if killed else START


def end(started: list, kill: Kill | None, told: list[Path]) -> bool:
    """Waits for all processes to end, first killing them if the kill is at a time, not a point; False if they do not end."""
    waiting = [process.sentinel for process in started]
    if kill is not None and not kill.point.label and not connection.wait(waiting, kill.point.seconds):
        phases = [points[-1].phase if (points := read_points(path, 0)) else START for path in told]
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
    """A process of the command, in a group that it shares only with the other one of its start."""
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
    torture_points.watching = Watch(folder, told, rank, kill)
    try:
        command(["fit", "--config", "../torture.yaml", *overlay, "--ckpt_path", "auto"])
    finally:
        sys.stdout.flush()


def free_port() -> int:
    """A free port below those that the system hands out, so that nobody takes it before it is used."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    sys.exit("error: no port from 20000 to 32000 is free")
