"""How `benchmark` measures time, peak memory and the largest batch: each cell in a process of its own.

The processes are forked from one that has imported torch and computed nothing (multiprocessing's forkserver). So what a model
leaves behind, in memory or by a crash, touches no other cell, and one that runs too long or out of memory can be ended.
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
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lit_linformer.studies.benchmark_models import (
    BACKENDS,
    DTYPES,
    build,
    forget,
    make_input,
    out_of_memory,
    peak_memory,
    run,
    timed,
)
from lit_linformer.utils.environment import cpu, hardware

PATIENCE = 1.0  # seconds beyond the limit before a process is killed: in time a model that is over it says so itself


@dataclass(frozen=True)
class Job:
    """One cell: what is measured (a key of KINDS), of which pass, at which n, with the command's settings."""

    kind: str
    backward: bool
    n: int
    batch: int
    settings: dict[str, Any]


def _failed(reason: str) -> dict[str, str]:
    return {"status": "failed", "reason": reason.splitlines()[0]}


class Reporter:
    """In the process that measures: tells the one that asked which model is at work, and what came of it."""

    def __init__(self, send: Callable[[tuple], None]):
        self.send = send

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What ``action`` returns, or None after out of memory; any other error of torch's ends the process."""
        self.send(("began", name))
        try:
            value = action()
        except RuntimeError as error:
            if not out_of_memory(error):
                self.send(("ended", name, _failed(str(error) or repr(error))))
                raise SystemExit from None  # after an error of CUDA nothing works; the other models get a new process
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


def measure_time(job: Job, names: list[str], reporter: Reporter) -> None:
    """Each round times every model once, the order moved on by one each time, so that a slow moment hits all alike."""
    x = make_input(job.settings, job.batch, job.n, job.backward)
    models: dict[str, nn.Module] = {}
    for name in names:
        ours = [model for other, model in models.items() if not other.startswith("peer")]
        weights = ours[0].state_dict(keep_vars=True) if ours else None
        model = reporter.attempt(name, lambda name=name, weights=weights: build(name, job.settings, job.n, weights))
        if model is not None:
            models[name] = model
    take_turns({name: lambda model=model: timed(model, x) for name, model in models.items()}, job, reporter)


def measure_training(job: Job, names: list[str], reporter: Reporter) -> None:
    """The same for training steps: scripts/throughput.py."""
    from lit_linformer.studies.training_steps import build_step

    steps = {name: reporter.attempt(name, lambda name=name: build_step(name, job.settings)) for name in names}
    take_turns({name: step for name, step in steps.items() if step is not None}, job, reporter)


def take_turns(passes: dict[str, Callable[[], float]], job: Job, reporter: Reporter) -> None:
    """Rounds of passes, each of which returns the seconds it took; results without the first, warm-up rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    warmup, rounds, limit = (job.settings[key] for key in ("warmup", "rounds", "cell_seconds"))
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
            if sum(seconds[name]) + left > limit:
                reporter.ended(name, status="over limit")
                del passes[name]
    for name in passes:
        reporter.ended(name, status="ok", seconds=seconds[name][warmup:])


def measure_memory(job: Job, names: list[str], reporter: Reporter) -> None:
    """Peak of one pass above weights and input; gradients count."""

    def peak(name: str) -> tuple[int, int]:
        model = build(name, job.settings, job.n)
        x = make_input(job.settings, job.batch, job.n, job.backward)
        # A pass over a few tokens loads the kernels and their workspace, which are not the model's memory.
        few = x[:1, :8].detach().requires_grad_(job.backward)
        run(model, few)
        forget(model, few)
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        return peak_memory(lambda: run(model, x), job.settings["device"]), weights

    for name in names:
        if found := reporter.attempt(name, lambda name=name: peak(name)):
            reporter.ended(name, status="ok", bytes=found[0], weights_bytes=found[1])


def measure_largest_batch(job: Job, names: list[str], reporter: Reporter) -> None:
    """The largest batch whose pass fits into --batch_memory on the GPU, to within 3 %: by doubling, then bisection."""
    settings = {**job.settings, "compile": False}  # each batch would compile anew
    total = torch.cuda.get_device_properties(settings["device"]).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, settings["batch_memory"] * 2**30 / total))

    def fits(model: nn.Module, batch: int) -> bool:
        try:
            x = make_input(settings, batch, job.n, job.backward)
            run(model, x)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            model.zero_grad(set_to_none=True)
            x = None
            gc.collect()
            torch.cuda.empty_cache()
        return True

    def search(name: str) -> dict[str, Any]:
        model, bound = build(name, settings, job.n), settings["max_batch"]
        try:
            batch = largest(lambda batch: fits(model, batch), bound, settings["cell_seconds"])
        except TimeoutError:
            return {"status": "over limit"}
        return {"status": "ok", "batch": batch, "at_bound": batch == bound} if batch else {"status": "OOM"}

    for name in names:
        if found := reporter.attempt(name, lambda name=name: search(name)):
            reporter.ended(name, **found)


def largest(fits: Callable[[int], bool], bound: int, seconds: float) -> int:
    """The largest number up to ``bound`` that fits, to within 3 %, 0 if none does; TimeoutError after so many seconds."""
    begin = time.monotonic()
    low, high, number = 0, bound + 1, 1
    while high - low > 1 + low // 32:
        if time.monotonic() - begin > seconds:
            raise TimeoutError
        if fits(number):
            low = number
        else:
            high = number
        number = min(2 * low, bound) if high > bound else (low + high) // 2
    return low


def describe(job: Job, names: list[str], reporter: Reporter) -> None:
    """The hardware, and which fused kernels it has for this precision and head width."""
    settings = job.settings
    if settings["device"] == "cpu":
        reporter.ended("", hardware=cpu(), fused=["fused"])
        return
    shape = (1, settings["num_heads"], 128, settings["hidden_size"] // settings["num_heads"])
    dtype = DTYPES[settings["precision"]]
    fused = []
    for name, backend in BACKENDS.items():
        q = torch.randn(shape, dtype=dtype, device=settings["device"], requires_grad=job.backward)
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # torch warns of each reason why not
            warnings.simplefilter("ignore")
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, q, q)
            if job.backward:
                out.sum().backward()
            fused.append(name)
    reporter.ended("", hardware=hardware(settings["device"]), cpu=cpu(), cuda=torch.version.cuda, fused=fused)


KINDS = {
    "time": measure_time,
    "memory": measure_memory,
    "largest_batch": measure_largest_batch,
    "training": measure_training,
    "describe": describe,
}


def measure(job: Job, names: list[str]) -> dict[str, dict[str, Any]]:
    """{model: {"status": ok | OOM | over limit | failed, …}}; what ends a process costs the others a new start, no more."""
    results: dict[str, dict[str, Any]] = {}
    # Resident size is the whole process's: on a CPU each model's memory is measured in one of its own.
    alone = job.kind == "memory" and job.settings["device"] == "cpu"
    for group in [[name] for name in names] if alone else [names]:
        while left := [name for name in group if name not in results]:
            _listen(job, left, results)
            if len(left) == len([name for name in group if name not in results]):
                raise RuntimeError(f"the process that measures {job.kind} of {', '.join(left)} ended without a word")
    return {name: results[name] for name in names}


def _listen(job: Job, names: list[str], results: dict[str, dict[str, Any]]) -> None:
    context = multiprocessing.get_context("forkserver")
    # torch by name too: where this package is not installed the server does not find it, and each process would import torch.
    context.set_forkserver_preload(["torch", __name__])
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
                raise RuntimeError(f"in the process that measures {job.kind}:\n{rest[0]}")
            elif message == "done":
                process.join(10)  # of itself it ends cleaner than killed: compile leaves semaphores
                return
            else:
                current = None
                if message == "ended":
                    results[rest[0]] = rest[1]
    except EOFError:
        process.join()
        if current is not None:  # the kernel's way to say out of memory is SIGKILL
            killed = process.exitcode == -signal.SIGKILL
            results[current] = {"status": "OOM"} if killed else _failed(f"ended with exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _work(pipe: Any, job: Job, names: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle, who kills this process
    with contextlib.suppress(OSError):  # if memory ends, this process goes and no other one's
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        try:
            torch.set_num_threads(job.settings["threads"])
            if job.settings["device"] != "cpu":
                torch.cuda.set_device(job.settings["device"])
            KINDS[job.kind](job, names, Reporter(pipe.send))
            pipe.send(("done",))
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                raise
            pipe.send(("crash", traceback.format_exc()))


def _end_with_parent() -> None:
    """A parent that was killed could not end this process, whose pass may take minutes."""
    multiprocessing.parent_process().join()
    os._exit(1)
