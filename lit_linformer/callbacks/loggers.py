"""Loggers: where each writes in the run's folder, and how it shows a figure, a table, a value against tokens.

TensorBoard, CSV, Weights & Biases and MLflow are Lightning's own classes; what this project adds to each is a Writer here. A
logger of your own is a subclass of Lightning's Logger. It gets every point through `log_metrics`, and figures and tables if it
has `log_image(key, images, step)` and `log_table(key, columns, data, step=step)`, as WandbLogger has.
"""

import csv
import importlib.util
import logging
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lit_linformer.callbacks.writer import Settings, Writer, markdown
from lit_linformer.utils.errors import UserError

PROJECT = "lit-linformer"  # name of the project or experiment, for loggers that have such a thing


class TensorBoard(Writer):
    """TensorBoard's page expands only the first two groups in alphabetical order: train and val, with loss and perplexity.

    So everything else is put into groups that come after these.
    """

    kind = TensorBoardLogger
    BEHIND = re.compile(r"(epoch$|train/(?=lr$)|throughput/)|(copy|spectrum|sweep)(?=/)")

    def __init__(self, logger: TensorBoardLogger) -> None:
        super().__init__(logger)
        self._by_tokens: Any = None
        log = self._write
        self._write = lambda metrics, step: log({self.tag(name): value for name, value in metrics.items()}, step)

    def tag(self, name: str) -> str:
        """watch/lr, watch/epoch, watch/tokens_per_second, watch_spectrum/…; other names stay as they are."""
        if not (found := self.BEHIND.match(name)):
            return name
        if found[2]:
            return f"watch_{name}"
        return f"watch/{name if found[1] == 'epoch' else name.removeprefix(found[1])}"

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        return _in(folder, given) | {"default_hp_metric": False}

    def drop(self, first: int) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=first, session_log=SessionLog(status=SessionLog.START))
        self.logger.experiment.file_writer.add_event(start)
        return True

    def figure(self, tag: str, figure: Any, step: int) -> None:
        self.logger.experiment.add_figure(self.tag(tag), figure, step)

    def table(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.logger.experiment.add_text(tag, markdown(columns, rows), step)

    def begin_against_tokens(self, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # In a folder of their own: TensorBoard drops points by step, and would drop those against tokens as well.
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
        beside = settings["save_dir"] == str(folder)  # its parent shows other runs, too, for comparison
        return f"tensorboard --logdir {shlex.quote(str(folder.parent if beside else settings['save_dir']))}"


class Table(Writer):
    """metrics.csv, with a row for everything that is logged at once; figures are in the run folder."""

    kind = CSVLogger
    NAME, BEFORE = "metrics.csv", "metrics-before.csv"

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        return _in(folder, given)

    def open(self) -> None:
        # Lightning begins by deleting an existing file. Set aside, it is there for the next start if this one is killed, too.
        table, before = (Path(self.logger.log_dir) / name for name in (self.NAME, self.BEFORE))
        if table.is_file() and not before.is_file():
            os.replace(table, before)

    def drop(self, first: int) -> bool:
        if (before := Path(self.logger.log_dir) / self.BEFORE).is_file():
            with open(before, newline="", encoding="utf-8") as file:
                # The last row of a killed start may be cut off, but it comes after the last checkpoint.
                whole = [row for row in csv.DictReader(file) if None not in row.values()]
            rows = [{name: value for name, value in row.items() if value} for row in whole]
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
            os.environ["WANDB_SILENT"] = "true"  # a screenful at start and end; `open` prints what matters
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
        # Lightning leaves this to the interpreter's exit, which a forked process never reaches.
        self.logger.experiment.finish(exit_code=int(failed))

    @classmethod
    def shown_by(cls, settings: Settings, folder: Path) -> str | None:
        return f"wandb sync {shlex.quote(str(settings['save_dir']))}/wandb/offline-run-*" if settings.get("offline") else None


class MLflow(Writer):
    """A database and a folder of files in the run folder, unless a server is given (tracking_uri, MLFLOW_TRACKING_URI)."""

    kind = MLFlowLogger
    packages = ("mlflow", "sqlalchemy", "alembic")
    STORE, FILES = "mlflow.db", "mlartifacts"

    @classmethod
    def settings(cls, given: Settings, folder: Path, name: str, earlier: str | None) -> Settings:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would send usage data to its developers
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        logging.getLogger(MLFlowLogger.__module__).setLevel(logging.ERROR)  # "not found. Creating it."
        given = _filled(given, experiment_name=("lightning_logs", PROJECT), run_name=(None, name), run_id=(None, earlier))
        if given.get("tracking_uri") is None and given.get("save_dir") in (None, "./mlruns"):
            # Instead of Lightning's default, a folder of files, which MLflow 3 refuses.
            given = given | {"tracking_uri": f"sqlite:///{folder / cls.STORE}"}
            given = _filled(given, artifact_location=(None, str((folder / cls.FILES).absolute())))
        return given

    def open(self) -> None:
        self.logger.experiment.update_run(self.logger.run_id, status="RUNNING")  # an earlier start may have finished or failed

    def identity(self) -> str | None:
        return self.logger.run_id

    def figure(self, tag: str, figure: Any, step: int) -> None:
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
    """The Writer for a logger class; ValueError, in one line, if a package that it needs is not installed."""
    found = next((writer for writer in WRITERS if issubclass(kind, writer.kind)), Writer)
    if missing := [name for name in found.packages if importlib.util.find_spec(name) is None]:
        what = f"trainer.logger is {kind.__name__}, for which the package {missing[0]} is not installed"
        raise UserError(what, "after `pip install -c constraints.txt -e '.[loggers]'`")
    return found


def writers(trainer: Trainer) -> list[Writer]:
    """The writers of a training run, on its first process; none elsewhere."""
    found = [callback.writers for callback in trainer.callbacks if hasattr(callback, "writers")]
    return found[0] if found and trainer.is_global_zero else []


def _in(folder: Path, given: Settings) -> Settings:
    """Sets the run folder for loggers that would otherwise make a new folder, version_0 and so on, at each start."""
    return given if given.get("save_dir") is not None else given | {"save_dir": str(folder), "name": "", "version": ""}


def _filled(given: Settings, **defaults: tuple[Any, Any]) -> Settings:
    """Replaces Lightning's defaults (the first of each pair) with ours (the second)."""
    return given | {name: ours for name, (lightnings, ours) in defaults.items() if given.get(name) == lightnings}
