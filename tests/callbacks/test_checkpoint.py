"""Checkpoints on disk: whole at any moment, found by name."""

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from lit_linformer.callbacks import AtomicCheckpointIO
from lit_linformer.runs.checkpoints import check_checkpoint, find_checkpoint


def save_for_ever(path):
    for step in range(10_000):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.full((500_000,), step)}, "global_step": step}, path)


def test_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "last.ckpt"
    draw = random.Random(0)
    for _ in range(12):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.03 + 0.05 * draw.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        checkpoint = torch.load(path, weights_only=True)
        assert (checkpoint["state_dict"]["w"] == checkpoint["global_step"]).all()


def write(folder, name, step=1):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "global_step": step}, folder / name)
    return folder / name


def test_best_is_the_lowest_perplexity_not_the_newest(tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, "best-00000100-45.2000.ckpt")
    expected = write(folder, "best-00000200-9.8000.ckpt")
    write(folder, "best-00000300-10.1000.ckpt")
    assert find_checkpoint(tmp_path, "best") == expected


def test_last_falls_back_and_is_none_without_any(tmp_path, capsys):
    assert find_checkpoint(tmp_path, "last") is None
    previous, last = write(tmp_path / "checkpoints", "previous.ckpt"), write(tmp_path / "checkpoints", "last.ckpt")
    assert find_checkpoint(tmp_path, "last") == last
    last.write_bytes(last.read_bytes()[:-100])
    assert find_checkpoint(tmp_path, "last") == previous
    assert "last.ckpt, which is truncated or no checkpoint" in capsys.readouterr().err


def test_pickled_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "global_step": 1, "extra": Evil()}, path)
    with pytest.raises(ValueError, match="holds other objects than weights"):
        check_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the checkpoint"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "file" / "last.ckpt")
