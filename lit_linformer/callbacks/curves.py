"""Keeps the loggers' curves as exact as perplexity.csv: every point up to a checkpoint, and none of them twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from lit_linformer.callbacks.loggers import Writer, writer_of, writers
from lit_linformer.callbacks.observing import Stepping, is_whole, metrics, owes_validation
from lit_linformer.utils import compat
from lit_linformer.utils.errors import UserError, first_line
from lit_linformer.utils.files import write_text

IDENTITIES = "loggers.json"
Identities = dict[str, list[str]]  # {logger class: the ids with which its loggers find this run again}


class Curves(Stepping):
    """Opens the loggers when training begins, not before, so that none shows an empty run for a fit that is refused.

    A step's points are written before its checkpoint, not after it, and points that will be repeated are dropped if the logger
    can do so. (Lightning writes when all callbacks are done with the batch: a run that ends with its checkpoint would lose
    those points.)

    Args:
        loggers: builds them, given the ids with which they find a resumed run.
    """

    def __init__(self, loggers: Callable[[Identities], list[Logger]]) -> None:
        self._loggers = loggers
        self.writers: list[Writer] = []
        self._points: dict[str, float] = {}
        self._untrained: dict[str, float] = {}  # metrics of the validation before training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        kept = Path(trainer.default_root_dir) / IDENTITIES  # for a new run it has just been deleted
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        if trainer.is_global_zero:  # first and alone: a database must be created only once
            self._open(trainer, known)
            if (found := self._identities()) != known:
                write_text(kept, json.dumps(found) + "\n")
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            self._open(trainer, known)

    def _open(self, trainer: Trainer, known: Identities) -> None:
        try:
            trainer.loggers = self._loggers(known)
            self.writers = [writer_of(type(logger))(logger) for logger in trainer.loggers]
            for writer in writers(trainer):
                writer.open()
        except Exception as error:  # a server that does not answer, an account that is not known, …
            self.writers = []  # closing one that has not begun would make it begin
            raise UserError(f"trainer.logger could not begin: {first_line(error)}") from error

    def _identities(self) -> Identities:
        found: Identities = {}
        for writer in self.writers:
            if (identity := writer.identity()) is not None:
                found.setdefault(type(writer.logger).__name__, []).append(identity)
        return found

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What was written after the last checkpoint, or by a start without one, will be written again, so it is dropped. All
        # points of a step are: if only its validation is repeated, the checkpoint holds the others.
        owed = owes_validation(trainer)
        step = trainer.global_step
        for writer in writers(trainer):
            if writer.drop(step + bool(step and not owed)) and owed and self._points:
                writer.points(self._points, step)
            if step == 0 and self._untrained:
                writer.points(self._untrained, 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for writer in self.writers:
            writer.place = trainer.global_step
        compat.log_train_step_now(trainer)  # Lightning logs again later; nothing is written twice
        if self.stepped(trainer):
            step = None if compat.validation_follows(trainer) else trainer.global_step
            for writer in self.writers:
                writer.release(step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A validation within an accumulation measures the step before, but after that step's checkpoint: its points are held
        # and written with the next step, so that a run resumed from the checkpoint drops them. If the next step has its own
        # validation, that one wins: both would be at the same step.
        for writer in self.writers:
            writer.holding = not self.stepped(trainer) and not trainer.sanity_checking
            writer.place = trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking and is_whole(trainer):
            self._untrained = metrics(trainer, "val")
        for writer in self.writers:
            writer.holding = False  # its place stays, for the means over the epoch, which Lightning would put a batch earlier

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in self.writers:
            writer.place = None
            writer.release(trainer.global_step + 1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for writer in writers(trainer):
            writer.flush()
        if owes_validation(trainer):
            checkpoint["points"] = next((dict(writer.written) for writer in self.writers), {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._points = checkpoint.get("points", {})

    def close(self, trainer: Trainer, failed: bool) -> None:
        """Called when the process is done with the run, however it ended."""
        opened, self.writers = writers(trainer), []
        for writer in opened:
            writer.close(failed)
