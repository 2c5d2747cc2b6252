"""Checkpoints: written atomically; the two newest and the k best are kept.

A run's checkpoints/ holds last.ckpt (the newest), previous.ckpt (the one before it, in case the newest is damaged) and
best-STEP-METRIC.ckpt. runs/checkpoints.py finds them.
"""

import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from lit_linformer.callbacks.observing import HEADLINE, Stepping, at_max_steps
from lit_linformer.model.ranges import Count, Natural, OneOf, check_ranges
from lit_linformer.runs.checkpoints import unknown_classes, whole_step, write_checkpoint
from lit_linformer.runs.folder import BEST, remove, replace
from lit_linformer.runs.sharded import load_sharded
from lit_linformer.utils.compat import validation_follows
from lit_linformer.utils.errors import SettingError, UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes atomically: a kill or a full disk leaves the old file or the new one, complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None) -> None:
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None) -> dict:
        path = Path(path)
        return load_sharded(path) if path.is_dir() else torch.load(path, map_location="cpu", weights_only=True)


class LastCheckpoint(Stepping, Checkpoint):
    """Keeps last.ckpt, written after an optimiser step, and previous.ckpt, from an earlier step.

    Lightning's ModelCheckpoint may save in the middle of a gradient accumulation, from where no run resumes exactly. And a run
    that is saved between a step and its validation, and killed there, resumes without the validation, whose point is lost. Here
    such a checkpoint records that its validation is owed, that is, still to come; when the run resumes, callbacks/owed.py
    validates first, and last.ckpt is written again.

    Args:
        every_n_steps: optimiser steps between two checkpoints.
        validation: end training with a validation, even if trainer.val_check_interval does not ask for one there.
    """

    def __init__(self, every_n_steps: Count = 500, validation: bool = True):
        check_ranges("last.", LastCheckpoint.__init__, locals())
        self.every_n_steps, self.validation = every_n_steps, validation
        self._saved = (-1, False)  # last.ckpt's step, and whether it owes that step's validation
        self._due = False  # whether to save before and after the validation that follows
        self._settled = False
        self._loads = False  # whether a checkpoint of this run is known to load again
        self.owes_validation = False  # whether the validation of a checkpoint written now is still to come

    @property
    def saved_step(self) -> int:
        """The step of last.ckpt; before this run has written one, the step at which it started."""
        return self._saved[0]

    def state_dict(self) -> dict[str, Any]:
        return {"owes_validation": self.owes_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owes_validation = state_dict["owes_validation"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for part in (pl_module, trainer.datamodule):
            check_loadable(type(part).__name__, getattr(part, "hparams", {}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved, self._due = (trainer.global_step, self.owes_validation), self.owes_validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._settle(trainer)
        if self.passed(trainer, self.every_n_steps) or (self.stepped(trainer) and at_max_steps(trainer)):
            self._due = validation_follows(trainer)
            if not self._due:
                self.save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not at the end of the batch: only from a checkpoint saved here does Lightning resume as if the validation were over,
        # both within an epoch and at its end.
        if self._due and not self.owes_validation:
            self.save(trainer, owing=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.owes_validation = False  # before the best checkpoints are written, which include its point

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._due = False
            self._settle(trainer)  # for a run that resumed with the validation it owed
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer)  # for a run with no steps left

    def save(self, trainer: Trainer, owing: bool = False) -> None:
        """Writes last.ckpt, unless it is up to date; ``owing``: whether the validation of this step is still to come."""
        if trainer.fast_dev_run or (trainer.global_step, owing) == self._saved:
            return
        self.owes_validation = owing
        self._write(trainer)
        self._saved = trainer.global_step, owing

    def _write(self, trainer: Trainer) -> None:
        """Writes last.ckpt; the existing one becomes previous.ckpt, unless it is of the same step."""
        folder = Path(trainer.default_root_dir) / "checkpoints"
        new, last = folder / "new.ckpt", folder / "last.ckpt"
        # The old two stay until the new one is complete: after a fallback previous.ckpt may be the only good one. All
        # processes have then finished writing, since save_checkpoint ends with a barrier.
        trainer.save_checkpoint(new)
        if not self._loads:
            foreign = unknown_classes(new) if trainer.is_global_zero else []
            if foreign := trainer.strategy.broadcast(foreign):
                why = f"{new} holds {', '.join(foreign)}, which is not loaded again, since that may run code"
                raise UserError(why, "plain values, tensors, NumPy's and paths in what schedulers, callbacks and data keep")
            self._loads = True
        if trainer.is_global_zero:
            if last.exists() and trainer.global_step != self._saved[0]:
                replace(last, folder / "previous.ckpt")
            replace(new, last)
            for best in _best_callbacks(trainer):
                best.drop_beaten()
        trainer.strategy.barrier()

    def _settle(self, trainer: Trainer) -> None:
        """Removes from checkpoints/ what does not belong to the history that this run continues.

        This is done only after the first batch, so that a start that fails earlier deletes nothing.
        """
        if self._settled or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self._settled = True
        folder, resumed = Path(trainer.default_root_dir) / "checkpoints", Path(trainer.ckpt_path or "")
        new, last = folder / "new.ckpt", folder / "last.ckpt"
        if new.exists() and resumed.parent.resolve() == folder.resolve() and resumed.name == new.name:
            if whole_step(last) not in (None, whole_step(new)):  # not if it is the same step, before its validation
                replace(last, folder / "previous.ckpt")
            replace(new, last)
        if resumed.name == "previous.ckpt" and last.exists() and whole_step(last) is None:
            remove(last)  # or it would become previous.ckpt
        for left in [new, *folder.glob("*.ckpt.tmp")]:
            remove(left)
        for best in _best_callbacks(trainer):
            best.drop_others()


def check_loadable(name: str, kept: Mapping[str, Any]) -> None:
    """Raises UserError if save_hyperparameters() of the class ``name`` kept a value that cannot be loaded from a checkpoint."""
    for key, value in kept.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            what = f"{name}'s save_hyperparameters() keeps {key}, a {type(value).__name__}"
            raise UserError(what, f"plain values (dataclasses.asdict makes them), or ignore=['{key}']") from error


class MissingMetric(SettingError):
    of_all_processes = True  # the first one prints it


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, for runs that are killed and resumed: it keeps what is best in the run's history.

    A best checkpoint that was beaten is deleted only once last.ckpt no longer refers to it: a run that is killed before that
    resumes from a last.ckpt for which it is still the best. A metric that is not finite is never the best. Of a metric that
    each process has for itself the first one's number counts, as for result.json.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(enable_version_counter=False, **kwargs)
        self._beaten: list[str] = []

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        if current is None:
            return False
        # All processes decide alike, also about a metric that each has for itself.
        finite = trainer.strategy.reduce_boolean_decision(bool(torch.as_tensor(current).isfinite()))
        return finite and super().check_monitor_top_k(trainer, current)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        found = super()._monitor_candidates(trainer)
        if self.monitor in found:
            mine = found[self.monitor]  # Lightning would keep only what is best on all processes
            found[self.monitor] = mine.new_tensor(trainer.strategy.broadcast(mine.item()))
        return found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._check_monitors(trainer, type(pl_module).__name__)
        super().on_validation_end(trainer, pl_module)

    def _check_monitors(self, trainer: Trainer, module: str) -> None:
        """Raises MissingMetric if this callback or an EarlyStopping waits for a metric that validation does not log everywhere.

        Before training, this is certain for an EarlyStopping only if its metric is one of validation: others may be logged by
        training, and checked at the end of an epoch. If they are missing then, cli/failures.py says so.
        """
        # Before training Lightning has no metrics of several validation sets, and training's names are not known.
        if trainer.sanity_checking and isinstance(trainer.val_dataloaders, Sequence | Mapping):
            return
        known = [name for name in trainer.callback_metrics if not (trainer.sanity_checking and name.startswith("train"))]
        logged = ", ".join(known) or "a metric that it logs (there is none)"
        wanted = [("best.monitor", self.monitor)] if self.save_top_k else []
        stops = trainer.early_stopping_callbacks if trainer.sanity_checking else []
        wanted += [("EarlyStopping.monitor", one.monitor) for one in stops if one.strict]
        for setting, metric in wanted:
            here = metric in trainer.callback_metrics
            if trainer.strategy.reduce_boolean_decision(here) or (trainer.sanity_checking and not metric.startswith("val")):
                continue
            if trainer.strategy.reduce_boolean_decision(here, all=False):
                allowed = "a metric that all of them log: self.log without rank_zero_only"
                raise MissingMetric(setting, metric, allowed, more=f", which {module} does not log on all processes")
            if setting == "best.monitor":
                logged += ", with --best.monitor or as its `headline`; or --best.keep 0 for no best checkpoint"
            raise MissingMetric(setting, metric, logged, more=f", which {module} does not log in its validation")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the best checkpoints of the history, in the present folder, as far as they exist there."""
        scores = {os.path.join(self.dirpath, Path(path).name): score for path, score in state_dict["best_k_models"].items()}
        # One answer for all processes, or they would wait for each other at the next validation.
        gone = self._trainer.strategy.broadcast([path for path in scores if not Path(path).exists()])
        if gone and self._trainer.state.fn == "fit" and self._trainer.is_global_zero:
            there = "the best checkpoint so far, is not there; the best of what follows is kept"
            print(f"warning: {gone[0]}, {there}", file=sys.stderr, flush=True)
        ranked = sorted((path for path in scores if path not in gone), key=scores.get, reverse=self.mode == "max")
        self._beaten += ranked[self.save_top_k :]  # Lightning would never drop those of a start that kept more
        scores = {path: scores[path] for path in ranked[: self.save_top_k]}
        first, kth = next(iter(scores), ""), next(reversed(scores), "")
        found = {"dirpath": self.dirpath, "best_k_models": scores, "best_model_path": first}
        found |= {"best_model_score": scores.get(first), "kth_best_model_path": kth}
        super().load_state_dict(state_dict | found | {"kth_value": scores.get(kth, state_dict["kth_value"])})

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._beaten.append(filepath)

    def drop_beaten(self) -> None:
        """Deletes the beaten checkpoints; called on the first process, after last.ckpt was written."""
        kept = {Path(path).name for path in self.best_k_models}
        for path in self._beaten:
            if Path(path).name not in kept:
                remove(Path(path))
        self._beaten = []

    def drop_others(self) -> None:
        """Deletes checkpoints of steps to be repeated, and those beaten earlier; called on a resumed run's first process."""
        kept = {Path(path).name for path in [*self.best_k_models, *self._beaten]}
        for path in Path(self.dirpath).glob("best-*.ckpt"):
            if path.name not in kept and BEST.fullmatch(path.name):
                remove(path)


def _best_callbacks(trainer: Trainer) -> list[BestCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, BestCheckpoint)]


def best_of(model: type, monitor: str | None, mode: str | None) -> tuple[str, str]:
    """best.monitor and best.mode; if the user leaves them out, they are those of the headline metric of the model's class.

    For another metric the mode is min if it is a loss or a perplexity; otherwise SettingError asks for it.
    """
    name, _, _, better = getattr(model, "headline", HEADLINE)
    monitor = monitor or name
    if mode is None and monitor == name:
        mode = "max" if better is max else "min"
    if mode is None and ("loss" in monitor or "perplexity" in monitor):
        mode = "min"
    if mode is None:
        raise SettingError(
            "best.mode", None, "max where higher is better, min where lower is", when=f"with best.monitor {monitor}"
        )
    return monitor, mode


def best_checkpoint(
    monitor: str | None = None, mode: Annotated[str, OneOf(("min", "max"))] | None = None, keep: Natural = 1
) -> BestCheckpoint:
    """Keeps the checkpoints of the best validations.

    Args:
        monitor: the logged metric by which checkpoints are compared; None: the headline metric of the model's class.
        mode: min, or max if higher is better; None: that of the headline metric, and min for a loss or a perplexity.
        keep: number of best checkpoints to keep; 0 for none.
    """
    check_ranges("best.", best_checkpoint, locals())
    monitor, mode = best_of(LightningModule, monitor, mode)
    return BestCheckpoint(
        monitor=monitor,
        mode=mode,
        save_top_k=keep,
        filename=f"best-{{step:08d}}-{{{monitor}:.4f}}",
        auto_insert_metric_name=False,
        save_on_train_epoch_end=False,
    )
