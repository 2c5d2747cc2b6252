"""Checkpoints on disk: checked, and found by name in a run folder.

    last.ckpt                    the newest, and previous.ckpt, the one before it, in case the newest is damaged
    new.ckpt                     written just before the run was killed, and yet to become last.ckpt
    best-STEP-METRIC.ckpt        those of the best validations

callbacks/checkpoint.py decides when they are written.
"""

import contextlib
import functools
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from lit_linformer.model import EncoderConfig
from lit_linformer.model.registry import UnknownKind
from lit_linformer.runs.exported import is_exported
from lit_linformer.runs.folder import checkpoints, own_files, replace
from lit_linformer.runs.record import RunRecord
from lit_linformer.runs.sharded import META, check_sharded, is_sharded, load_sharded, verify_plain, verify_sharded
from lit_linformer.utils.errors import SettingError, UserError, first_line
from lit_linformer.utils.signals import is_first_process

# What torch.load raises for a file that is damaged or of another format.
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile)
OURS = "a checkpoint of this project"
# Keys if the weights are averages (callbacks/averaging.py): the training weights; and the averages, after the two were swapped.
TRAINING_WEIGHTS, AVERAGE = "training_weights", "average"
# What a user's own schedulers, callbacks and data keep besides plain values and tensors: NumPy's numbers and arrays, and paths.
# torch has to be told of them; none of them runs code when it is loaded.
NUMPY: list[Any] = [np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
NUMPY += {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
torch.serialization.add_safe_globals([*NUMPY, type(Path())])
INSTEAD = "--ckpt_path best, if that is whole, or to begin anew with --overwrite true"
FOREIGN = ", which holds other objects than weights and plain values: they are not loaded, since that may run code"


def take_training_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Training weights, if `Averaging` wrote any: they are put into state_dict, and the averages under AVERAGE, once."""
    weights: dict[str, Any] = checkpoint.get(TRAINING_WEIGHTS, {})
    if weights and AVERAGE not in checkpoint:
        checkpoint[AVERAGE] = {name: checkpoint["state_dict"][name] for name in weights}
        checkpoint["state_dict"] |= weights
    return weights


def check_checkpoint(path: Path, setting: str = "ckpt_path", whole: bool = True) -> dict[str, Any]:
    """The checkpoint, its tensors mapped from disk; ValueError, in one line, if it is missing, damaged or not a checkpoint.

    The tensors of a sharded checkpoint, which is a folder, are read into memory, unless ``whole`` is false.
    """
    if not path.exists():
        raise SettingError(setting, path, "a checkpoint file, 'last' or 'best'", more=", which is no file")
    sharded = path.is_dir()
    is_zip = sharded or zipfile.is_zipfile(path)
    try:
        if is_zip:  # first, since unpickling a flipped bit may raise anything, or name a foreign class
            _verify(path, *_states(path))
    except pickle.UnpicklingError as error:
        raise SettingError(setting, path, OURS, more=FOREIGN) from error
    except UNREADABLE as error:
        raise SettingError(
            setting, path, "another checkpoint", more=f", which is no longer what was written: {first_line(error)}"
        ) from error
    try:
        if sharded:
            checkpoint = load_sharded(path) if whole else check_sharded(path)
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise SettingError(setting, path, OURS, more=FOREIGN) from error
    except UNREADABLE as error:
        reason = first_line(error) if is_zip else "it is no whole zip file, which torch.save writes"
        raise UserError(f"{setting} is {path}, which is truncated or no checkpoint: {reason}") from error
    steps = checkpoint.get("global_step") if isinstance(checkpoint, dict) else None
    if not isinstance(steps, int) or ("state_dict" not in checkpoint and not sharded):
        raise SettingError(setting, path, OURS, more=", which holds no training state")
    return checkpoint


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes to a temporary file, syncs, then renames it; OSError, with the path, if that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # Closing its zip file after a failed write, torch raises a RuntimeError about positions in it.
        why = first_line(error.__context__ if isinstance(error.__context__, OSError) else error)
        raise OSError(f"cannot write the checkpoint {path}: {why}; those before it are intact") from error


def unknown_classes(path: Path) -> list[str]:
    """Classes in a checkpoint that would not be loaded; in a sharded one, outside of its tensors."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path / META if path.is_dir() else path))


def whole_step(path: Path) -> int | None:
    """The step of a checkpoint, if a run could resume from it; None: it could not."""
    try:
        return check_checkpoint(path, whole=False)["global_step"]
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)
def _verify(path: Path, *states: tuple[int, int]) -> None:
    """Verifies checksums, only once for each state of the file or folder, since this reads all of it."""
    if not path.is_dir():
        verify_plain(path)
    elif is_first_process():  # it decides which checkpoint is read; the others need not read everything, too
        verify_sharded(path)


def _states(path: Path) -> list[tuple[int, int]]:
    found = [os.stat(part) for part in ([path, *sorted(path.iterdir())] if path.is_dir() else [path])]
    return [(state.st_size, state.st_mtime_ns) for state in found]


def find_checkpoint(run_dir: Path, which: str) -> Path | None:
    """The run's checkpoint: ``last`` is the newest that is whole, ``best`` the one of the best validation."""
    return RunRecord(run_dir).best_checkpoint()[2] if which == "best" else _find_last(run_dir)


def best_or_last(run_dir: Path) -> Path | None:
    """The checkpoint to evaluate or start from: the best, or the last if there is no best."""
    return find_checkpoint(run_dir, "best") or find_checkpoint(run_dir, "last")


def _find_last(run_dir: Path) -> Path | None:
    """The whole checkpoint written last, not the one of the highest step: a run may have gone back to an earlier step."""
    found, unread = None, []
    for name in ("new", "last", "previous"):  # the newest first
        if not (path := run_dir / "checkpoints" / f"{name}.ckpt").exists():
            continue
        try:
            check_checkpoint(path, whole=False)
            found = path
            break
        except UserError as error:
            unread.append(error.what)
    for what in unread if is_first_process() else ():
        print(f"warning: {what}{'; falling back to the one before it' * bool(found)}", file=sys.stderr, flush=True)
    return found


def without(run_dir: Path, which: str = "last") -> str:
    """Why a run's folder has no such checkpoint, in words."""
    folder, names = f"{run_dir}/checkpoints", [path.name for path in checkpoints(run_dir)]
    if which == "last" and (unread := [name for name in names if name in ("last.ckpt", "previous.ckpt", "new.ckpt")]):
        return f"{folder}/{unread[0]} cannot be read{''.join(f', nor can {name}' for name in unread[1:])}"
    return f"{folder} holds none but {', '.join(names)}" if names else f"{folder} holds none"


def checkpoint_path(subcommand: str, asked: str | None, root: Path) -> str | None:
    """The file for ckpt_path: `last` and `best` are looked up in the run folder; evaluation without ckpt_path takes the best.

    If it is another run's folder, fit takes its last checkpoint, and evaluation its best. `auto` is `last` if there is one,
    else a start from the beginning. ValueError, in one line, if there is no such checkpoint.
    """
    fits = subcommand == "fit"
    if asked is None and fits:
        return None
    if asked == "auto" and not fits:
        raise SettingError("ckpt_path", asked, "best, last, a file", when=f"with {subcommand}")
    if asked is None:
        found = best_or_last(root)
        if found is None:
            allowed = "a file, a --name that has run, its --config runs/NAME/config.yaml, or --model.pretrained models/small"
            raise UserError(f"ckpt_path is not given and {without(root)}", allowed)
    elif asked in ("last", "best", "auto"):  # auto: for a job that a cluster starts again with the same command
        found = find_checkpoint(root, "best" if asked == "best" else "last")
        if found is None and asked == "auto":
            _check_nothing_is_lost(root)
            return None
        if found is None:
            allowed = f"a --name that has run{', or auto, which then starts anew' if fits else ''}"
            allowed = INSTEAD if fits and asked == "last" and _damaged(root) else allowed
            raise SettingError("ckpt_path", asked, allowed, more=f", but {without(root, asked)}")
    else:
        found = Path(asked)
        if (found / "checkpoints").is_dir():  # a run's folder
            found = (find_checkpoint(found, "last") if fits else best_or_last(found)) or found
        if not found.is_file() and not is_sharded(found):
            raise _no_checkpoint(found)
    check_checkpoint(found, whole=False)
    if (asked is None or found.parent.parent == Path(asked)) and is_first_process():
        print(f"checkpoint: {found}", flush=True)
    return str(found)


def _no_checkpoint(path: Path) -> SettingError:
    allowed, more = "a checkpoint file, the folder of a run, last, best", ", a folder without a checkpoint"
    if is_exported(path):
        allowed, more = f"{allowed}; or --model.pretrained {path}", ", an exported model"
    elif (path / "checkpoints").is_dir():
        more = f", but {without(path)}"
    return SettingError("ckpt_path", path, allowed, more=more if path.exists() else ", which is not there")


def _damaged(root: Path) -> list[str]:
    """Names of a folder's last checkpoints; for a folder in which none of them can be read."""
    return [path.name for path in checkpoints(root) if path.name in ("last.ckpt", "previous.ckpt")]


def _check_nothing_is_lost(root: Path) -> None:
    """Prints that the run starts anew; ValueError if there are only damaged checkpoints, which that would throw away."""
    if damaged := _damaged(root):
        raise UserError(f"ckpt_path is 'auto', but {root}/checkpoints holds no whole {' or '.join(damaged)}", INSTEAD)
    left = [path.name for path in checkpoints(root)]
    if is_first_process() and root.is_dir() and any(own_files(root)):
        there = f"no last.ckpt yet, only {', '.join(left)}" if left else "no checkpoint yet"
        print(f"{root} holds {there}: it starts anew", flush=True)


def lies_in(path: str | None, root: Path) -> bool:
    """Whether a checkpoint belongs to the run in ``root``."""
    return path is not None and Path(path).resolve().is_relative_to((root / "checkpoints").resolve())


def encoder_of(checkpoint: dict[str, Any], path: Path, setting: str) -> EncoderConfig:
    """The encoder's settings; ValueError, in one line, for a checkpoint that holds none, or invalid ones."""
    settings = checkpoint.get("hyper_parameters")
    encoder = settings.get("encoder") if isinstance(settings, dict) else None
    if not isinstance(encoder, dict):
        raise SettingError(setting, path, OURS, more=", which holds no encoder")
    return stored_encoder(encoder, path, setting)


def stored_encoder(settings: dict[str, Any], path: Path, setting: str) -> EncoderConfig:
    """An encoder's settings from a checkpoint or an exported folder; ValueError, in one line, if they are invalid here."""
    try:
        return EncoderConfig(**settings)
    except UnknownKind as error:  # a class of the user's own that this machine lacks
        raise UserError(f"{setting} is {path}, whose {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SettingError(
            setting,
            path,
            OURS,
            more=f", whose encoder has settings that none can have ({first_line(error)})",
        ) from error


def config_of(checkpoint: dict[str, Any], path: Path, setting: str) -> dict[str, Any]:
    """The run's config, as the checkpoint keeps it; empty if it keeps none, ValueError if it is not a config."""
    try:
        config = yaml.safe_load(checkpoint.get("config") or "{}")
    except (yaml.YAMLError, AttributeError, RecursionError, ValueError) as error:
        raise SettingError(setting, path, "a whole one", more=f", whose config is no YAML ({first_line(error)})") from error
    if not isinstance(config, dict) or not isinstance(config.get("data") or {}, dict):
        raise SettingError(setting, path, OURS, more=", whose config is no run's")
    return config


def carried_tokenizer(path: Path, setting: str) -> str:
    """The text of the tokenizer.json that a checkpoint carries; ValueError, in one line, for one that carries none."""
    text = check_checkpoint(path, setting, whole=False).get("tokenizer")
    if not isinstance(text, str):
        allowed = "a checkpoint that does, or the tokenizer.json in its run directory"
        raise SettingError(setting, path, allowed, more=", which carries no tokenizer")
    return text
