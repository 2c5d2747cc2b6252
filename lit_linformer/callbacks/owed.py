"""What Lightning would leave out: the validation after the last step, and what a resumed run "owes".

It owes a validation, or the end of an epoch, if its checkpoint was written just before that (callbacks/checkpoint.py).
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.observing import Stepping, at_max_steps, callback_of, owes_validation, unnoticed
from lit_linformer.callbacks.resuming import Resuming
from lit_linformer.utils import compat


class LastValidation(Stepping):
    """Ends training with a validation, even if none is due then, so that best checkpoint and result include the last step.

    It asks Lightning to stop after the last step, which is then validated in the usual place. It comes before the callbacks
    that ask whether a validation follows, and after the Timer of trainer.max_time, which asks to stop after any batch: within
    an accumulation that request has to wait for the step.

    Args:
        validates: whether to validate (last.validation).
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
                trainer.check_val_every_n_epoch = 1  # for the epochs left, which is only this one


class Owed(Callback):
    """Before the first step, and after all other callbacks have started, runs what the checkpoint's step still owes.

    This is its validation and, if its batch was the last one of an epoch, the end of that epoch.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if owes_validation(trainer):
            trainer.validating = True
            with unnoticed(pl_module):  # a shuffled loader draws its order only with the pass's first batch, which comes next
                trainer.fit_loop.epoch_loop.val_loop.run()
            compat.forget_validation(trainer)
            trainer.training = True
        resuming = callback_of(trainer, Resuming)  # without it no checkpoint says that it owes an end
        if resuming is not None and resuming.owes_end:
            compat.end_pass(trainer)


def finish(trainer: Trainer) -> None:
    """Validates the last step of a resumed run that owes only that: Lightning would end such a run before it begins."""
    if owes_validation(trainer):
        trainer.fit_loop.on_run_start()
        trainer.fit_loop.on_run_end()
