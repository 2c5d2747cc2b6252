"""Checkpoints on disk: whole at any moment, found by name."""

import multiprocessing
import os
import random
import signal
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

from lit_linformer.callbacks import AtomicCheckpointIO, best_of
from lit_linformer.callbacks.checkpoint import BestCheckpoint, check_loadable
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import check_checkpoint, find_checkpoint
from lit_linformer.tasks import MLM, SequenceClassification


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
            assert process.is_alive()
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


@pytest.mark.parametrize(
    ("model", "given", "found"),
    [
        (MLM, (None, None), ("val/perplexity", "min")),
        (SequenceClassification, (None, None), ("val/score", "max")),
        (SequenceClassification, ("val/loss", None), ("val/loss", "min")),
        (SequenceClassification, ("val/accuracy", "max"), ("val/accuracy", "max")),
        (LightningModule, (None, None), ("val/perplexity", "min")),
    ],
)
def test_what_is_best(model, given, found):
    assert best_of(model, *given) == found


def test_whether_more_is_better_is_asked_where_it_is_not_known():
    with pytest.raises(ValueError, match=r"^best.mode is null; allowed with best.monitor val/accuracy: max where higher"):
        best_of(SequenceClassification, "val/accuracy", None)


def test_what_no_checkpoint_is_loaded_with_is_refused():
    kept = {"texts": Path("texts"), "share": np.float32(0.5), "ids": np.arange(3)}
    check_loadable("Own", {"encoder": EncoderConfig(), "lr": 1e-3, "sizes": [1, 2], "none": None, **kept})
    for value in (Fraction(1, 2), SimpleNamespace(a=1), lambda: 1):
        with pytest.raises(ValueError, match=r"^Own's save_hyperparameters\(\) keeps odd, a \w+; allowed: plain values"):
            check_loadable("Own", {"lr": 1e-3, "odd": value})


@pytest.mark.parametrize(("mode", "order"), [("min", (1, 2, 3)), ("max", (3, 2, 1))])
def test_a_run_that_goes_on_knows_its_best_and_the_last_that_it_keeps(mode, order, tmp_path):
    path = {score: str(tmp_path / f"best-{score:08d}-{score}.0000.ckpt") for score in (2, 3, 1)}
    for file in path.values():
        Path(file).touch()
    best = BestCheckpoint(dirpath=tmp_path, monitor="val/score", mode=mode, save_top_k=2)
    best._trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda gone: gone))
    best.load_state_dict(best.state_dict() | {"best_k_models": {path[score]: torch.tensor(float(score)) for score in path}})
    first, second, third = (path[score] for score in order)
    assert (best.best_model_path, best.kth_best_model_path, best._beaten) == (first, second, [third])
    assert (best.best_model_score, best.kth_value) == order[:2]
