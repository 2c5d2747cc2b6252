"""One process at a time trains in a run folder. The kernel releases the lock when that process ends, however it ends."""

import contextlib
import errno
import os
import socket
import sys
import time
import weakref
from pathlib import Path

from lit_linformer.utils.errors import UserError

with contextlib.suppress(ImportError):  # Windows, where models can be loaded but not trained, has none
    import fcntl

LOCK = ".lock"
# Errors of file systems without locks.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_held: weakref.WeakSet["RunLock"] = weakref.WeakSet()


class RunLock:
    """A lock on a run folder, held from construction until `release`.

    Args:
        folder: locked through a file in it, which names the holder.

    Raises ValueError, in one line, if another process holds it, and OSError if no file can be written.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._descriptor: int | None = None
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
                # The previous holder may have removed the file between our opening and locking it.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                        self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        _held.add(self)

    def _lock(self, descriptor: int) -> None:
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)  # perhaps `is_held` was looking, which takes an instant
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"name: {self.path.parent} is being trained by {holder}", "another --name, or to wait for its end"
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            print(
                f"warning: {self.path.parent} lies on a file system without locks ({error.strerror}): "
                "two runs of one name would go unnoticed",
                file=sys.stderr,
                flush=True,
            )

    def release(self) -> None:
        """Releases the lock and removes its file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.forget()

    def forget(self) -> None:
        """For forked processes: a DataLoader's worker that outlives the run must not hold its lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(folder: Path) -> bool:
    """Whether a process is training in that folder; always False on a file system without locks."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
