"""What a run of any LightningModule needs to resume exactly, and with the optimiser settings of the present start.

TrainingModule (tasks/base.py) does all of this itself, also in a user's own Trainer.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_linformer.callbacks.observing import callback_of, out_of_time, stopped_early
from lit_linformer.data.notes import note
from lit_linformer.runs.checkpoints import take_training_weights
from lit_linformer.tasks.base import batches_before, seeds_at
from lit_linformer.utils import compat
from lit_linformer.utils.errors import SettingError

Settings = dict[str, Any]  # a parameter group without its parameters
# Hooks of the module that Lightning calls after those of the callbacks, one of which writes the checkpoint: what they change,
# such as the weights of a teacher, would be missing from it.
OWN_HOOKS = ("on_train_batch_end", "on_validation_end")


class Resuming(Callback):
    """Seeds each batch, calls the module's hooks before a checkpoint is written, and applies changed optimiser settings.

    Lightning restores the optimiser's parameter groups as they were, with the learning rate that a scheduler had reached. If
    this start has another learning rate, the restored one and the schedule are multiplied by new / old; other settings are
    replaced.
    """

    def __init__(self) -> None:
        self._given: list[list[Settings]] = []  # a list for each optimiser, as made by configure_optimizers
        self._before: list[list[Settings]] = []  # the same for the start that wrote the checkpoint
        self._limits: dict[str, list[Any]] = {}  # of each EarlyStopping, besides its patience
        self._limits_before = self._limits
        self._seeded = -1  # the last epoch that was seeded
        self.owes_end = False  # of an epoch: the checkpoint was written after its last batch
        self._own: dict[str, Callable[..., None]] = {}  # the module's OWN_HOOKS

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "limits": self._limits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["given"]
        self._limits_before = state_dict.get("limits", {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and (weights := take_training_weights(checkpoint)):  # whether this run averages or not
            pl_module.load_state_dict(weights, strict=False)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stops = trainer.early_stopping_callbacks
        self._patience = [one.patience for one in stops]  # it, too, would be restored
        self._strict = [one.strict for one in stops]
        self._limits = {one.state_key: [one.stopping_threshold, one.divergence_threshold, one.check_finite] for one in stops}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before Lightning restores them
        if _schedules(trainer) and callback_of(trainer, LearningRateFinder) is not None:
            why = f", whose rate the schedule of {type(pl_module).__name__} would replace by its own"
            raise SettingError("trainer.callbacks", "LearningRateFinder", "`tune` with model.lr in its space", why)
        self._given = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._plans = [_plan(part) for part in _schedulers(trainer)]
        self._own = {name: getattr(pl_module, name) for name in OWN_HOOKS}
        for name in OWN_HOOKS:
            setattr(pl_module, name, _already_called)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name, hook in self._own.items():
            setattr(pl_module, name, hook)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # which Lightning leaves out then, but the module may be trained again

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for part, given in zip(_schedulers(trainer), self._plans, strict=True):
            for name, saved in _plan(part).items():
                if saved != given.get(name, saved):
                    kept = f"{type(part).__name__} goes on with the {name} of the checkpoint, {saved}"
                    note(f"{kept}, not with that of configure_optimizers, {given[name]}")
        schedules = _schedules(trainer)
        for optimizer, before, now in zip(trainer.optimizers, self._before, self._given, strict=False):
            mine = [one.base_lrs for one in schedules if one.optimizer is optimizer]
            for place, group in enumerate(optimizer.param_groups if len(before) == len(now) else ()):
                _change(group, before[place], now[place], place, mine)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for stopping, strict in zip(trainer.early_stopping_callbacks, self._strict, strict=True):
            stopping.strict = strict
        if (begun := trainer.current_epoch) != self._seeded:
            _seed(begun, 0)

    def restored(self, trainer: Trainer) -> None:
        """Called when everything in a checkpoint has been restored, and also for a new run.

        Next, Lightning asks the loader for its iterator, and a plain one shuffles with torch's random state. This is seeded
        here, the same on all processes: after a checkpoint from an epoch's end as for the next epoch, else as for the same one.
        """
        for stopping, patience in zip(trainer.early_stopping_callbacks, self._patience, strict=True):
            stopping.patience = patience
            stopping.strict &= not trainer.ckpt_path  # no checkpoint has what the epoch has logged, such as a mean
            if self._limits[stopping.state_key] != self._limits_before.get(stopping.state_key):
                stopping.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        trainer.should_stop = bool(stopped_early(trainer)) or out_of_time(trainer)  # a run that has ended stays ended
        if trainer.ckpt_path:
            trainer.num_sanity_val_steps = 0  # Lightning would validate once more after an epoch's end
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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # so that a validation that a resumed run owes draws the same numbers
            _seed(1 + batches_before(pl_module), 1 + trainer.global_rank, 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._own["on_validation_end"]()


def _already_called(*arguments: Any) -> None:
    """Stands in for a module's hook, which Resuming calls itself."""


def _begin_the_right_pass(trainer: Trainer) -> None:
    """Corrects the epoch of a run resumed after its end, which Lightning takes for an epoch's end even if it was within one.

    An epoch that has batches left continues. If it has none, the next one begins: with max_steps and max_epochs Lightning would
    run the same epoch again, in which nothing is left to do, and count one more.
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
    """Sets all random states as a function of the run's seed and a place in the run."""
    first, second, third = (int(seed) for seed in seeds_at(*place).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def _settings(group: dict[str, Any]) -> Settings:
    """A group's settings of types that can be loaded from a checkpoint; its parameters are left out."""
    return {name: value for name, value in group.items() if isinstance(value, bool | int | float | str | tuple | None)}


def _schedules(trainer: Trainer) -> list[Any]:
    """The schedulers that compute the learning rate from a base rate, as ReduceLROnPlateau does not."""
    return [part for part in _schedulers(trainer) if hasattr(part, "base_lrs")]


def _schedulers(trainer: Trainer) -> list[Any]:
    return [part for config in trainer.lr_scheduler_configs for part in _parts(config.scheduler)]


def _plan(scheduler: Any) -> dict[str, Any]:
    """What a scheduler was made with and keeps, such as T_max; a checkpoint restores it together with the position."""
    made_with = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
    found = {name: vars(scheduler)[name] for name in sorted(made_with & vars(scheduler).keys())}
    return {name: value for name, value in found.items() if isinstance(value, int | float | str | list | dict)}


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it consists of, if it is like SequentialLR."""
    yield scheduler
    for inner in (one for value in vars(scheduler).values() if isinstance(value, list) for one in value):
        if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
            yield from _parts(inner)


def _change(group: dict[str, Any], before: Settings, now: Settings, place: int, base_lrs: list[list[float]]) -> None:
    """Applies to a group, and to its schedulers' base rates, the settings that differ between two starts."""
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
