"""The validation that a run owes when it continues from a checkpoint that was written before it (callbacks/checkpoint.py)."""

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.observing import owes_validation


class OwedValidation(Callback):
    """Runs it before the next step, when all other callbacks have started."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if owes_validation(trainer):
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True


def finish(trainer: Trainer) -> None:
    """Of a run whose last step was done, but not its validation: Lightning ends it before it begins."""
    if owes_validation(trainer):
        trainer.fit_loop.on_run_start()
        trainer.fit_loop.on_run_end()
