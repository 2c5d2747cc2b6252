"""A run's folder: its name, what in it is this project's, and how a start of `fit` takes it.

    runs/NAME/
      run.json                     says that this is a run (those from before it was written are known by their config.yaml)
      .lock                        while it trains
      config.yaml, tokenizer.json, perplexity.csv, result.json, …, events.out.tfevents.*
      metrics.csv, wandb/, mlflow.db, mlartifacts/   what other loggers than TensorBoard write, where they are asked for
      checkpoints/                 last.ckpt, previous.ckpt, best-STEP-METRIC.ckpt; a .tmp is one that a killed process began

Only what has one of these names is ever deleted, and only in a folder that is a run. Anything else there stays.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import yaml

from lit_linformer.runs.lock import LOCK, RunLock
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import read_json, write_text

PROJECT, FORMAT = "lit-linformer", 1
MARKER, CONFIG, TOKENIZER, CONVERSION = "run.json", "config.yaml", "tokenizer.json", "conversion.json"
PRUNED = "pruned.json"  # of a trial that `tune` ended early: why
NAME = re.compile(r"\w[\w.,=+@-]*(/\w[\w.,=+@-]*)*")
RESULT, VALIDATE, TEST = "result.json", "validate.json", "test.json"
CURVES = PERPLEXITY, SCORES, CURVE = "perplexity.csv", "scores.csv", "curve.csv"
BEST = re.compile(r"best-(\d+)-(-?\d+\.\d+|nan|-?inf)(?:-v\d+)?\.ckpt")  # best-STEP-METRIC.ckpt
EVENTS = ("events.out.tfevents.*", "hparams.yaml")
# What a run writes, by the folder that it lies in.
OURS = {
    "": (
        MARKER, CONFIG, TOKENIZER, CONVERSION, RESULT, PRUNED, VALIDATE, TEST, *CURVES, *EVENTS,
        "predictions.jsonl", "spectrum.json", "validate_spectrum.json", "length_sweep.*", "validate_length_sweep.*",
        "copy_slices.csv", "validate_copy_slices.csv", "fit-profile*",
        "loggers.json", "metrics.csv", "metrics-before.csv", "mlflow.db*",
    ),
    "by_tokens": EVENTS,
    # Folders of loggers, with all that is in them; names within are theirs.
    "wandb": ("offline-run-*", "run-*", "latest-run", "debug*.log"),
    "mlartifacts": ("*",),
    "submission": ("*.tsv",),
    # The last: Lightning's name, of a ModelCheckpoint of the user's own.
    "checkpoints": ("last.ckpt", "previous.ckpt", "new.ckpt", "best-*.ckpt", "epoch=*-step=*.ckpt"),
}  # fmt: skip
OF_LOGGERS = ("wandb", "mlartifacts")
SHARDED = ("__*.distcp", ".metadata", "meta.pt", "checksums.json")  # the files of a checkpoint that is a folder


def check_name(name: str) -> str:
    """The name of a run or of a grid; ValueError for one that would lead out of runs/."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingError(
            "name",
            name,
            "letters, digits and . _ - = + , @, starting with a letter or a digit, with / between folders of runs/",
        )
    return name


def as_name(text: str) -> str:
    """What `check_name` takes, of a file's name: a - for each other character."""
    return re.sub(r"[^\w.,=+@-]", "-", text)


def is_run(folder: Path) -> bool:
    """Whether this project trained, or put a converted model, there."""
    if (marker := read_json(folder / MARKER)) is not None:
        return marker.get("project") == PROJECT
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):  # from before there was a marker
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        expected = {"trainer", "model", "data"} | (set() if (folder / CONVERSION).is_file() else {"best", "last"})
        return isinstance(config, dict) and expected <= config.keys()
    return False


def write_marker(folder: Path, name: str | None = None) -> None:
    write_text(folder / MARKER, json.dumps({"project": PROJECT, "format": FORMAT, "name": name or folder.name}) + "\n")


def own_files(folder: Path) -> Iterator[Path]:
    """The contents of a run's folder under names that this project writes, its lock not counted."""
    for place, names in OURS.items():
        with contextlib.suppress(OSError):
            for path in sorted((folder / place).iterdir()):
                if any(fnmatch(path.name, form) for name in names for form in (name, f"{name}.tmp", f"{name}.*.tmp")):
                    if place in OF_LOGGERS and not path.is_symlink():
                        yield from sorted(path.rglob("*"), reverse=True)  # what a folder holds before the folder
                    yield path


def foreign_files(folder: Path) -> list[Path]:
    """Everything else there."""
    ours, places = set(own_files(folder)), [folder / place for place in OURS]
    found = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    return [path for path in found if path not in ours and path not in places and path.name != LOCK]


def checkpoints(folder: Path) -> list[Path]:
    """Whatever has a checkpoint's name there, whole or not."""
    place = folder / "checkpoints"
    return [path for path in own_files(folder) if path.parent == place and path.suffix == ".ckpt"]


def remove(path: Path) -> None:
    """A file, a link, or a sharded checkpoint; of a folder what is not a checkpoint's stays."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for part in list(path.iterdir()):
        if any(fnmatch(part.name, form) for name in SHARDED for form in (name, f"{name}.tmp")) and not part.is_dir():
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()


def replace(source: Path, target: Path) -> None:
    """Renames a checkpoint over another one, either of which may be a folder."""
    if target.is_dir():  # a folder takes the place of an empty folder only, and a file of none
        remove(target)
    elif source.is_dir():
        target.unlink(missing_ok=True)
    os.replace(source, target)


class Claim:
    """A start of `fit` in a run's folder: locked at once, changed only when training begins, released if it is refused.

    Raises ValueError, in one line, where another process trains there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._made = [place for place in (folder, *folder.parents) if not place.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(folder)
        except BaseException as error:
            self._remove_empty()
            if not isinstance(error, OSError):
                raise
            allowed = "a folder that is open to writing, see --name and --trainer.default_root_dir"
            raise UserError(f"name: cannot write into {folder} ({error.strerror or error})", allowed) from error
        self._before = list(own_files(folder))
        self._marker_before = self._marker()
        self._clear = False

    def start_anew(self, overwrite: bool, goes_on: bool) -> None:
        """To begin from the first step.

        Args:
            overwrite: what is there may go.
            goes_on: --ckpt_path auto: what is there, and nothing can continue from, is left of a start of this run.

        Raises ValueError for a folder with a run in it, unless told, and for one whose files are not this project's.
        """
        # TensorBoard's files come before the marker; a .tmp is what a start left that was killed before it had written that.
        held = [path for path in self._before if not any(fnmatch(path.name, name) for name in (*EVENTS, "*.tmp"))]
        if held and not is_run(self.folder):
            raise UserError(
                f"name: {self.folder} holds {held[0].relative_to(self.folder)}, but no run of this project",
                "another --name, for only runs are overwritten",
            )
        if checkpoints(self.folder) and not overwrite and not goes_on:
            raise UserError(
                f"name: {self.folder} already holds a run",
                "another --name, --ckpt_path auto to continue it, or --overwrite true",
            )
        self._clear = True

    def begin(self) -> None:
        """Training begins: the earlier run goes, or what was left half-written of it, and the folder says what it is."""
        write_marker(self.folder)  # first: killed in the midst of what follows, the folder still is a run
        for path in self._before:
            if (self._clear and path.name != MARKER) or path.suffix == ".tmp":
                remove(path)

    def release(self) -> None:
        """The lock goes; and, if training never began, whatever this start has written."""
        if self._marker() == self._marker_before:
            for path in set(own_files(self.folder)) - set(self._before):
                remove(path)
            for place in filter(None, OURS):
                with contextlib.suppress(OSError):
                    (self.folder / place).rmdir()
        self.lock.release()
        if self._marker() is None:
            self._remove_empty()

    def _marker(self) -> tuple[int, int] | None:
        """Which marker there is: with processes that are forked for training, only the disk shows that it began."""
        try:
            found = (self.folder / MARKER).stat()
            return found.st_ino, found.st_mtime_ns
        except OSError:
            return None

    def _remove_empty(self) -> None:
        with contextlib.suppress(OSError):
            for place in self._made:
                place.rmdir()
