"""The cache folder: everything in it is made once, by one process, and appears complete or not at all.

An entry is a folder named after a fingerprint of all that shaped it. It is made as `NAME.tmp` under a lock, flushed to
the disk and renamed: a folder without `.tmp` is always complete, whatever was killed when. Work that takes hours keeps a
progress.json in its `NAME.tmp`, from which the next process continues.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import read_json

PROGRESS = "progress.json"
UNFINISHED = f"*-{'[0-9a-f]' * 16}.tmp"  # KIND-FINGERPRINT.tmp only, since a cache folder may hold other files, too
KEPT_DAYS = 14  # for an unfinished entry that nobody continues


def fingerprint(inputs) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a JSON-able description."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`; if it does not exist, `make(temporary folder)` fills it first.

    Other processes wait meanwhile; if the one that makes it fails or dies, the next one starts over, or continues from what
    `write_progress` has recorded in the temporary folder. SettingError if the cache cannot be written; an OSError about
    a file elsewhere, which `make` reads, is passed on.
    """
    if folder.is_dir():
        with suppress(OSError):  # the process that made it was killed right after the rename
            (folder / PROGRESS).unlink()
        return folder
    from filelock import FileLock, Timeout

    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{folder.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            print(f"{folder} is being made by another process: waiting for it", file=sys.stderr, flush=True)
            held = lock.acquire()
        with held:
            if not folder.is_dir():
                _remove_stale(cache)
                _make(folder, make)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        if _elsewhere(getattr(error, "filename", None), cache):
            raise  # a source that has vanished, say
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            "data.cache_dir",
            str(cache),
            "a folder with room that may be written to",
            more=f", where {folder.name} cannot be written ({reason})",
        ) from error
    return folder


def _elsewhere(name: object, cache: Path) -> bool:
    """Whether the file that an error names is neither in the cache nor one of its parent folders, which had to be made."""
    if not isinstance(name, str):
        return False
    path, cache = Path(name).resolve(), cache.resolve()
    return not (path.is_relative_to(cache) or cache.is_relative_to(path))


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp")
    if temporary.is_symlink() or not (temporary / PROGRESS).is_file():
        _remove(temporary)
    temporary.mkdir(exist_ok=True)
    try:
        make(temporary)
        for path in [*temporary.iterdir(), temporary]:
            _flush(path)
        os.rename(temporary, folder)
        (folder / PROGRESS).unlink(missing_ok=True)
        _flush(folder.parent)
    finally:
        if not (temporary / PROGRESS).is_file():
            _remove(temporary)


def _remove(temporary: Path) -> None:
    """Removes a file, a link or a folder, without following links."""
    if temporary.is_symlink() or temporary.is_file():
        temporary.unlink()
    else:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(cache: Path) -> None:
    """Removes what killed processes left half-made: temporary folders whose lock nobody holds."""
    from filelock import FileLock, Timeout

    for temporary in cache.glob(UNFINISHED):
        with suppress(OSError):
            recent = time.time() - (temporary / PROGRESS).stat().st_mtime < KEPT_DAYS * 86400
            if recent and not temporary.is_symlink():
                continue
        with suppress(Timeout, OSError), FileLock(temporary.with_suffix(".lock"), timeout=0):
            _remove(temporary)


def write_progress(folder: Path, progress: dict) -> None:
    """Records in a temporary folder how far its files are complete; they must have been flushed to the disk."""
    new = folder / f"{PROGRESS}.new"
    new.write_text(json.dumps(progress))
    _flush(new)
    os.replace(new, folder / PROGRESS)


def read_progress(folder: Path) -> dict | None:
    return read_json(folder / PROGRESS)


def read_whole(path: Path):
    """The content of a JSON file of the cache; ValueError if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise damaged(path, "it is not there") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise damaged(path, "it is no JSON") from error


def write_meta(folder: Path, meta: dict) -> None:
    """Writes an entry's meta.json: ``meta`` (counts, checksums, and what shaped the files) with a fingerprint of itself."""
    (folder / "meta.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}, indent=1))


def read_meta(folder: Path) -> dict:
    """What `write_meta` wrote; UserError if it has changed (an entry from before there were fingerprints is not checked)."""
    meta = read_whole(path := folder / "meta.json")
    if (told := meta.pop("fingerprint", None)) is not None and told != fingerprint(meta):
        raise damaged(path, "it is not what was written")
    return meta


def damaged(path: Path, what: str) -> UserError:
    """The error for a file of the cache that is not as it was made."""
    return UserError(f"{path} is damaged: {what}; delete the folder {path.parent}, it will be made again")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
