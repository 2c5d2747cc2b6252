"""The link between training and one logger: each metric has one point per step, held back, written or dropped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import Logger
from torch import Tensor

from lit_linformer.utils.markdown import of_words

Settings = dict[str, Any]


class Writer:
    """The link between training and one logger. A metric has one point per step: the first.

    Args:
        logger: Lightning's; its log_metrics is replaced, so that Lightning's points pass through here, too.
    """

    kind: ClassVar[type[Logger]] = Logger
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.place: int | None = None  # step at which points are written, whatever Lightning says
        self.holding = False  # points are held back, and written later
        self._held: dict[str, Any] = {}
        self._step, self.written = -1, {}  # the latest step and its points
        self._write, logger.log_metrics = logger.log_metrics, self.points

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        """The logger's arguments, completed so that it writes into the run folder, under the run's name.

        Args:
            given: its arguments as parsed, Lightning's defaults included.
            folder: the run folder.
            name: the run's name.
            earlier: the ``identity`` of a resumed run; None: a new run.
        """
        return given | {"save_dir": str(folder)} if "save_dir" in given and given["save_dir"] is None else dict(given)

    def points(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if not all(isinstance(value, int | float | Tensor) for value in metrics.values()):
            self._write(metrics, step)  # WandbLogger sends its images and tables this way
            return
        if self.holding:
            self._held = dict(metrics) | self._held
            return
        step = step if self.place is None else self.place
        if step != self._step:
            self._step, self.written = step, {}
        if new := {name: float(value) for name, value in metrics.items() if name not in self.written}:
            self.written.update(new)
            self._write(new, step)

    def release(self, step: int | None) -> None:
        """Writes the points held back; step None: drops them."""
        held, self._held = self._held, {}
        if held and step is not None:
            self.points(held, step)

    def open(self) -> None:
        """Called on the first process before anything is written, in a new run and in a resumed one."""

    def drop(self, first: int) -> bool:
        """Drops an earlier start's points from step ``first`` on, since they will be written again; returns whether it could.

        Otherwise these points appear twice, at the same step.
        """
        return False

    def identity(self) -> str | None:
        """The id with which the logger finds this run again on resuming; None: the folder is enough."""
        return None

    def figure(self, tag: str, figure: Any, step: int) -> None:
        """Writes a matplotlib figure, if the logger can."""
        if hasattr(self.logger, "log_image"):
            self.logger.log_image(tag, [figure], step)

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if hasattr(self.logger, "log_table"):
            self.logger.log_table(f"{tag}_table", list(columns), [list(row) for row in rows], step=step)

    def begin_against_tokens(self, first: int) -> None:
        """Called when training begins; points that an earlier start wrote from ``first`` tokens on will be written again."""

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        # Not through `points`, which writes all points of a step at that step. Points held back belong to the next step.
        self._write({name: value, "tokens": tokens}, step + self.holding)

    def flush(self) -> None:
        self.logger.save()

    def close(self, failed: bool) -> None:
        """Called when the process is done with the run."""

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        """The command that shows the curves of the run in ``folder``, for a logger with these arguments."""
        return None


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return of_words([columns, *rows], right=True, words=1)
