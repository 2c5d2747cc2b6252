"""What you see while it trains: a live bar on a terminal, plain lines elsewhere (a log file, a cluster's output)."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lit_linformer.callbacks.observing import headline
from lit_linformer.callbacks.throughput import Throughput, Totals, line
from lit_linformer.model import count_parameters
from lit_linformer.model.ranges import Count, check_ranges


class Progress(ProgressBar):
    """Loss, the task's headline metric and throughput (the callback's, where there is one) against optimiser steps.

    Args:
        every_n_steps: optimiser steps between two lines where there is no terminal, and between two readings of the loss.
        live: draw a live bar; None: where the output is a terminal.
    """

    def __init__(self, every_n_steps: Count = 50, live: bool | None = None):
        super().__init__()
        check_ranges("progress.", Progress.__init__, locals())
        self.every_n_steps = every_n_steps
        self.live = sys.stdout.isatty() if live is None else live
        self._enabled = True
        self._bar, self._values, self._shown, self._marked_step = None, "", "", -1
        self._throughput: Throughput | None = None
        self._first = self._last = self._best = None  # (metric, step)

    def disable(self) -> None:  # Lightning calls this on all ranks but the first
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            (self._bar.console.print if self._bar else print)(*args)
            sys.stdout.flush()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        encoder = getattr(getattr(pl_module, "net", None), "encoder", None)
        shape = ""
        if encoder is not None:
            c = encoder.config
            shape = f"{c.attention_kind.describe(c)}, n = {c.max_length}, {c.num_layers} layers of width {c.hidden_size}, "
        size = f"{count_parameters(pl_module) / 1e6:.1f} M parameters"
        self.print(f"{shape}{size}, {trainer.precision} → {trainer.default_root_dir}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._throughput = next((found for found in trainer.callbacks if isinstance(found, Throughput)), None)
        self._marked, self._marked_step = Totals(), trainer.global_step
        self._begin = time.monotonic(), trainer.global_step
        steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        self._total = None if steps == float("inf") else int(steps)
        if self.live and self._enabled:
            self._bar = _rich_bar()
            self._task = self._bar.add_task("train", total=self._total, completed=trainer.global_step, values="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if step == self._marked_step or (step % self.every_n_steps and step != self._total):
            return
        self._values = f"loss {float(outputs['loss']) * trainer.accumulate_grad_batches:.3f}"
        self._marked_step = step
        if self._throughput is not None:
            now = self._throughput.totals()
            self._values += f"  {line(self._throughput.rates(now - self._marked))}"
            self._marked = now
        if self._bar is None:
            total = f"/{self._total}" if self._total else ""
            self.print(f"step {step}{total}  {self._values}  {self._left(trainer)}".rstrip())
        self._refresh()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, words, form, better = headline(trainer, pl_module)
        value = trainer.callback_metrics.get(name)
        if trainer.state.fn != "fit" or value is None:
            return
        step, value = trainer.global_step, float(value)
        self._last = (value, step)
        self._first = self._first or self._last
        if self._best is None or better(value, self._best[0]) != self._best[0]:
            self._best = self._last
        note = "before training" if trainer.sanity_checking else f"best {self._best[0]:{form}} at step {self._best[1]}"
        self.print(f"step {step}  {words} {value:{form}}  ({note})")
        self._shown = f"  {words.split()[-1]} {value:{form}}"
        self._refresh()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        if self._first not in (None, self._last):
            _, words, form, _ = headline(trainer, pl_module)
            marks = {"first": self._first, "last": self._last, "best": self._best}
            shown = ", ".join(f"{name} {value:{form}} (step {step})" for name, (value, step) in marks.items())
            self.print(f"{words}: {shown}")

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, values=self._values + self._shown)

    def _left(self, trainer: Trainer) -> str:
        began, first_step = self._begin
        done = trainer.global_step - first_step
        if not self._total or done <= 0:
            return ""
        seconds = (time.monotonic() - began) / done * (self._total - trainer.global_step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _rich_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class Bar(Progress):
        def get_renderables(self) -> Any:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:  # below the bar: beside it there is no room for them on 80 columns
                yield Text(task.fields["values"])

    return Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
