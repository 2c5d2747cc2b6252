"""What a run of any LightningModule needs to go on as it would have, and with the optimiser's settings that it is given now.

TrainingModule (tasks/base.py) does all of it by itself, in a Trainer of one's own too.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_linformer.callbacks.observing import out_of_time, stopped_early
from lit_linformer.runs.checkpoints import take_training_weights
from lit_linformer.tasks.base import batches_before, seeds_at
from lit_linformer.utils import compat

Settings = dict[str, Any]  # of a parameter group, but for its parameters
# Hooks of the module that Lightning calls after the callbacks', one of which writes the checkpoint: what they change, the
# weights of a teacher say, would be in the next one.
OWN_HOOKS = ("on_train_batch_end", "on_validation_end")


class Resuming(Callback):
    """Seeds each batch, calls the module's hooks before a checkpoint is written, and gives a restored optimiser those of its
    settings that have changed.

    Lightning restores the optimiser's groups as they were, with the rate that a scheduler had made of the earlier start's.
    Where this start is given another rate, rate and schedule are multiplied by new / old; other settings are replaced.
    """

    def __init__(self) -> None:
        self._given: list[list[Settings]] = []  # a list an optimiser, as configure_optimizers has made it
        self._before: list[list[Settings]] = []  # the same of the start that wrote the checkpoint
        self._limits: dict[str, list[Any]] = {}  # of each EarlyStopping, whatever its patience
        self._limits_before = self._limits
        self._seeded = -1  # the pass for which that is done
        self.owes_end = False  # of a pass, after whose last batch the checkpoint was written
        self._own: dict[str, Callable[..., None]] = {}  # the module's OWN_HOOKS

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "limits": self._limits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["given"]
        self._limits_before = state_dict.get("limits", {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and (weights := take_training_weights(checkpoint)):  # whether it still averages or not
            pl_module.load_state_dict(weights, strict=False)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stops = trainer.early_stopping_callbacks
        self._patience = [one.patience for one in stops]  # it, too, would be restored
        self._strict = [one.strict for one in stops]
        self._limits = {one.state_key: [one.stopping_threshold, one.divergence_threshold, one.check_finite] for one in stops}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before Lightning restores them
        self._given = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._own = {name: getattr(pl_module, name) for name in OWN_HOOKS}
        for name in OWN_HOOKS:
            setattr(pl_module, name, _already_called)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name, hook in self._own.items():
            setattr(pl_module, name, hook)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = [part for config in trainer.lr_scheduler_configs for part in _parts(config.scheduler)]
        for optimizer, before, now in zip(trainer.optimizers, self._before, self._given, strict=False):
            mine = [part.base_lrs for part in parts if part.optimizer is optimizer and hasattr(part, "base_lrs")]
            for place, group in enumerate(optimizer.param_groups if len(before) == len(now) else ()):
                _change(group, before[place], now[place], place, mine)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for stopping, strict in zip(trainer.early_stopping_callbacks, self._strict, strict=True):
            stopping.strict = strict
        if (begun := trainer.current_epoch) != self._seeded:
            _seed(begun, 0)

    def restored(self, trainer: Trainer) -> None:
        """When all that a checkpoint holds is in its place; of a run that begins, too.

        Now Lightning asks the loader for its iterator, and a plain one shuffles by what torch draws, on all processes alike.
        Of a checkpoint written at a pass's end it is the next pass's, of one within a pass the same once more.
        """
        for stopping, patience in zip(trainer.early_stopping_callbacks, self._patience, strict=True):
            stopping.patience = patience
            stopping.strict &= not trainer.ckpt_path  # what the pass has logged so far, a mean of it say, is in no checkpoint
            if self._limits[stopping.state_key] != self._limits_before.get(stopping.state_key):
                stopping.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        trainer.should_stop = bool(stopped_early(trainer)) or out_of_time(trainer)  # stays ended
        if trainer.ckpt_path:
            trainer.num_sanity_val_steps = 0  # Lightning would validate once more after a pass's end
        _begin_the_right_pass(trainer)
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if batches.is_last_batch and batches.current.completed < batches.current.ready:
            batches.increment_completed()
            self.owes_end = True  # callbacks/owed.py
        self._seeded = trainer.fit_loop.epoch_progress.current.processed + self.owes_end
        _seed(self._seeded, 0)
        compat.restore_loaders(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        _seed(1 + batches_before(pl_module), 1 + trainer.global_rank)  # a TrainingModule then seeds torch once more

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        self._own["on_train_batch_end"](*arguments)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._own["on_validation_end"]()


def _already_called(*arguments: Any) -> None:
    """By Resuming, in the module's place."""


def _begin_the_right_pass(trainer: Trainer) -> None:
    """Of a run that goes on after its end, which Lightning counts as the end of a pass, wherever in one it was.

    A pass with batches left goes on. One without any has a next one: with max_steps and max_epochs Lightning would do the same
    pass again, which has nothing to do, and count one more.
    """
    progress, batches = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
    ended = progress.current.ready == progress.current.processed and batches.current.ready
    if not (trainer.ckpt_path and ended):
        return
    if batches.is_last_batch:
        compat.begin_next_pass(trainer)
        return
    for counts in (progress.current, progress.total):
        counts.processed -= 1
        counts.completed = min(counts.completed, counts.processed)
    trainer.fit_loop.restarting = True


def _seed(*place: int) -> None:
    """All random states, as a function of the run's seed and a place in it."""
    first, second, third = (int(seed) for seed in seeds_at(*place).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def _settings(group: dict[str, Any]) -> Settings:
    """What checkpoints are loaded with."""
    return {name: value for name, value in group.items() if isinstance(value, bool | int | float | str | tuple | None)}


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those of which it is made, as SequentialLR is."""
    yield scheduler
    for inner in (one for value in vars(scheduler).values() if isinstance(value, list) for one in value):
        if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
            yield from _parts(inner)


def _change(group: dict[str, Any], before: Settings, now: Settings, place: int, base_lrs: list[list[float]]) -> None:
    """Makes what differs between two starts differ in a group, and in the rates that its schedulers go by."""
    old, new = before.get("initial_lr", before.get("lr")), now.get("initial_lr", now.get("lr"))
    for name in now.keys() - {"lr", "initial_lr"}:
        if now[name] != before.get(name, now[name]):
            group[name] = now[name]
    if old == new or not old:
        return
    group["lr"] = new * (group["lr"] / old)
    if "initial_lr" in group:
        group["initial_lr"] = new
    for rates in base_lrs:
        rates[place] = new * (rates[place] / old)
