"""What `benchmark` measures of a pass through layers: time, peak memory, the largest batch; each in a process of its own."""

import contextlib
import gc
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lit_linformer.studies.benchmark.models import BACKENDS, DTYPES, build
from lit_linformer.studies.benchmark.process import Job, Reporter, take_turns
from lit_linformer.utils.environment import cpu, give_memory_back, hardware, process_memory
from lit_linformer.utils.errors import out_of_memory


def make_input(settings: dict[str, Any], batch: int, n: int, backward: bool) -> Tensor:
    shape = (batch, n, settings["hidden_size"])
    return torch.randn(shape, dtype=DTYPES[settings["precision"]], device=settings["device"], requires_grad=backward)


def run(model: nn.Module, x: Tensor) -> None:
    """Forward pass, and backward down to the input if the input requires a gradient."""
    if x.requires_grad:
        model(x).backward(x.detach())
    else:
        with torch.inference_mode():
            model(x)


def forget(model: nn.Module, x: Tensor) -> None:
    """Drops gradients, so that each pass allocates its own."""
    model.zero_grad(set_to_none=True)
    x.grad = None


def timed(model: nn.Module, x: Tensor) -> float:
    """Seconds of one pass, including the device's work."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    for _ in range(2):
        allocated = torch.cuda.memory_stats().get("num_device_alloc", 0) if x.is_cuda else 0
        wait()
        start = time.perf_counter()
        run(model, x)
        wait()
        seconds = time.perf_counter() - start
        forget(model, x)
        # If the models together fill the GPU, a pass may have to ask the driver for memory; it is then repeated.
        if not x.is_cuda or torch.cuda.memory_stats().get("num_device_alloc", 0) == allocated:
            break
    return seconds


def peak_memory(action: Callable[[], Any], device: str = "cpu") -> int:
    """The peak of memory during ``action``, in bytes above what was allocated before.

    On a GPU in torch's allocator; on a CPU the process's resident size, where freed memory that malloc kept counts as used.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    give_memory_back()  # otherwise action would reuse free memory, unseen
    try:
        before = process_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        action()
        return process_memory("VmHWM") - before
    except OSError:  # no such /proc: the growth of the peak, too small if memory was higher before
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        action()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return grown * (1 if sys.platform == "darwin" else 1024)


def measure_time(job: Job, names: list[str], reporter: Reporter) -> None:
    """Each round times every model once, in rotating order, so that a slow moment affects all of them."""
    x = make_input(job.settings, job.batch, job.n, job.backward)
    models: dict[str, nn.Module] = {}
    for name in names:
        ours = [model for other, model in models.items() if other.partition(" ")[0] != "peer"]
        weights = ours[0].state_dict(keep_vars=True) if ours else None
        model = reporter.attempt(name, lambda name=name, weights=weights: build(name, job.settings, job.n, weights))
        if model is not None:
            models[name] = model
    take_turns({name: lambda model=model: timed(model, x) for name, model in models.items()}, job, reporter)


def measure_memory(job: Job, names: list[str], reporter: Reporter) -> None:
    """Peak of one pass above weights and input, gradients included."""

    def peak(name: str) -> tuple[int, int]:
        model = build(name, job.settings, job.n)
        x = make_input(job.settings, job.batch, job.n, job.backward)
        # A pass over a few tokens loads the kernels and their workspace, which are not the model's memory. A compiled model
        # gets the same shape, since another would be compiled anew.
        few = (x if job.settings["compile"] else x[:1, :8]).detach().requires_grad_(job.backward)
        run(model, few)
        forget(model, few)
        weights = sum(weight.nbytes for weight in model.parameters())
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
    """The largest number up to ``bound`` that fits, to within 3 %; 0 if none does. TimeoutError after ``seconds``."""
    begin = time.monotonic()
    low, high, number = 0, bound + 1, 1
    while high - low > (1 if high > bound else 1 + low // 32):  # the bound itself is tried while nothing has failed
        if time.monotonic() - begin > seconds:
            raise TimeoutError
        if fits(number):
            low = number
        else:
            high = number
        number = min(2 * low, bound) if high > bound else (low + high) // 2
    return low


def measure_speed(job: Job, names: list[str], reporter: Reporter) -> None:
    """Seconds of one model's pass, after a warm-up pass; for the estimate."""
    model, x = build(names[0], job.settings, job.n), make_input(job.settings, 1, job.n, False)
    if reporter.attempt(names[0], lambda: timed(model, x)):
        reporter.ended(names[0], status="ok", seconds=timed(model, x))


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
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # torch warns about each kernel that it cannot use
            warnings.simplefilter("ignore")
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, q, q)
            if job.backward:
                out.sum().backward()
            fused.append(name)
    reporter.ended("", hardware=hardware(settings["device"]), cpu=cpu(), cuda=torch.version.cuda, fused=fused)
