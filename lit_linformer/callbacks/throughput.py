"""How fast a model trains: tokens/s, model FLOPs utilisation, waiting for data, memory; Progress and TensorBoard show it.

Model FLOPs utilisation (MFU) is the rate of the operations that the model needs (model/flops.py; recomputation does not count)
divided by the devices' peak (utils/peaks.py). For an unknown device, or a CPU, there is no MFU, only operations per second.
"""

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_linformer.callbacks.observing import Stepping
from lit_linformer.model.ranges import Range, check_ranges
from lit_linformer.tasks.base import input_ids_of
from lit_linformer.utils.amounts import count
from lit_linformer.utils.environment import process_memory
from lit_linformer.utils.peaks import device_peak

GIB = 2**30
NOTABLE_WAIT = 0.05  # share of the time


@dataclass
class Totals:
    """Totals of training since it began in this start, over all processes; without validation and checkpoints."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # CPU time of all threads of this process, which other load on the machine does not increase
    waiting: float = 0.0  # seconds between the end of a batch and the start of the next
    tokens: int = 0  # padding included
    samples: int = 0
    flops: float = 0.0

    def __sub__(self, other: "Totals") -> "Totals":
        return Totals(**{name: value - getattr(other, name) for name, value in vars(self).items()})


class Throughput(Stepping):
    """Measures training without changing a bit of it. On a GPU it synchronises only when it takes a reading.

    Every trainer.log_every_n_steps the loggers get the values since the previous point (TensorBoard under watch/):

        throughput/tokens_per_second    over all processes, padding included
        throughput/samples_per_second   rows, or texts
        throughput/gflops_per_second    10⁹ operations that the model needs, per second and device
        throughput/mfu                  the same as a share of the device's peak
        throughput/data_wait            share of the time between the end of a batch and the start of the next
        throughput/peak_memory_gib      most that torch held on this process's GPU since it started; on a CPU the process's
                                        peak resident size

    result.json has their averages since the last start, without the first of these intervals: warm-up and compilation.

    Args:
        peak_tflops: the device's dense peak, in 10¹² operations per second at the precision of the training, for a device that
            is not in the table of utils/peaks.py; None: from that table.
    """

    def __init__(self, peak_tflops: Annotated[float, Range(above=0, most=1e9)] | None = None) -> None:
        check_ranges("throughput.", Throughput.__init__, locals())
        self.peak_tflops = peak_tflops
        self._totals = Totals()
        self._mark: tuple[float, float] | None = None  # up to when wall-clock and CPU time are counted; None: paused
        self._waiting = False
        self._window = Totals()  # totals when the present window began
        self._warm: Totals | None = None  # totals when the first one ended
        self._memory = 0  # bytes, the highest reading so far: LengthSweep resets CUDA's own peak counter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device, self._world_size = pl_module.device, trainer.world_size
        self._peak = None if self.peak_tflops is None else self.peak_tflops * 1e12
        self._peak = self._peak or device_peak(str(trainer.strategy.root_device), str(trainer.precision))
        self._totals, self._window, self._warm, self._mark, self._memory = Totals(), Totals(), None, None, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        super().on_train_batch_start(trainer, pl_module)
        self._advance()
        self._waiting = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(pl_module, batch)
        if self.passed(trainer, trainer.log_every_n_steps):
            now = self.totals()
            values = {f"throughput/{name}": value for name, value in self.rates(now - self._window).items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.global_step)
            self._window = now
            self._warm = self._warm or now
        self._advance()
        self._waiting = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def totals(self) -> Totals:
        """Totals up to now; on a GPU after a synchronisation."""
        if self._mark is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._memory = max(self._memory, peak_memory(self._device) or 0)
            before, self._waiting = self._waiting, False  # this wait was for the GPU, not for data
            self._advance()
            self._waiting = before
        return replace(self._totals)

    def rates(self, spent: Totals) -> dict[str, float]:
        """The rates for ``spent``, the difference of two totals, by the names above; empty if no time has passed."""
        if spent.seconds <= 0:
            return {}
        rates = {}
        if spent.tokens:
            rates["tokens_per_second"] = spent.tokens / spent.seconds
        if spent.samples:
            rates["samples_per_second"] = spent.samples / spent.seconds
        if spent.flops:
            reached = spent.flops / spent.seconds / self._world_size
            rates["gflops_per_second"] = reached / 1e9
            if self._peak is not None:
                rates["mfu"] = reached / self._peak
        rates["data_wait"] = spent.waiting / spent.seconds
        if self._memory:
            rates["peak_memory_gib"] = self._memory / GIB
        return rates

    def summary(self) -> dict[str, float]:
        """Rates of the run so far, for result.json; and 10⁹ operations per token, if they are known."""
        spent = self._totals - (self._warm or Totals())
        if not spent.samples:  # it ended within its first window
            spent = self._totals
        each = {"gflops_per_token": spent.flops / spent.tokens / 1e9} if spent.flops and spent.tokens else {}
        return {name: float(f"{value:.5g}") for name, value in (self.rates(spent) | each).items()}

    def _count(self, pl_module: LightningModule, batch: Any) -> None:
        ids = input_ids_of(batch)
        if ids is None:
            return
        totals, world_size = self._totals, self._world_size
        totals.tokens += ids.shape[:2].numel() * world_size
        labels = batch.get("labels")
        rows = labels if isinstance(labels, Tensor) and labels.dim() else ids  # windows are not samples
        totals.samples += len(rows) * world_size
        if hasattr(pl_module, "training_flops"):
            totals.flops += (pl_module.training_flops(batch) or 0) * world_size  # 0: not known, and then not shown

    def _advance(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        if self._mark is not None:
            self._totals.seconds += now - self._mark[0]
            self._totals.cpu_seconds += cpu - self._mark[1]
            self._totals.waiting += (now - self._mark[0]) * self._waiting
        self._mark = now, cpu

    def _pause(self) -> None:
        """Counts time up to now, and again from the start of the next batch on."""
        self.totals()
        self._mark = None


def cells(rates: dict[str, float]) -> list[str]:
    """For display: 29.9 k tokens/s, 234 samples/s, MFU 51.2%, data wait 0.3%, 21.3 GiB."""
    forms = {
        "tokens_per_second": lambda value: f"{count(round(value)) if value >= 1e3 else _short(value)} tokens/s",
        "samples_per_second": lambda value: f"{_short(value)} samples/s",
        "mfu": lambda value: f"MFU {value:.1%}",
        "gflops_per_second": lambda value: "" if "mfu" in rates else f"{_short(value)} GFLOP/s",
        "data_wait": lambda value: f"data wait {value:.1%}",
        "peak_memory_gib": lambda value: f"{value:.1f} GiB",
    }
    return [text for name in rates if name in forms and (text := forms[name](rates[name]))]


def brief(rates: dict[str, float]) -> list[str]:
    """As ``cells``, for a short line: speed, the wait for data if it is notable, MFU if it is known."""
    names = ["tokens_per_second", *["data_wait"] * (rates.get("data_wait", 0.0) >= NOTABLE_WAIT), "mfu"]
    return cells({name: rates[name] for name in names if name in rates})


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"  # two digits; not 1e+02 for 99.6


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of torch's allocator on a GPU, the process's resident size on a CPU; None: not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        return process_memory("VmHWM")
    return None
