"""Shared by many tests: a tiny config, a corpus, and running commands in a forked process."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.utils.files import read_rows

# Seconds after which a process started by a test counts as hung: long, so that no test fails on a slow or busy machine.
HANGS = 1200.0

TINY = """
seed_everything: 3
name: tiny
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 12
  val_check_interval: 7
  check_val_every_n_epoch: null
  gradient_clip_val: 1.0
  log_every_n_steps: 1
  callbacks:
    - class_path: lit_linformer.callbacks.PerplexityCurve
model:
  class_path: lit_linformer.tasks.MLM
  init_args:
    encoder:
      max_length: 32
      hidden_size: 16
      num_layers: 2
      num_heads: 2
      intermediate_size: 32
      projection_dim: 8
      local_width: 3
      norm: pre
      dropout: 0.2
      attention_dropout: 0.1
    lr: 1.0e-2
    warmup_steps: 3
data:
  class_path: lit_linformer.data.PretrainingData
  init_args:
    vocab_size: 300
    validation_fraction: 0.1
    test_fraction: 0.1
    max_length: ${model.init_args.encoder.max_length}
    batch_size: 4
    seed: ${seed_everything}
last:
  every_n_steps: 5
  validation: false  # tests/callbacks/test_owed.py has it true
"""


def slow(*values: Any) -> Any:
    """A case of a parametrised test that only ``pytest -m slow`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def write_corpus(path: Path, documents: int = 120) -> Path:
    """Documents of 20 to 60 words from a vocabulary of 200, with Zipf's frequencies."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(200)]
    weights = [1 / rank for rank in range(1, 201)]
    texts = (" ".join(draw.choices(words, weights, k=draw.randint(20, 60))) for _ in range(documents))
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def write_reviews(path: Path) -> None:
    """A user's own table: 30 rows of quoted texts and their labels."""
    rows = [f'"text {number}, the ""best""",{("negative", "positive")[number % 2]}\n' for number in range(30)]
    path.write_text("text,label\n" + "".join(rows), encoding="utf-8")


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """With `folder` as the working directory."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def plain_trainer(folder: Path, *callbacks: Callback, **more: Any) -> Trainer:
    """Lightning's own, as in a notebook: it trains for one epoch, and prints, logs and writes nothing."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, **silent, **more}
    return Trainer(callbacks=list(callbacks), **settings)


class Descending(LightningModule):
    """A model without this project: one weight, whose gradient is always 1, and four rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.validated = []

    def training_step(self, batch, index):
        return self.weight * 1.0

    def validation_step(self, batch, index):
        self.validated.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4))

    val_dataloader = train_dataloader


def run_forked(argv: list[str], log: Path | None = None, timeout: float = HANGS) -> int:
    """Runs `python run.py ARGV` in a forked process with its own session; its exit status, -9 if killed. Output goes to log."""

    def child() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `pytest &` ignores it
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        from lit_linformer.cli import main

        # A fork has none of its parent's threads: torch makes its pool anew here, before threads of a library compete to do so.
        torch.set_num_threads(torch.get_num_threads())
        main(argv)
        sys.stdout.flush()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        raise TimeoutError(f"{argv} took more than {timeout} s")
    return process.exitcode


def output(argv: list[str], tmp_path: Path, status: int = 0) -> str:
    """The output of `python run.py ARGV`, which must end with that exit status."""
    log = tmp_path / "output.txt"
    log.unlink(missing_ok=True)
    assert run_forked(argv, log) == status, log.read_text()
    return log.read_text()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; skips the test if none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class BatchLog(Callback):
    """Appends a JSON line for each training batch: its ids and labels, and the loss to the last bit."""

    def __init__(self, path: str, kill_at: int = -1) -> None:
        self.path, self.kill_at = path, kill_at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = {
            "batch": pl_module.batches_seen,
            "step": trainer.global_step,
            "inputs": batch["input_ids"].flatten().tolist(),
            "labels": batch["labels"].flatten().tolist(),
            "loss": outputs["loss"].item().hex(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        with open(f"{self.path}.{trainer.global_rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        if pl_module.batches_seen == self.kill_at and trainer.is_global_zero:
            os.killpg(0, signal.SIGKILL)


class KillAt(Callback):
    """kill -9 to all processes of a run when one of Lightning's hooks is called at optimiser step `step`."""

    def __init__(self, hook: str, step: int) -> None:
        def kill(trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == step:
                os.killpg(0, signal.SIGKILL)

        setattr(self, hook, kill)


class SendSignal(Callback):
    """Sends a signal to process `rank` once, after batch `at`; the file `marker` records that it was sent."""

    def __init__(self, marker: str, number: int, at: int, rank: int = 0) -> None:
        self.marker, self.number, self.at, self.rank = Path(marker), number, at, rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        here = pl_module.batches_seen == self.at and trainer.global_rank == self.rank
        if here and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), self.number)


def after(monkeypatch: Any, owner: type, name: str, then: Callable[..., None]) -> None:
    """Calls then(self, *arguments) after every owner.name(self, *arguments), in forked processes too."""
    method = getattr(owner, name)

    def called(self: Any, *arguments: Any, **settings: Any) -> Any:
        result = method(self, *arguments, **settings)
        then(self, *arguments)
        return result

    monkeypatch.setattr(owner, name, called)


def disk_calls(monkeypatch: Any) -> list[str]:
    """A list that fills with what makes files durable, in order: "sync NAME" and "rename NAME", the new name."""
    calls: list[str] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        calls.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    for name in ("replace", "rename"):
        rename = getattr(os, name)
        note = lambda old, new, rename=rename: calls.append(f"rename {os.path.basename(new)}") or rename(old, new)  # noqa: E731
        monkeypatch.setattr(os, name, note)
    return calls


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """{batch: line}; for a batch that was repeated, the last line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["batch"]: line for line in lines}


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal to the last bit, including nested dictionaries and lists."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def assert_same_runs(folder: Path, a: str, b: str, processes: int = 1) -> None:
    """Two runs of `fit` had the same batches and losses, and ended with the same state, to the last bit."""
    for rank in range(processes):
        assert read_log(folder / f"{a}.{rank}") == read_log(folder / f"{b}.{rank}")
    one, other = (load(folder / f"runs/{name}/checkpoints/last.ckpt") for name in (a, b))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "seen", "global_step"):
        assert_same(one[part], other[part], part)
    assert_same(one.get("training_weights"), other.get("training_weights"))  # with averaging


def untimed(file: Path) -> list[dict[str, float]]:
    """The rows of a run's CSV file, except times, which differ from run to run."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in read_rows(file)]


def in_one_process(lines: list[list[str]], folder: Path, hangs_after: float = HANGS) -> list[tuple[int, str]]:
    """Runs `python run.py LINE` for each line, one after another in one forked process: (exit status, output) of each.

    Much faster than one process for each. A line that takes longer than ``hangs_after`` seconds gets the status -9, and so
    do the lines after it.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def child() -> None:
        os.setsid()
        from lit_linformer.cli import main

        for number, line in enumerate(lines):
            log = os.open(folder / f"{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            try:
                main(line)
                status = 0
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            (folder / f"{number}.status").write_text(str(status))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    done = -1
    while process.is_alive():
        process.join(hangs_after)
        now = len(list(folder.glob("*.status")))
        if process.is_alive() and now == done:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        done = now
    found = []
    for number in range(len(lines)):
        log, status = folder / f"{number}.txt", folder / f"{number}.status"
        ended = int(status.read_text()) if status.exists() else -9
        found.append((ended, log.read_text() if log.exists() else ""))
    return found


def fit(tiny: list[str], name: str, log: Path, *extra: str, kill_at: int = -1) -> int:
    """Runs `fit`, which writes its batches to LOG.0, LOG.1 … and its output to LOG.out; killed in batch `kill_at`."""
    callback = ["--trainer.callbacks+", "tests.helpers.BatchLog", "--trainer.callbacks.path", str(log)]
    callback += ["--trainer.callbacks.kill_at", str(kill_at)]
    return run_forked(["fit", *tiny, "--name", name, *extra, *callback], log.with_suffix(".out"))
