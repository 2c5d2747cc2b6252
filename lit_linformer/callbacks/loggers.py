"""Loggers: where each writes in the run's folder, and how it shows a figure, a table, a value against tokens.

TensorBoard, CSV, Weights & Biases and MLflow are Lightning's own classes; what this project adds to each is a Writer here. A
logger of your own is a subclass of Lightning's Logger. It gets every point by `log_metrics`, and figures and tables where it
has `log_image(key, images, step)` and `log_table(key, columns, data, step=step)`, as WandbLogger has them.
"""

import csv
import importlib.util
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

PROJECT = "lit-linformer"  # what runs are filed under, where a logger has such a thing
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
        self.place: int | None = None  # where the points go, whatever Lightning says; below 0: nowhere
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
        if step is not None and step < 0:
            return
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
        """``figure``: matplotlib's, or none where that is not installed."""
        if hasattr(self.logger, "log_image") and figure is not None:
            self.logger.log_image(tag, [figure], step)

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if hasattr(self.logger, "log_table"):
            self.logger.log_table(f"{tag}_table", list(columns), [list(row) for row in rows], step=step)

    def begin_against_tokens(self, first: int) -> None:
        """Points from ``first`` tokens on, of an earlier start, are written again."""

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        # Not by `points`: the untrained model's is at the first step's place, too. Kept points belong to the next step.
        self._write({name: value, "tokens": tokens}, step + self.holding)

    def flush(self) -> None:
        self.logger.save()

    def close(self, failed: bool) -> None:
        """When the process is done with the run."""

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        """The command that shows the curves of the run in ``folder``, of a logger with these arguments."""
        return None


class TensorBoard(Writer):
    kind = TensorBoardLogger

    def __init__(self, logger: TensorBoardLogger) -> None:
        super().__init__(logger)
        self._by_tokens: Any = None

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        return _in(folder, given) | {"default_hp_metric": False}

    def drop(self, first: int) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=first, session_log=SessionLog(status=SessionLog.START))
        self.logger.experiment.file_writer.add_event(start)
        return True

    def figure(self, tag: str, figure: Any, step: int) -> None:
        if figure is not None:
            self.logger.experiment.add_figure(tag, figure, step)

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.logger.experiment.add_text(tag, markdown(columns, rows), step)

    def begin_against_tokens(self, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A folder of its own: TensorBoard drops points by step, and would drop those against tokens as well.
        self._by_tokens = SummaryWriter(os.path.join(self.logger.log_dir, "by_tokens"), purge_step=first)

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        if self._by_tokens is not None:
            self._by_tokens.add_scalar(name, value, tokens)
            self._by_tokens.flush()

    def flush(self) -> None:
        self.logger.experiment.flush()

    def close(self, failed: bool) -> None:
        if self._by_tokens is not None:
            self._by_tokens.close()

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        beside = settings["save_dir"] == str(folder)  # other runs, to be compared with
        return f"tensorboard --logdir {shlex.quote(str(folder.parent if beside else settings['save_dir']))}"


class Table(Writer):
    """metrics.csv, a row for all that is logged at once. Its figures are those in the run's folder."""

    kind = CSVLogger
    NAME, BEFORE = "metrics.csv", "metrics-before.csv"

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        return _in(folder, given)

    def open(self) -> None:
        # Lightning begins by deleting the file that is there. Where this start is killed, too, the next one finds it set aside.
        table, before = (Path(self.logger.log_dir) / name for name in (self.NAME, self.BEFORE))
        if table.is_file() and not before.is_file():
            os.replace(table, before)

    def drop(self, first: int) -> bool:
        if (before := Path(self.logger.log_dir) / self.BEFORE).is_file():
            with open(before, newline="", encoding="utf-8") as file:
                rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
            self.logger.experiment.metrics[:0] = [row for row in rows if int(row["step"]) < first]
            self.logger.save()
            before.unlink()
        return True


class WeightsAndBiases(Writer):
    kind = WandbLogger
    packages = ("wandb",)

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        ours = {"project": (None, PROJECT), "name": (None, name), "version": (None, earlier)}
        return _filled(given, save_dir=(".", str(folder)), **ours)

    def __init__(self, logger: WandbLogger) -> None:
        if not {"WANDB_QUIET", "WANDB_SILENT"} & os.environ.keys():
            os.environ["WANDB_SILENT"] = "true"  # a screen of lines at each end; below is what is needed of them
        super().__init__(logger)

    def open(self) -> None:
        if self.logger.experiment.url:
            print(f"Weights & Biases: {self.logger.experiment.url}", flush=True)

    def identity(self) -> str | None:
        return self.logger.experiment.id

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        self.logger.experiment.define_metric(name, step_metric="tokens")
        self.logger.experiment.log({name: value, "tokens": tokens})

    def close(self, failed: bool) -> None:
        # Lightning leaves it to the interpreter's end, to which a forked process never comes.
        self.logger.experiment.finish(exit_code=int(failed))

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        return f"wandb sync {shlex.quote(str(settings['save_dir']))}/wandb/offline-run-*" if settings.get("offline") else None


class MLflow(Writer):
    """A database and a folder of files in the run's folder, unless there is a server (tracking_uri, MLFLOW_TRACKING_URI)."""

    kind = MLFlowLogger
    packages = ("mlflow", "sqlalchemy", "alembic")
    STORE, FILES = "mlflow.db", "mlartifacts"

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report to its makers
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        logging.getLogger(MLFlowLogger.__module__).setLevel(logging.ERROR)  # "not found. Creating it."
        given = _filled(given, experiment_name=("lightning_logs", PROJECT), run_name=(None, name), run_id=(None, earlier))
        if given.get("tracking_uri") is None and given.get("save_dir") in (None, "./mlruns"):
            # Not Lightning's folder of files: MLflow 3 refuses it.
            given = given | {"tracking_uri": f"sqlite:///{folder / cls.STORE}"}
            given = _filled(given, artifact_location=(None, str((folder / cls.FILES).absolute())))
        return given

    def open(self) -> None:
        self.logger.experiment.update_run(self.logger.run_id, status="RUNNING")  # it may be finished, or failed

    def identity(self) -> str | None:
        return self.logger.run_id

    def figure(self, tag: str, figure: Any, step: int) -> None:
        if figure is not None:
            self.logger.experiment.log_figure(self.logger.run_id, figure, f"{tag}/step-{step:08d}.png")

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.logger.experiment.log_text(self.logger.run_id, markdown(columns, rows), f"{tag}/step-{step:08d}.md")

    def against_tokens(self, name: str, value: float, tokens: int, step: int) -> None:
        self.logger.experiment.log_metric(self.logger.run_id, name, value, step=tokens)

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        store = str(settings.get("tracking_uri"))
        return f"mlflow server --backend-store-uri {shlex.quote(store)}" if store.startswith("sqlite:") else None


WRITERS = (TensorBoard, Table, WeightsAndBiases, MLflow)


def writer_of(kind: type[Logger]) -> type[Writer]:
    """ValueError, in one line, where a package that the logger needs is not installed."""
    found = next((writer for writer in WRITERS if issubclass(kind, writer.kind)), Writer)
    if missing := [name for name in found.packages if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"trainer.logger is {kind.__name__}, for which the package {missing[0]} is not installed; allowed: after "
            "`pip install -c constraints.txt -e '.[loggers]'`"
        )
    return found


def writers(trainer: Trainer) -> list[Writer]:
    """Of a run that trains, for its first process; none elsewhere."""
    found = [callback.writers for callback in trainer.callbacks if hasattr(callback, "writers")]
    return found[0] if found and trainer.is_global_zero else []


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _in(folder: Path, given: Settings) -> Settings:
    """For loggers that would begin a folder of their own, version_0 and so on, with each start."""
    return given if given.get("save_dir") is not None else given | {"save_dir": str(folder), "name": "", "version": ""}


def _filled(given: Settings, **defaults: tuple[Any, Any]) -> Settings:
    """With ours, the second of two, where Lightning has its default, the first."""
    return given | {name: ours for name, (lightnings, ours) in defaults.items() if given.get(name) == lightnings}
