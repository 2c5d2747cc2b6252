"""Runs the cells of a grid: several at a time, each in its own process, stopped together."""

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from lit_linformer.runs.folder import CONVERSION, RESULT, TEST
from lit_linformer.studies.grid.cell import Cell
from lit_linformer.utils.environment import run_command
from lit_linformer.utils.files import last_line

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 15.0  # seconds a run is given to end by itself after Ctrl-C


class RunningCell:
    """A cell that is running. Its log serves as a lock, which the run's processes hold even if the grid is killed."""

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
        self.process: subprocess.Popen | None = None
        self.gpus: str | None = None  # which ones it sees; None: all

    def start(self, left: list[list[str]]) -> None:
        """Starts the first of the commands that are left, in its own session: Ctrl-C reaches only the grid, which stops it."""
        words, self.left = left[0], len(left)
        if words[0] == "fit":
            (self.cell.run_dir / TEST).unlink(missing_ok=True)  # it belongs to the previous weights
        self.words = words
        command = [*run_command(), *words]
        self.log.write(f"$ {shlex.join(command)}\n".encode())
        self.log.flush()
        environment = os.environ if self.gpus is None else {**os.environ, VISIBLE: self.gpus}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    def error(self) -> str:
        """The run's last error line, or its last line, or its exit status."""
        if self.process.returncode < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        if self.process.returncode == 0:
            missing = {"test": TEST, "convert": CONVERSION}.get(self.words[0], RESULT)
            run = self.words[self.words.index("--name") + 1]
            return f"{self.words[0]} ended, but {self.cell.root / run} holds no whole {missing}"
        return last_line(self.cell.log).removeprefix("error: ") or f"exit status {self.process.returncode}"


def until_stopped(run: Callable[[], Any]) -> Any:
    """Calls ``run`` such that Ctrl-C, a closed terminal and a cluster's SIGTERM all stop it in the same way."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    # Under nohup SIGHUP is ignored, and stays so.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        return run()
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr, flush=True)
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def run_cells(cells: list[Cell], jobs: int = 1) -> list[Cell]:
    """Runs the unfinished cells, ``jobs`` at a time; returns those that failed."""
    failed, queue = [], []
    for number, cell in enumerate(cells, 1):
        label = f"[{number}/{len(cells)}] {cell}"
        if cell.left():
            queue.append((cell, label))
        else:
            _report(cell, label, None, failed)

    def ended(job: RunningCell) -> None:
        if job.cell.left():
            print(f"{job.label}: failed ({time.monotonic() - job.began:.0f} s): {job.error()}", flush=True)
            failed.append(job.cell)
        else:  # finished by another grid, if it was never started here
            _report(job.cell, job.label, time.monotonic() - job.began if job.process else None, failed)

    run_jobs((job for cell, label in queue if (job := _claim(cell, label))), jobs, ended)
    return failed


def run_jobs(
    todo: Iterator[RunningCell | None],
    jobs: int,
    ended: Callable[[RunningCell], None],
    watch: Callable[[RunningCell], None] = lambda job: None,
) -> None:
    """Runs all jobs, each cell to its end, and stops them when interrupted.

    Args:
        todo: gives the next cell when there is room for one; None: none now, perhaps later.
        jobs: how many run at a time. The GPUs of the machine are divided among them.
        ended: called with each cell that has ended, finished or not.
        watch: called repeatedly with each running cell.
    """
    running: list[RunningCell] = []
    free = gpu_shares(jobs)
    more = True
    try:
        while more or running:
            pause = 0.1
            while more and len(running) < jobs:
                job = next(todo, False)
                more = job is not False
                if not job:
                    pause = 0.1 if running else 1.0
                    break
                running.append(job)
                job.gpus = free.pop(0)
                if left := job.cell.left():
                    job.start(left)
                    goes_on = " continues" if "--ckpt_path" in left[0] else ""
                    print(f"{job.label}: {left[0][0]}{goes_on} → {job.cell.log}", flush=True)
            for job in list(running):
                if job.process is not None and job.process.poll() is None:
                    watch(job)
                    continue
                left = job.cell.left()
                if job.process is not None and 0 < len(left) < job.left:  # after a pretraining its convert or fit; then test
                    job.start(left)
                    continue
                running.remove(job)
                free.append(job.gpus)
                ended(job)
                job.log.close()
            time.sleep(pause if more or running else 0)
    finally:
        _stop(running)


def gpu_shares(jobs: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each of ``jobs`` simultaneous runs: an even share of the GPUs that are visible here.

    None: unchanged, for one run at a time, or without several GPUs. If there are fewer GPUs than jobs, jobs share them.
    """
    if jobs == 1:
        return [None]
    gpus = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    if not gpus:
        import torch  # only now: it takes seconds

        gpus = [str(number) for number in range(torch.cuda.device_count())]
    if len(gpus) < 2:
        return [None] * jobs
    each = max(1, len(gpus) // jobs)
    first = [job * each % len(gpus) for job in range(jobs)]
    return [",".join(gpus[at : at + each]) for at in first]


def _claim(cell: Cell, label: str) -> RunningCell | None:
    try:
        return RunningCell(cell, label)
    except BlockingIOError:
        print(f"{label}: left alone, it is already running (its log {cell.log} is locked)", flush=True)
        return None


def _report(cell: Cell, label: str, seconds: float | None, failed: list[Cell]) -> None:
    """Prints a finished cell's line, with a warning if its command line was different."""
    try:
        when = "finished before" if seconds is None else f"{seconds:.0f} s"
        print(f"{label}: {cell.metric} {cell.value():.4g} ({when})", flush=True)
    except ValueError as error:
        failed.append(cell)
        print(f"{label}: failed: {error}", flush=True)
    lines: list[str] = []
    with contextlib.suppress(OSError), open(cell.log, encoding="utf-8", errors="replace") as file:
        lines += (line for line in file if line.startswith("$ "))
    for what, words, folder in cell.parts():
        shown = shlex.join(words)
        name = f" --name {words[words.index('--name') + 1]} "
        ran = [line for line in lines if f" {words[0]} " in line and name in f"{line.rstrip()} "]
        begun = max((at for at, line in enumerate(ran) if "--ckpt_path" not in line), default=0)
        other = sum(shown not in line for line in ran[begun:])
        if other:
            part = what if other == len(ran[begun:]) else f"a part of {what}"
            again = " and ".join(dict.fromkeys((str(cell.run_dir), str(folder))))
            print(f"  warning: {part} ran with other settings than the grid's; to run it again delete {again}", flush=True)


def _stop(running: list[RunningCell]) -> None:
    """Interrupts all processes, grandchildren included, waits for them, then kills those that are left."""
    started = [job for job in running if job.process is not None]
    for number in (signal.SIGINT, signal.SIGKILL):
        for job in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(job.process.pid, number)
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: no more waiting
            for job in started:
                job.process.wait(max(0.0, deadline - time.monotonic()))
