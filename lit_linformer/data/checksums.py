"""Checksums: whether a file of the cache still holds what was written to it, checked once on each machine.

A file has a CRC-32 for each of its shards, in the folder's meta.json: {"checksums": {"train.bin": [[bytes, CRC-32], …]}}.
Checking takes about a second for 2 GB (a core computes 2.6 GB/s; a disk is slower), so it is done when a machine first reads
the file, or as `data.verify` says, and recorded with the file's size, modification time and inode: a file that has changed
is checked again. The record is in ~/.cache/lit-linformer (or $LIT_LINFORMER_CACHE), under the machine's name, since home
folders and data may be on network file systems.
"""

import json
import os
import platform
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from lit_linformer.data.cache import damaged, make_once, read_meta
from lit_linformer.data.notes import note
from lit_linformer.data.progress_bar import Preparing
from lit_linformer.utils.files import read_json, write_text

VERIFY = ("once", "always", "never")
SHARD_BYTES = 50_000_000
CHUNK = 1 << 22
TOLD = 2_000_000_000  # bytes; checking more than this takes long enough to show progress


class ShardWriter:
    """A file that is written sequentially, with the checksums of its shards.

    shards: [bytes, CRC-32] of the shards that the file already has; what follows them in the file is cut off.
    """

    def __init__(self, path: Path, shards: list | None = None):
        self.shards = list(shards or [])
        self._open, self._checksum = 0, 0
        size = sum(size for size, _ in self.shards)
        self._file = open(path, "r+b" if size else "wb")
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, array: np.ndarray) -> None:
        data = array.data.cast("B") if array.size else b""
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._open += len(data)

    def end_shard(self, least: int = 1) -> None:
        """Ends the present shard if it has at least ``least`` bytes, and flushes it to the disk."""
        if self._open >= least:
            self.shards.append([self._open, self._checksum])
            self._open, self._checksum = 0, 0
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def verify(folder: Path, names: list[str], when: str) -> None:
    """Raises ValueError if one of these files does not hold what was written to it.

    when: "once": check only files that this machine has not checked, or that have changed since; "always"; "never".
    """
    if when == "never":
        return
    meta = read_meta(folder)
    if "checksums" not in meta:
        note(f"{folder} was made before there were checksums, and is not checked; delete it, and it is made again with them")
        return
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise damaged(folder / missing[0], "it is not there")
    record = _record(folder)
    shards = meta["checksums"]
    known = read_json(record) or {}
    todo = [name for name in names if when == "always" or known.get(name) != _stamp(folder / name)]
    total = sum((folder / name).stat().st_size for name in todo)
    try:
        with Preparing(f"Checking {folder}", show=total > TOLD) as shown:
            for name in todo:
                known.pop(name, None)
                stamp = _stamp(folder / name)
                _verify(folder / name, shards[name], lambda size: shown.update(size, shown.fraction + size / total))
                known[name] = stamp
    finally:
        if todo:
            _write(record, known)


def make_verified(folder: Path, make: Callable[[Path], None], names: list[str]) -> Path:
    """As `cache.make_once`, and records the files ``names`` as checked if this process has just made them."""
    made: list[Path] = []

    def make_and_tell(temporary: Path) -> None:
        make(temporary)
        made.append(temporary)

    make_once(folder, make_and_tell)
    if made:
        _write(_record(folder), {name: _stamp(folder / name) for name in names})
    return folder


def _verify(path: Path, shards: list, done: Callable[[int], None]) -> None:
    starts = np.cumsum([0, *(size for size, _ in shards)]).tolist()
    if path.stat().st_size != starts[-1]:
        raise damaged(path, f"it has {path.stat().st_size:,} bytes of {starts[-1]:,}")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        checksums = pool.map(lambda start, shard: _checksum(path, start, shard[0]), starts, shards)
        for number, ((size, expected), checksum) in enumerate(zip(shards, checksums, strict=True)):
            if checksum != expected:
                pool.shutdown(cancel_futures=True)
                start = starts[number]
                where = f"shard {number + 1} of {len(shards)}, bytes {start:,} to {start + size:,}"
                raise damaged(path, f"{where}, is not what was written")
            done(size)


def _checksum(path: Path, start: int, size: int) -> int:
    checksum, left = 0, size
    with open(path, "rb") as file:
        file.seek(start)
        while left and (data := file.read(min(CHUNK, left))):
            checksum, left = zlib.crc32(data, checksum), left - len(data)
    return checksum


# What this machine has checked


def _record(folder: Path) -> Path:
    own, users = os.environ.get("LIT_LINFORMER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(own) if own else (Path(users) if users else Path.home() / ".cache") / "lit-linformer"
    except RuntimeError:  # no home folder
        cache = Path(tempfile.gettempdir(), "lit-linformer")
    machine = "".join(c if c.isalnum() or c in "-_." else "_" for c in platform.node()) or "machine"
    place = zlib.crc32(str(folder.resolve()).encode(errors="surrogateescape"))
    return cache / "verified" / machine / f"{folder.name}-{place:08x}.json"


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _write(record: Path, known: dict) -> None:
    with suppress(OSError):  # a home that is not writable: the files are checked again next time
        write_text(record, json.dumps(known))
