"""TensorBoard's curves, as right as perplexity.csv: every point that a checkpoint stands for, and none of them twice."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_linformer.callbacks.observing import owes_validation, tensorboard, validation_follows


class CurveLogger(TensorBoardLogger):
    """Lightning's, but a metric has one point at a step: the first. Its file begins with training.

    Lightning opens it before model and data have said whether they fit: of a fit that is refused TensorBoard would show an
    empty run.
    """

    begun = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.place: int | None = None  # where the points stand, whatever Lightning says; below 0: nowhere
        self.holding = False  # what is logged is kept, and written later
        self._held: dict[str, Any] = {}
        self._step, self.written = -1, {}  # the latest step and its points

    @property
    def experiment(self) -> Any:
        if not self.begun:
            raise AttributeError("experiment: there is none before training begins")
        return super().experiment

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.holding:
            self._held = dict(metrics) | self._held
            return
        step = step if self.place is None else self.place
        if step is not None and step < 0:
            return
        if step != self._step:
            self._step, self.written = step, {}
        new = {name: float(value) for name, value in metrics.items() if name not in self.written}
        self.written.update(new)
        super().log_metrics(new, step)

    def release(self, step: int | None) -> None:
        """Writes what was kept; None: drops it."""
        held, self._held = self._held, {}
        if held and step is not None:
            self.log_metrics(held, step)


class Curves(Callback):
    """Writes a step's points before its checkpoint, not after it, and has TensorBoard drop those that are done again.

    Lightning writes them when all callbacks are done with the batch: a run that ends with its checkpoint would lose them.
    TensorBoard drops all points of a step: where only the step's validation is done again, the others are in the checkpoint.
    """

    def __init__(self) -> None:
        self._points: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CurveLogger):
                logger.begun = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What was written after the last checkpoint, or by a start that came to none, is written again.
        if (found := tensorboard(trainer)) is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            logger, place = found
            first = place if owes_validation(trainer) else trainer.global_step
            start = Event(step=first, session_log=SessionLog(status=SessionLog.START))
            logger.experiment.file_writer.add_event(start)
            if owes_validation(trainer) and self._points:
                logger.log_metrics(self._points, place)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if all(isinstance(logger, CurveLogger) for logger in trainer.loggers):  # another one would have them twice
            trainer._logger_connector.update_train_step_metrics()
        if not _within_accumulation(trainer):
            step = None if validation_follows(trainer) else trainer.global_step - 1
            for logger in _own(trainer):
                logger.release(step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One within an accumulation measures the step before, but comes after the checkpoint of that: it is a point of the next
        # step, written with that, so that a run that goes on from the checkpoint drops it. A validation after that step comes
        # first: it would stand at the same place.
        for logger in _own(trainer):
            logger.holding = _within_accumulation(trainer) and not trainer.sanity_checking
            logger.place = trainer.global_step - 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in _own(trainer):
            logger.holding, logger.place = False, None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in _own(trainer):
            logger.release(trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if (found := tensorboard(trainer)) is not None:
            found[0].experiment.flush()
        if owes_validation(trainer):
            checkpoint["points"] = next((dict(logger.written) for logger in _own(trainer)), {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._points = checkpoint.get("points", {})


def _own(trainer: Trainer) -> list[CurveLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, CurveLogger)]


def _within_accumulation(trainer: Trainer) -> bool:
    return trainer.fit_loop.epoch_loop._should_accumulate()
