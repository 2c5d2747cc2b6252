"""Checkpoints: written atomically, two of the newest and the best k (tasks/checkpoints.py finds them again).

A run's checkpoints/ holds last.ckpt (the newest), previous.ckpt (the one before, in case the newest is damaged) and
best-STEP-METRIC.ckpt.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from lit_linformer.callbacks.observing import validation_follows
from lit_linformer.tasks.checkpoints import first_line
from lit_linformer.tasks.sharding import load_sharded


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs, then renames: a kill or a full disk leaves the old file or the new one, whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None) -> None:
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            reason = f"cannot write the checkpoint {path}: {first_line(error)}; those before it are intact"
            raise OSError(reason) from error

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None) -> dict:
        path = Path(path)
        return load_sharded(path) if path.is_dir() else torch.load(path, map_location="cpu", weights_only=True)


class LastCheckpoint(Checkpoint):
    """Keeps last.ckpt, written after an optimiser step (and after its validation, if it has one), and previous.ckpt.

    Lightning's ModelCheckpoint may save in the middle of a gradient accumulation, from where no run resumes exactly. And a run
    that is saved between a step and its validation, and killed in that, goes on without it: its point is lost for good.

    Args:
        every_n_steps: optimiser steps between two of them.
    """

    def __init__(self, every_n_steps: int = 500):
        if every_n_steps < 1:
            raise ValueError(f"last.every_n_steps is {every_n_steps}; allowed: 1 or more")
        self.every_n_steps = every_n_steps
        self._step_before_batch = -1
        self._saved_step = -1
        self._due = False  # after the validation that follows the step

    @property
    def saved_step(self) -> int:
        """Of last.ckpt; of a run that has written none yet, the step at which it started."""
        return self._saved_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_before_batch = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._step_before_batch
        done = trainer.global_step == trainer.max_steps
        if stepped and (trainer.global_step % self.every_n_steps == 0 or done):
            self._due = validation_follows(trainer)
            if not self._due:
                self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._due = False
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes last.ckpt, unless this step's is there."""
        if trainer.fast_dev_run or trainer.global_step == self._saved_step:
            return
        self._write(trainer)
        self._saved_step = trainer.global_step

    def _write(self, trainer: Trainer) -> None:
        """Writes last.ckpt; the one that is there becomes previous.ckpt."""
        folder = Path(trainer.default_root_dir) / "checkpoints"
        new, last = folder / "new.ckpt", folder / "last.ckpt"
        if trainer.is_global_zero and new.is_dir():  # a sharded one, half-written when it was killed
            shutil.rmtree(new)
        # The old two stay until the new one is whole: after a fall-back previous.ckpt may be the only good one. All
        # processes are done with it: save_checkpoint ends with a barrier.
        trainer.save_checkpoint(new)
        if trainer.is_global_zero:
            if last.exists():
                _replace(last, folder / "previous.ckpt")
            _replace(new, last)
        trainer.strategy.barrier()


def _replace(source: Path, target: Path) -> None:
    if target.is_dir():  # a sharded one: a folder takes the place of an empty folder only, and a file of none
        shutil.rmtree(target)
    elif source.is_dir():
        target.unlink(missing_ok=True)
    os.replace(source, target)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, but a metric that is not finite is never the best."""

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        return (
            current is not None and bool(torch.as_tensor(current).isfinite()) and super().check_monitor_top_k(trainer, current)
        )


def best_checkpoint(monitor: str = "val/perplexity", mode: str = "min", keep: int = 1) -> BestCheckpoint:
    """Keeps the checkpoints of the best validations.

    Args:
        monitor: the logged metric that decides.
        mode: min, or max where higher is better.
        keep: how many are kept; 0 for none.
    """
    return BestCheckpoint(
        monitor=monitor,
        mode=mode,
        save_top_k=keep,
        filename=f"best-{{step:08d}}-{{{monitor}:.4f}}",
        auto_insert_metric_name=False,
        save_on_train_epoch_end=False,
    )
