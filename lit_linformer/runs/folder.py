"""A run folder: its name, which of its files are this project's, and how a start of `fit` claims it.

    runs/NAME/
      run.json                     marks it as a run (older runs, without it, are recognised by their config.yaml)
      .lock                        while it trains
      config.yaml, tokenizer.json, perplexity.csv, result.json, …, events.out.tfevents.*
      metrics.csv, wandb/, mlflow.db, mlartifacts/   what loggers other than TensorBoard write, if enabled
      checkpoints/                 last.ckpt, previous.ckpt, best-STEP-METRIC.ckpt; a .tmp was left by a killed process

Only files with these names are ever deleted, and only in a folder that is a run. Anything else there stays.
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
PRUNED = "pruned.json"  # why `tune` ended this trial early
NAME = re.compile(r"\w[\w.,=+@-]*(/\w[\w.,=+@-]*)*")
RESULT, VALIDATE, TEST = "result.json", "validate.json", "test.json"
CURVES = PERPLEXITY, SCORES, CURVE = "perplexity.csv", "scores.csv", "curve.csv"
BEST = re.compile(r"best-(\d+)-(-?\d+\.\d+|nan|-?inf)(?:-v\d+)?\.ckpt")  # best-STEP-METRIC.ckpt
EVENTS = ("events.out.tfevents.*", "hparams.yaml")
# What a run writes, by subfolder.
OURS = {
    "": (
        MARKER, CONFIG, TOKENIZER, CONVERSION, RESULT, PRUNED, VALIDATE, TEST, *CURVES, *EVENTS,
        "predictions.jsonl", "spectrum.json", "validate_spectrum.json", "length_sweep.*", "validate_length_sweep.*",
        "copy_slices.csv", "validate_copy_slices.csv", "fit-profile*",
        "loggers.json", "metrics.csv", "metrics-before.csv", "mlflow.db*",
    ),
    "by_tokens": EVENTS,
    # Folders of loggers, with everything in them, whatever its name.
    "wandb": ("offline-run-*", "run-*", "latest-run", "debug*.log"),
    "mlartifacts": ("*",),
    "submission": ("*.tsv",),
    # The last one is Lightning's name, for a user's own ModelCheckpoint.
    "checkpoints": ("last.ckpt", "previous.ckpt", "new.ckpt", "best-*.ckpt", "epoch=*-step=*.ckpt"),
}  # fmt: skip
# What `validate`, `test` and `predict` write, and the temporary files that become these.
EVALUATED = (f"{VALIDATE}*", f"{TEST}*", "predictions.jsonl*", "validate_*", "*.tsv")
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
    """A name that `check_name` accepts, from a file's name: a - replaces each other character."""
    return re.sub(r"[^\w.,=+@-]", "-", text)


def is_run(folder: Path) -> bool:
    """Whether this project trained or converted a model there."""
    if (marker := read_json(folder / MARKER)) is not None:
        return marker.get("project") == PROJECT
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):  # older runs have no marker
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        expected = {"trainer", "model", "data"} | (set() if (folder / CONVERSION).is_file() else {"best", "last"})
        return isinstance(config, dict) and expected <= config.keys()
    return False


def write_marker(folder: Path, name: str | None = None) -> None:
    write_text(folder / MARKER, json.dumps({"project": PROJECT, "format": FORMAT, "name": name or folder.name}) + "\n")


def own_files(folder: Path) -> Iterator[Path]:
    """The contents of a run folder that have this project's names, except its lock."""
    for place, names in OURS.items():
        with contextlib.suppress(OSError):
            for path in sorted((folder / place).iterdir()):
                if any(fnmatch(path.name, form) for name in names for form in (name, f"{name}.tmp", f"{name}.*.tmp")):
                    if place in OF_LOGGERS and not path.is_symlink():
                        yield from sorted(path.rglob("*"), reverse=True)  # contents before their folder
                    yield path


def foreign_files(folder: Path) -> list[Path]:
    """Everything in a run folder that does not have this project's names."""
    ours, places = set(own_files(folder)), [folder / place for place in OURS]
    found = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    return [path for path in found if path not in ours and path not in places and path.name != LOCK]


def checkpoints(folder: Path) -> list[Path]:
    """All files (or, if sharded, folders) with a checkpoint's name, complete or not."""
    place = folder / "checkpoints"
    return [path for path in own_files(folder) if path.parent == place and path.suffix == ".ckpt"]


def remove(path: Path) -> None:
    """Removes a file, a link, or a sharded checkpoint; other files in such a folder stay."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for part in list(path.iterdir()):
        if any(fnmatch(part.name, form) for name in SHARDED for form in (name, f"{name}.tmp")) and not part.is_dir():
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()


def replace(source: Path, target: Path) -> None:
    """Renames a checkpoint, replacing another one; either may be a folder."""
    if target.is_dir():  # os.replace puts a folder over an empty folder only, a file over none
        remove(target)
    elif source.is_dir():
        target.unlink(missing_ok=True)
    os.replace(source, target)


def check_writable(folder: Path) -> None:
    """Raises UserError, before an evaluation that may take hours, for a folder into which its results cannot be written."""
    if not os.access(next(place for place in (folder, *folder.absolute().parents) if place.exists()), os.W_OK):
        begun = f", with --ckpt_path {folder}" if folder.is_dir() else ""
        allowed = f"a folder that is open to writing as --trainer.default_root_dir{begun}"
        raise UserError(f"name: cannot write the results into {folder}", allowed)


class Claim:
    """A start of `fit` in a run's folder: locked at once, changed only when training begins, released if it is refused.

    Raises ValueError, in one line, if another process trains there.
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
        """Prepares a run from the first step.

        Args:
            overwrite: whether existing files may be deleted.
            goes_on: with --ckpt_path auto: existing files, from which no run can resume, are from an earlier start of this run.

        Raises ValueError for a folder with a run in it, unless one of these is true, and for a folder with files that do not
        belong to a run.
        """
        # A .tmp is left by a start that was killed while it wrote the marker, TensorBoard's files by one of an earlier version,
        # which wrote those first.
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
        """Called when training begins: marks the folder as a run, and removes the earlier run or its half-written files."""
        write_marker(self.folder)  # first: if killed during what follows, the folder is still a run
        for path in self._before:
            if (self._clear and path.name != MARKER) or path.suffix == ".tmp":
                remove(path)

    def release(self) -> None:
        """Removes the lock and, if training never began, whatever this start has written.

        What an evaluation of the same run may have written meanwhile stays.
        """
        if self._marker() == self._marker_before:
            for path in set(own_files(self.folder)) - set(self._before):
                if not any(fnmatch(path.name, name) for name in EVALUATED):
                    remove(path)
            for place in filter(None, OURS):
                with contextlib.suppress(OSError):
                    (self.folder / place).rmdir()
        self.lock.release()
        if self._marker() is None:
            self._remove_empty()

    def _marker(self) -> tuple[int, int] | None:
        """Identifies the marker: if processes are forked for training, only the disk shows that it began."""
        try:
            found = (self.folder / MARKER).stat()
            return found.st_ino, found.st_mtime_ns
        except OSError:
            return None

    def _remove_empty(self) -> None:
        with contextlib.suppress(OSError):
            for place in self._made:
                place.rmdir()
