"""What Lightning would leave out: the validation after the last step, and the one, or the end of a pass, that a run owes when
it continues from a checkpoint that was written before it (callbacks/checkpoint.py)."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.observing import Stepping, at_max_steps, callback_of, owes_validation
from lit_linformer.callbacks.resuming import Resuming
from lit_linformer.utils import compat


class LastValidation(Stepping):
    """Training that ends between two validations ends with one, so that its best checkpoint and result know the last step.

    For Lightning it is a step after which a callback asks to stop: that one is validated in the ordinary place. Stands before
    the callbacks that ask whether a validation follows, and behind the Timer of trainer.max_time, which asks to stop after any
    batch: within an accumulation it has to wait for its step.

    Args:
        validates: false leaves it out (last.validation).
    """

    def __init__(self, validates: bool = True) -> None:
        self._validates, self._begun, self._asked = validates, False, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._begun:
            compat.count_step_before(trainer)
        self._begun = True
        super().on_train_batch_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._asked = self._asked or trainer.should_stop
        least = trainer.global_step >= (trainer.min_steps or 0) and trainer.current_epoch >= (trainer.min_epochs or 0)
        trainer.should_stop = self._asked and least and self.stepped(trainer)
        last_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if self._validates and (trainer.should_stop or at_max_steps(trainer) or last_epoch):
            trainer.should_stop = True
            if trainer.check_val_every_n_epoch is not None:
                trainer.check_val_every_n_epoch = 1  # of the epochs that are left, which is this one


class Owed(Callback):
    """What the step of the checkpoint still owes, before the next one, when all other callbacks have started: its validation,
    and, after the last batch of a pass, that pass's end."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if owes_validation(trainer):
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            compat.forget_validation(trainer)
            trainer.training = True
        if callback_of(trainer, Resuming).owes_end:
            compat.end_pass(trainer)


def finish(trainer: Trainer) -> None:
    """Of a run whose last step was done, but not its validation: Lightning ends it before it begins."""
    if owes_validation(trainer):
        trainer.fit_loop.on_run_start()
        trainer.fit_loop.on_run_end()
