"""What callbacks share: running the model without affecting training, and tables of what was measured."""

import csv
import io
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_linformer.model import count_parameters
from lit_linformer.runs.record import of_split
from lit_linformer.tasks.base import TrainingModule, encoder_of
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.files import write_text

Headline = tuple[str, str, str, Callable[..., float]]  # as TrainingModule.headline
HEADLINE: Headline = TrainingModule.headline
One = TypeVar("One", bound=Callback)
# Why an EarlyStopping ends training at once, whatever its patience.
AT_ONCE = {
    EarlyStoppingReason.STOPPING_THRESHOLD: "has reached {0.stopping_threshold:g}",
    EarlyStoppingReason.DIVERGENCE_THRESHOLD: "is beyond {0.divergence_threshold:g}",
    EarlyStoppingReason.NON_FINITE_METRIC: "is not finite",
}


def headline(trainer: Trainer, pl_module: LightningModule) -> Headline:
    """The module's headline metric, if it declares one, else the metric that decides which checkpoint is best."""
    if (declared := getattr(pl_module, "headline", None)) is not None:
        return declared
    for callback in trainer.checkpoint_callbacks:
        if (monitor := getattr(callback, "monitor", None)) is not None:
            return monitor, monitor, ".4g", max if callback.mode == "max" else min
    return HEADLINE


def metrics(trainer: Trainer, of: str = "") -> dict[str, float]:
    """The values logged last; of: "val" or "test": only those of that split."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if not of or of_split(name, of)}


def tokens_seen(pl_module: LightningModule) -> int | None:
    """Tokens so far, if the module counts them; a user's own may do so in a buffer, so that its checkpoints keep the number."""
    seen = getattr(pl_module, "tokens_seen", None)
    return None if seen is None else int(seen)


def parameters_of(pl_module: LightningModule) -> tuple[int, int]:
    """How many parameters a module has, and how many of them learn. Of frozen ones only the encoder's count: no teacher's."""
    learning, encoder = count_parameters(pl_module), encoder_of(pl_module)
    return learning + (0 if encoder is None else count_parameters(encoder, trainable=False)), learning


def at_max_steps(trainer: Trainer) -> bool:
    """Whether max_steps steps are done. With several optimisers, whose steps all count, a batch may go beyond max_steps."""
    return 0 < trainer.max_steps <= trainer.global_step


def is_whole(trainer: Trainer) -> bool:
    """Whether the present validation covers all batches, unlike Lightning's sanity check, which runs a few before training."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")


def callback_of(trainer: Trainer, kind: type[One]) -> One | None:
    """The trainer's first callback of that class; None if it has none."""
    return next((one for one in trainer.callbacks if isinstance(one, kind)), None)


@contextmanager
def unnoticed(pl_module: LightningModule) -> Iterator[None]:
    """Eval mode and no gradients inside the context; after it every module's mode and all random states are restored."""
    device = pl_module.device
    modes = [(module, module.training) for module in pl_module.modules()]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    # Only for this process's GPU: saving the state of all would start a CUDA context on each.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        pl_module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            np.random.set_state(numpy_state)
            random.setstate(python_state)


class Stepping(Callback):
    """Knows, at the end of a batch, whether the optimiser stepped: with accumulation it does so only after some batches."""

    _step_before_batch = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._step_before_batch = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        return trainer.global_step != self._step_before_batch

    def passed(self, trainer: Trainer, every: int) -> bool:
        """Whether a multiple of ``every`` is among this batch's steps, which are several with several optimisers."""
        return trainer.global_step // every > self._step_before_batch // every


class Measuring(Callback):
    """Measures something after validations, both while a run trains and when `validate` evaluates a checkpoint."""

    every_n_validations = 1  # in fit; 0: never
    before_training = False  # whether also after the validation before training, at step 0, if it is of all batches
    validations = 0
    _loaded_step = 0

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not on_validation_end: the checkpoints that are written there must include what is measured.
        if trainer.sanity_checking:
            if not (self.before_training and is_whole(trainer)):
                return
        elif trainer.state.fn == "fit":
            self.validations += 1
            if not self.every_n_validations or self.validations % self.every_n_validations:
                return
        self.after_validation(trainer, pl_module)

    def after_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures; called on all processes."""
        raise NotImplementedError

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded_step = checkpoint["global_step"]  # `validate` does not restore the trainer's step

    def refuse(self, trainer: Trainer, allowed: str) -> NoReturn:
        """Raises UserError: this callback cannot measure such a model or such data."""
        data = type(trainer.datamodule).__name__
        raise UserError(f"trainer.callbacks holds {type(self).__name__}, but data is {data}", allowed)

    def measured_step(self, trainer: Trainer) -> int:
        return self._loaded_step if trainer.state.fn != "fit" and trainer.ckpt_path else trainer.global_step

    def file(self, trainer: Trainer, name: str) -> Path | None:
        """The file in the run folder to write, validate_NAME with `validate`; None: this process writes none."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return None
        return Path(trainer.default_root_dir) / (name if trainer.state.fn == "fit" else f"validate_{name}")


class Clock:
    """Wall-clock time of a run in seconds: that of earlier starts (``before``) plus that of this one."""

    def __init__(self) -> None:
        self.before = 0.0
        self.start()

    def start(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        return round(self.before + time.monotonic() - self._started, 1)


def owes_validation(trainer: Trainer) -> bool:
    """Whether a checkpoint written now, or the one that the run resumes from, precedes its step's validation."""
    return any(getattr(callback, "owes_validation", False) for callback in trainer.callbacks)


def why_ended(trainer: Trainer) -> list[str]:
    """Why training ended early, in words; empty if it did not."""
    why = [f"{metric} {reason}" for metric, reason in stopped_early(trainer).items()]
    return why + ["the time given for training is over"] * (out_of_time(trainer) and not at_max_steps(trainer))


def stopped_early(trainer: Trainer) -> dict[str, str]:
    """{metric: why} of each EarlyStopping that has ended training, also in a run resumed from a checkpoint."""
    return {one.monitor: why for one in trainer.early_stopping_callbacks if (why := _why_stopped(one))}


def _why_stopped(one: EarlyStopping) -> str:
    if one.stopping_reason in AT_ONCE:
        return AT_ONCE[one.stopping_reason].format(one)
    count = one.wait_count
    return f"has not improved in {count} validation{'s' * (count != 1)}" if count >= max(1, one.patience) else ""


def out_of_time(trainer: Trainer) -> bool:
    """Whether trainer.max_time, or a user's own Timer, has ended training, also in a run resumed from a checkpoint."""
    left = [one.time_remaining() for one in trainer.callbacks if isinstance(one, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A table with a header line, written atomically as by write_text; NaN where a row lacks a column."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval=math.nan)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def say(trainer: Trainer, line: str) -> None:
    """Prints a line on the first rank, above a live bar if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.print(line)
    elif trainer.is_global_zero:
        print(line, flush=True)
