"""Only one process at a time trains in a run folder, and a killed one leaves no lock."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lit_linformer.runs.lock import RunLock
from tests.cli.test_errors import complaint
from tests.helpers import fit

FORK = multiprocessing.get_context("fork")


def test_second_is_told_who_holds_it(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match=rf"is being trained by process {os.getpid()} on .*; allowed: another --name"):
        RunLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())
    RunLock(tmp_path).release()


def test_whoever_looks_for_an_instant_refuses_no_run(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on another\n")
    with open(tmp_path / ".lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        RunLock(tmp_path).release()


def hold(folder, ready, children):
    lock = RunLock(folder)
    for _ in range(children):  # as a DataLoader does
        FORK.Process(target=signal.pause).start()
    ready.send(lock.path.exists())
    signal.pause()


def test_a_killed_process_holds_nothing_though_its_workers_live(tmp_path):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=lambda: (os.setsid(), hold(tmp_path, theirs, children=2)))
    process.start()
    assert ours.recv()
    with pytest.raises(ValueError, match="is being trained by"):
        RunLock(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        RunLock(tmp_path).release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock(tmp_path).release()
    assert "lies on a file system without locks (No locks available)" in capsys.readouterr().err


class Others(Callback):
    """Starts other runs of the same name while this one trains."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def on_train_start(self, trainer, pl_module) -> None:
        folder = Path(trainer.default_root_dir)
        before = sorted(path.name for path in folder.rglob("*"))
        for number, extra in enumerate(([], ["--overwrite", "true"], ["--ckpt_path", "auto"], ["--ckpt_path", "last"])):
            place = folder.parent / f"other{number}"
            place.mkdir()
            line = complaint(["fit", *self.arguments, "--name", "live", *extra], place)
            assert f"name: {folder} is being trained by process {os.getpid()} on " in line
        assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.slow
def test_a_live_run_is_neither_joined_nor_overwritten(tiny, tmp_path):
    extra = ["--trainer.callbacks+", "tests.runs.test_lock.Others", "--trainer.callbacks.arguments", json.dumps(tiny)]
    assert fit(tiny, "live", tmp_path / "live", *extra) == 0
    assert not (tmp_path / "runs/live/.lock").exists()
