"""How long training will still take: from its steps so far, without the first, which compiles, and the validations to come."""

from collections.abc import Callable

from lightning.pytorch import Trainer

WARM = 1  # first steps, which are not timed


class Pace:
    """The pace of one start of a run.

    Args:
        seconds: gives the time that training has taken so far; only differences count.
        total: the run's steps; None: it has no end.
        step: the last step done.
        validation: seconds that a validation takes; None: there was none yet.
    """

    def __init__(self, seconds: Callable[[], float], total: int | None, step: int, validation: float | None = None) -> None:
        self._seconds, self.total, self.first = seconds, total, step
        self._warm: tuple[float, int] | None = None
        self.validation = validation

    def stepped(self, step: int) -> None:
        if self._warm is None and step >= self.first + WARM:
            self._warm = self._seconds(), step

    def per_step(self, step: int) -> float | None:
        """Seconds per step; None before the second step."""
        if self._warm is None or step <= self._warm[1]:
            return None
        return (self._seconds() - self._warm[0]) / (step - self._warm[1])

    def validations(self, trainer: Trainer) -> int:
        """How many validations are still to come, including the one at the end."""
        if self.total is None or not trainer.enable_validation:
            return 0
        between = trainer.val_check_batch
        if between is None or between == float("inf"):  # by time, or at the end of epochs of unknown length
            return 1
        between *= trainer.check_val_every_n_epoch or 1
        done, end = (steps * trainer.accumulate_grad_batches for steps in (trainer.global_step, self.total))
        return end // between - done // between + (end % between > 0)

    def left(self, trainer: Trainer) -> float | None:
        """Seconds left; None: not known."""
        step = trainer.global_step
        each = self.per_step(step)
        if self.total is None or each is None:
            return None
        return each * (self.total - step) + (self.validation or 0.0) * self.validations(trainer)
