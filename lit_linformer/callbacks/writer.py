"""The link between training and one logger: each metric has one point at a step, kept, dropped or written as a run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import Logger
from torch import Tensor

from lit_linformer.utils.markdown import of_words

Settings = dict[str, Any]


class Writer:
    """The link between training and one logger. A metric has one point at a step: the first.

    Args:
        logger: its log_metrics is taken over, so that Lightning's points come through here, too.
    """

    kind: ClassVar[type[Logger]] = Logger
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.place: int | None = None  # where the points go, whatever Lightning says
        self.holding = False  # what is logged is kept, and written later
        self._held: dict[str, Any] = {}
        self._step, self.written = -1, {}  # the latest step and its points
        self._write, logger.log_metrics = logger.log_metrics, self.points

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        """The logger's arguments, with what the user left out: it writes into the run's folder, under the run's name.

        Args:
            given: as they were parsed, Lightning's defaults included.
            earlier: the ``identity`` that a resumed run had before; None: it begins.
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
        """Writes what was kept; None: drops it."""
        held, self._held = self._held, {}
        if held and step is not None:
            self.points(held, step)

    def open(self) -> None:
        """For the first process, before anything is written; the run may have begun in an earlier start."""

    def drop(self, first: int) -> bool:
        """Points from step ``first`` on, of an earlier start, are written again; whether they have been dropped.

        Where they cannot be dropped, they are there twice, at the same place.
        """
        return False

    def identity(self) -> str | None:
        """How the logger finds this run again when it resumes; None where a folder is enough."""
        return None

    def figure(self, tag: str, figure: Any, step: int) -> None:
        """``figure``: matplotlib's."""
        if hasattr(self.logger, "log_image"):
            self.logger.log_image(tag, [figure], step)

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if hasattr(self.logger, "log_table"):
            self.logger.log_table(f"{tag}_table", list(columns), [list(row) for row in rows], step=step)

    def begin_against_tokens(self, first: int) -> None:
        """Points from ``first`` tokens on, of an earlier start, are written again."""

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        # Not by `points`, which has one place for all of a step's. Kept points belong to the next step.
        self._write({name: value, "tokens": tokens}, step + self.holding)

    def flush(self) -> None:
        self.logger.save()

    def close(self, failed: bool) -> None:
        """When the process is done with the run."""

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        """The command that shows the curves of the run in ``folder``, of a logger with these arguments."""
        return None


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return of_words([columns, *rows], right=True, words=1)
