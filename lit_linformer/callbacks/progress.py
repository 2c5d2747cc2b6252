"""What you see while it trains: a header, then a live bar on a terminal or plain lines elsewhere (a log file), then a table."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lit_linformer.callbacks.header import WIDTH, Rows, header, wrapped
from lit_linformer.callbacks.observing import Clock, callback_of, headline, is_whole, tokens_seen, why_ended
from lit_linformer.callbacks.pace import Pace
from lit_linformer.callbacks.throughput import Throughput, Totals, brief, cells
from lit_linformer.data.summary import data_rows
from lit_linformer.model.ranges import Count, check_ranges
from lit_linformer.tasks.base import encoder_of
from lit_linformer.utils.amounts import clock, count

EARLY = 5  # steps after which the time left is first shown


class Progress(ProgressBar):
    """Shows loss, the task's headline metric and throughput (with the callback Throughput) as optimiser steps go by.

    The loss is the mean since the previous line: that of a single batch, which the loggers have, is noisy.

    Args:
        every_n_steps: optimiser steps between two readings of the loss, and between two lines if there is no terminal.
        live: whether to draw a live bar; null: if the output is a terminal.
    """

    def __init__(self, every_n_steps: Count = 50, live: bool | None = None):
        super().__init__()
        check_ranges("progress.", Progress.__init__, locals())
        self.every_n_steps = every_n_steps
        self.live = sys.stdout.isatty() if live is None else live
        self._enabled = True
        self._console, self._bar = None, None
        self._read, self._validated = [], []  # values below the bar: of the last reading, and of the last validation
        self._marked_step = -1
        self._losses, self._batches = 0.0, 0  # since the last line; the sum stays on the device until it is read
        self._throughput: Throughput | None = None
        self._pace = Pace(time.monotonic, None, 0)  # replaced when training begins
        self._early: int | None = None  # the step at which the time left is first shown; None afterwards
        self._clock, self._validation_began = Clock(), 0.0
        self._marks: dict[str, tuple[float, int]] = {}  # first, best and last: (metric, step)
        self._metric = ""  # its name

    def disable(self) -> None:  # Lightning calls this on all ranks but the first
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def state_dict(self) -> dict[str, Any]:
        marks = {name: list(mark) for name, mark in self._marks.items() if math.isfinite(mark[0])}
        return {"marks": marks, "metric": self._metric, "seconds": self._clock.seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._marks = {name: (value, step) for name, (value, step) in state_dict["marks"].items()}
        self._metric = state_dict.get("metric", "")
        self._clock.before = state_dict["seconds"]

    def print(self, *args: Any, **kwargs: Any) -> None:
        if not self._enabled:
            return
        if self._console is not None:  # above the bar
            self._console.print(*args, markup=False, highlight=False, soft_wrap=True)
        else:
            print(*args)
        sys.stdout.flush()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start()
        metric, *_ = headline(trainer, pl_module)
        if self._metric not in ("", metric):  # an earlier start had another headline metric
            self._marks = {}
        self._metric = metric
        if self.live and self._enabled:
            from rich.console import Console

            self._console = Console()
        encoder = encoder_of(pl_module)
        longest = None if encoder is None else encoder.config.max_length
        self._tell([*header(trainer, pl_module), *data_rows(trainer.datamodule, longest)])

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_sanity_check_start(trainer, pl_module)
        if self._console is not None:
            self._bar = _Bar(self._console)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._throughput = callback_of(trainer, Throughput)
        self._marked, self._marked_step = Totals(), trainer.global_step
        steps = trainer.estimated_stepping_batches
        if not pl_module.automatic_optimization:  # the steps of all its optimisers count, usually one each per batch
            most = trainer.max_steps if trainer.max_steps > 0 else float("inf")
            steps = min(steps * len(trainer.optimizers), most)
        total = None if steps < 0 or steps == float("inf") else int(steps)
        seconds = time.monotonic if self._throughput is None else lambda: self._throughput.totals().seconds
        self._pace = Pace(seconds, total, trainer.global_step, self._pace.validation)  # timed before training
        self._early = trainer.global_step + EARLY
        if self._console is not None:
            self._bar = self._bar or _Bar(self._console)
            self._bar.begin(total, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        step, total = trainer.global_step, self._pace.total
        if isinstance(outputs, Mapping) and "loss" in outputs:  # not with manual optimisation
            self._losses, self._batches = self._losses + outputs["loss"].detach().float(), self._batches + 1
        if step == self._marked_step:
            return
        self._pace.stepped(step)
        if self._bar is not None:
            self._bar.show(step)
        if step == self._early and total is not None and total - step > self.every_n_steps:
            self._early = None  # once, and not after each micro-batch of the next step
            self._tell_time(trainer)
        ended = total is not None and step >= total  # several optimisers may step beyond max_steps
        if step // self.every_n_steps == self._marked_step // self.every_n_steps and not ended:
            return
        mean = float(self._losses) * trainer.accumulate_grad_batches / max(1, self._batches)
        loss = [f"loss {mean:.3f}"] if self._batches else []
        self._losses, self._batches = 0.0, 0
        rates: dict[str, float] = {}
        self._marked_step = step
        if self._throughput is not None:
            now = self._throughput.totals()
            rates = self._throughput.rates(now - self._marked)
            self._marked = now
        left = None if ended else self._pace.left(trainer)
        if self._bar is not None:
            self._read = [*loss, *cells(rates)]
            self._bar.show(step, left, self._values())
            return
        # Everything else that is measured is in TensorBoard and result.json.
        end = [] if left is None else [f"{clock(left)} left"]
        self.print("  ".join([f"step {step}/{total}" if total else f"step {step}", *loss, *brief(rates), *end]))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.monotonic()
        if self._bar is not None:
            batches = sum(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
            self._bar.validate(None if batches == float("inf") else int(batches))

    def on_validation_batch_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.validated()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        if self._bar is not None:
            self._bar.train()
        if not is_whole(trainer):
            return
        self._pace.validation = time.monotonic() - self._validation_began
        name, words, form, better = headline(trainer, pl_module)
        if name not in trainer.callback_metrics:
            return
        step, value = trainer.global_step, float(trainer.callback_metrics[name])
        self._mark(value, step, better)
        best, at = self._marks["best"]
        note = "before training" if trainer.sanity_checking else f"best {best:{form}} at step {at}"
        self.print(f"step {step}  {words} {value:{form}}  ({note})")
        self._validated = [f"{words.split()[-1]} {value:{form}}"]
        if self._bar is not None:
            self._bar.show(step, self._pace.left(trainer), self._values())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _, words, form, _ = headline(trainer, pl_module)
        rows: Rows = []
        if self._marks:
            # Not always all: checkpoints keep only finite ones.
            known = [name for name in ("first", "best", "last") if name in self._marks]
            shown = {name: f"{self._marks[name][0]:{form}}" for name in known}
            width = max(map(len, shown.values()))
            rows = [(words, "")]
            rows += [(f"  {name}", f"{text:>{width}} (step {self._marks[name][1]})") for name, text in shown.items()]
        rows += [("ended", f"early at step {trainer.global_step}: {reason}") for reason in why_ended(trainer)]
        time_and_speed = [clock(self._clock.seconds())]
        if self._throughput is not None:
            time_and_speed += cells(self._throughput.summary())[:1]
        if tokens := tokens_seen(pl_module):
            time_and_speed.append(f"{count(tokens)} tokens")
        self._tell([*rows, ("time", ", ".join(time_and_speed))])

    def _values(self) -> list[str]:
        """The values below the bar, the most important first."""
        return self._read[:1] + self._validated + self._read[1:]

    def _mark(self, value: float, step: int, better: Any) -> None:
        self._marks.setdefault("first", (value, step))
        best = self._marks.setdefault("best", (value, step))
        if math.isfinite(value) and (better(value, best[0]) != best[0] or not math.isfinite(best[0])):
            self._marks["best"] = (value, step)
        self._marks["last"] = (value, step)

    def _tell_time(self, trainer: Trainer) -> None:
        """Shows an estimate of the time left, after the first steps."""
        left, each = self._pace.left(trainer), self._pace.per_step(trainer.global_step)
        if left is None or each is None:
            return
        if self._bar is not None:
            self._bar.show(trainer.global_step, left)
            return
        validations, known = self._pace.validations(trainer), self._pace.validation
        steps = f"{self._pace.total - trainer.global_step} steps at {1 / each:.3g}/s"
        of = " (not timed yet)" if known is None else f" of {known:.1f} s"
        checks = f", {validations} validation{'s' * (validations != 1)}{of}" * (validations > 0)
        self._tell([("estimated", f"{clock(left)} left: {steps}{checks}")])

    def _tell(self, rows: Rows) -> None:
        """Prints the rows of a header or a table, in colour on a terminal."""
        width = WIDTH if self._console is None else min(WIDTH, self._console.width)
        for label, text in wrapped(rows, width):
            if self._console is None:
                self.print(f"{label}{text}".rstrip())
                continue
            from rich.text import Text

            self.print(Text.assemble((label, "cyan"), text))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Bar:
    """The live bar, and a line of values below it, since 80 columns have no room for them beside it."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Bar(Progress):
            def get_renderables(self) -> Any:
                yield self.make_tasks_table(self.tasks)
                for task in self.tasks:
                    yield Text(_fitting(task.fields["values"], console.width), no_wrap=True)

        columns = (TextColumn("{task.description}"), BarColumn(max(10, min(60, console.width - 50))), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console)
        self._task = self._bar.add_task("validate", total=None, values=[], left="")
        self._ends: float | None = None
        self._steps: tuple[float | None, float] = None, 0  # total and completed, while a validation's batches are counted
        self._bar.start()

    def begin(self, total: int | None, step: int) -> None:
        self._bar.reset(self._task)
        self._count("train", total, step)

    def show(self, step: int, left: float | None = None, values: list[str] | None = None) -> None:
        """Updates what is given."""
        if left is not None:
            self._ends = time.monotonic() + left
        fields: dict[str, Any] = {} if values is None else {"values": values}
        if self._ends is not None:
            fields["left"] = f"{clock(self._ends - time.monotonic())} left"
        self._bar.update(self._task, completed=step, **fields)

    def validate(self, batches: int | None) -> None:
        """Counts validation batches, until `train` returns to the steps."""
        task = self._bar.tasks[0]
        self._steps = task.total, task.completed
        self._count("validate", batches, 0)
        self._bar.refresh()

    def validated(self) -> None:
        self._bar.advance(self._task)

    def train(self) -> None:
        self._count("train", *self._steps)

    def _count(self, what: str, total: float | None, completed: float) -> None:
        self._bar.update(self._task, description=what, completed=completed)
        self._bar.tasks[0].total = total  # `update` would ignore None, for a run without an end

    def stop(self) -> None:
        self._bar.update(self._task, left="")
        self._bar.stop()


def _fitting(values: list[str], width: int) -> str:
    """As many values as there is room for."""
    line = ""
    for value in values:
        longer = f"{line}  {value}" if line else value
        if len(longer) > width:
            break
        line = longer
    return line
