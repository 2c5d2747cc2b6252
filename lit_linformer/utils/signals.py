"""SIGTERM, SIGHUP, Ctrl-C and Slurm's SIGUSR1, from the first moment of a command to its last.

Before training a signal ends the command at once. During training it is only noted: callbacks/preemption.py ends all
processes after the same step. Nothing heavy is imported here, since this is active while torch is being loaded.
"""

import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from lit_linformer.utils.errors import SettingError

# Variables that say which process of a run this is, as Slurm, torchrun and Lightning set them.
RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")
# What a signal before training means, in words, by command.
BEFORE_TRAINING = {
    "fit": " before training began: nothing was trained in this start; the same command starts it again",
    "prepare": "; the same command continues where it stopped",
}
TWICE = 0.5  # seconds: `timeout` and srun signal a process and then its group, which counts as one signal
# How processes start: forked on Linux, as before Python 3.14; None: Python's default, since a fork may crash on macOS.
START_METHOD = "fork" if sys.platform == "linux" else None


class Stopped(SystemExit):
    """Ends the program with a signal's exit status, 128 + its number."""


class Watch:
    """The signals that this process has received; ``watch`` below is the only instance."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.received = 0  # the first signal's number
        self.training = False  # from now on signals are noted, and the training loop ends itself
        self._last, self._said = 0.0, False
        self._command = ""
        self._before: dict[int, Any] = {}

    def begin(self, command: str) -> None:
        """Listens until the process ends, or ``end`` is called."""
        self.reset()
        self._command = command
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread listen
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if command == "fit" and "SLURM_JOB_ID" in os.environ:
            numbers.append(signal.SIGUSR1)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP, and a script's `… &` Ctrl-C
                self._before[number] = signal.signal(number, self._receive)

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: Any) -> None:
        if multiprocessing.current_process().daemon:  # a data worker, which its parent process ends in time
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        again, self._last = time.monotonic() - self._last, time.monotonic()
        if self.received and again < TWICE:
            return
        if self.received and number == signal.SIGINT:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h\n")  # shows the cursor, which a live bar hides
            os._exit(128 + number)
        self.received = self.received or number
        # Forked processes that train (ddp_fork): this one waits for them, and ends as they do.
        training = [process for process in multiprocessing.active_children() if not process.daemon]
        for process in training:
            process.terminate()
        if training:
            return
        name = signal.Signals(number).name
        if self.training:
            if number == signal.SIGINT:
                self._say("Ctrl-C: the run saves its step (after the validation, in one) and ends; a second Ctrl-C ends it now")
            return
        self._say(f"stopped by {name}{BEFORE_TRAINING.get(self._command, '')}")
        raise Stopped(128 + number)

    def _say(self, line: str) -> None:
        """Prints a line, only once, in the first process; not with print, which the signal may have interrupted."""
        if not self._said and is_first_process():
            os.write(2, f"{line}\n".encode())
        self._said = True


def _leave_closed_terminal() -> None:
    """Discards further output if its terminal is gone: printing would fail, and end the run before its step is saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if is_gone(number):
            os.dup2(nowhere, number)
    os.close(nowhere)


def is_gone(number: int) -> bool:
    """Whether nobody reads a file descriptor: its terminal, or its pipe's reader, is gone. False where that is not told."""
    if not hasattr(select, "poll"):  # not every system has it
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


watch = Watch()


def check_ranks() -> None:
    """Raises SettingError for a rank that is no number: torch and Lightning read it when they are imported."""
    for name in (*RANKS, "SLURM_NTASKS"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise SettingError(name, value, f"a whole number, or none: `unset {name}`", more=" in the environment")


def other_rank() -> str | None:
    """The variable that says that this is not process 0 of all machines; None: it is, or was started alone."""
    # Under `srun torchrun` Slurm's tasks are the machines, which torchrun numbers in an order of its own.
    names = ("RANK",) if "TORCHELASTIC_RUN_ID" in os.environ else RANKS
    return next((name for name in names if os.environ.get(name, "0") != "0"), None)


def is_first_process() -> bool:
    """Whether this is process 0 of all machines; known before the processes are connected."""
    return other_rank() is None


def requeue() -> None:
    """Puts this Slurm job back into its queue."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job
    reason = "scontrol is not on this machine's PATH"
    if shutil.which("scontrol"):
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        if done.returncode == 0:
            print(f"job {job} is in Slurm's queue again", flush=True)
            return
    print(f"warning: job {job} was not requeued: {reason}", file=sys.stderr, flush=True)
