"""Measurements in separate processes, so that what a model leaves in memory, or its crash, does not affect other models.

The processes are forked from one that has imported torch and computed nothing (multiprocessing's forkserver). One that takes
too long or too much memory can be killed, which is a result, too.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_linformer.utils.errors import out_of_memory

PATIENCE = 1.0  # seconds beyond the time limit before a process is killed; usually it reports "over limit" itself before that


@dataclass(frozen=True)
class Job:
    """What is measured.

    Args:
        measurement: (job, models, reporter) → None; a module-level function, since the other process imports it.
        settings: the command's: cell_seconds, device and threads are read here.
        backward, n, batch: of a pass through layers.
    """

    measurement: Callable[["Job", list[str], "Reporter"], None]
    settings: dict[str, Any]
    backward: bool = False
    n: int = 1
    batch: int = 1

    @property
    def what(self) -> str:
        return self.measurement.__name__.removeprefix("measure_")


def _failed(reason: str) -> dict[str, str]:
    return {"status": "failed", "reason": reason.splitlines()[0]}


class Reporter:
    """Runs in the measuring process: reports to its parent which model is running, and the result."""

    def __init__(self, send: Callable[[tuple], None]):
        self.send = send

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What ``action`` returns, or None if memory runs out; any other torch error ends the process."""
        self.send(("began", name))
        try:
            value = action()
        except RuntimeError as error:
            if not out_of_memory(error):
                self.send(("ended", name, _failed(str(error) or repr(error))))
                raise SystemExit from None  # nothing works after a CUDA error; the other models get a new process
        except MemoryError:
            pass
        else:
            self.send(("idle",))
            return value
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.send(("ended", name, {"status": "OOM"}))
        return None

    def ended(self, name: str, **result: Any) -> None:
        self.send(("ended", name, result))


def take_turns(passes: dict[str, Callable[[], float]], job: Job, reporter: Reporter) -> None:
    """Runs rounds of passes, each of which returns the seconds it took; results leave out the warm-up rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    warmup, rounds, limit = (job.settings[key] for key in ("warmup", "rounds", "cell_seconds"))
    steps = job.settings.get("steps", 1)  # per pass, which then returns the seconds of one step
    for turn in range(warmup + rounds):
        order = list(passes)
        for name in order[turn % len(order) :] + order[: turn % len(order)] if order else []:
            taken = reporter.attempt(name, passes[name])
            if taken is None:
                del passes[name]
                continue
            seconds[name].append(taken)
            # The first pass, which may compile, says little about those that are left.
            left = taken * (warmup + rounds - turn - 1) if turn else 0.0
            if steps * (sum(seconds[name]) + left) > limit:
                reporter.ended(name, status="over limit")
                del passes[name]
    for name in passes:
        reporter.ended(name, status="ok", seconds=seconds[name][warmup:])


def measure(job: Job, names: list[str], alone: bool = False) -> dict[str, dict[str, Any]]:
    """{model: {"status": ok | OOM | over limit | failed, …}}; if a process ends, the remaining models get a new one.

    ``alone``: each model in its own process.
    """
    results: dict[str, dict[str, Any]] = {}
    for group in [[name] for name in names] if alone else [names]:
        while left := [name for name in group if name not in results]:
            _listen(job, left, results)
            if len(left) == len([name for name in group if name not in results]):
                raise RuntimeError(f"the process that measures {job.what} of {', '.join(left)} ended without a word")
    return {name: results[name] for name in names}


def _listen(job: Job, names: list[str], results: dict[str, dict[str, Any]]) -> None:
    context = multiprocessing.get_context("forkserver")
    # torch by name too: if this package is not installed the server cannot import it, and each process would import torch.
    context.set_forkserver_preload(["torch", job.measurement.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, job, names), daemon=True)
    process.start()
    sender.close()
    current, deadline = None, math.inf
    try:
        while True:
            if not receiver.poll(None if current is None else max(0.0, deadline - time.monotonic())):
                results[current] = {"status": "over limit"}
                return
            message, *rest = receiver.recv()
            if message == "began":
                current, deadline = rest[0], time.monotonic() + job.settings["cell_seconds"] + PATIENCE
            elif message == "crash":
                raise RuntimeError(f"in the process that measures {job.what}:\n{rest[0]}")
            elif message == "done":
                process.join(10)  # a normal exit is cleaner than a kill: compile leaves semaphores
                return
            else:
                current = None
                if message == "ended":
                    results[rest[0]] = rest[1]
    except EOFError:
        process.join()
        if current is not None:  # out of memory: the kernel sends SIGKILL
            killed = process.exitcode == -signal.SIGKILL
            results[current] = {"status": "OOM"} if killed else _failed(f"ended with exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _work(pipe: Any, job: Job, names: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    with contextlib.suppress(OSError):  # if memory runs out, this process is to be killed first
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        try:
            torch.set_num_threads(job.settings["threads"])
            if job.settings["device"] != "cpu":
                torch.cuda.set_device(job.settings["device"])
            job.measurement(job, names, Reporter(pipe.send))
            pipe.send(("done",))
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                raise
            pipe.send(("crash", traceback.format_exc()))


def _end_with_parent() -> None:
    """Ends this process, whose pass may take minutes, if its parent is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
