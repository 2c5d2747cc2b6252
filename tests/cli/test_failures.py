"""Running out of memory, and a data loader's process that is killed: one line each, and the run resumes exactly."""

import multiprocessing
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.cli.failures import failure
from lit_linformer.tasks import MLM
from tests.helpers import after, assert_same_runs, fit, output


@pytest.mark.slow
def test_a_killed_worker_is_one_line_and_the_run_goes_on_exactly(tiny, tmp_path, monkeypatch):
    tiny = [*tiny, "--data.num_workers", "2"]
    assert fit(tiny, "whole", tmp_path / "whole") == 0

    def kill_all(module, *_):
        if module.batches_seen == 9:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        after(patched, MLM, "on_train_batch_start", kill_all)
        status = fit(tiny, "killed", tmp_path / "killed")
    shown = (tmp_path / "killed.out").read_text()
    assert status == 2, shown
    line = shown.splitlines()[-1]
    how = r"(was ended by the signal 'Killed' \(out of memory\?\)|has ended)"  # its pipe may break before torch notices the end
    assert re.match(rf"error: a process that loads data {how} in step \d+; ", line), shown
    assert (
        line.endswith("data.num_workers is 2; allowed: fewer, or 0; --ckpt_path last continues the run")
        and "Traceback" not in shown
    )
    assert fit(tiny, "killed", tmp_path / "killed", "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "killed")


def test_too_little_memory_in_a_step_is_one_line(tiny, tmp_path, monkeypatch):
    after(monkeypatch, MLM, "training_loss", lambda module, _: torch.empty(1 << 50) if module.batches_seen == 8 else None)
    shown = output(["fit", *tiny], tmp_path, status=2)
    line = shown.splitlines()[-1]
    assert line.startswith("error: out of memory in step 8 on cpu with data.batch_size 4 and data.max_length 32; allowed: ")
    assert "a smaller data.batch_size" in line and "Traceback" not in shown


def test_an_interval_longer_than_an_epoch_is_told_as_it_was_given(tiny, tmp_path):
    """With a global batch the interval counts steps, and Lightning's message batches."""
    longer = ["--data.global_batch_size", "8", "--trainer.val_check_interval", "500", "--trainer.check_val_every_n_epoch", "1"]
    line = output(["fit", *tiny, *longer], tmp_path, status=2).splitlines()[-1]
    assert re.match(r"error: trainer.val_check_interval is 500; allowed: up to \d\d, as many as an epoch has, or ", line)


@pytest.mark.parametrize(
    "error, said",
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            "out of memory in validate on cuda:0 with",
        ),
        (MemoryError(), "out of memory in validate on cuda:0 with data.eval_batch_size 64; allowed: a smaller data.eval_batch"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "out of memory in validate",
        ),
        (RuntimeError("size mismatch"), None),
        (ValueError("out of memory"), None),
    ],
    ids=["GPU", "Python", "cuBLAS", "another", "no allocator's"],
)
def test_what_the_allocators_say_is_known(error, said):
    data = SimpleNamespace(batch_size=32, eval_batch_size=64)
    device = SimpleNamespace(root_device="cuda:0")
    state = SimpleNamespace(fn=SimpleNamespace(value="validate"))
    trainer = SimpleNamespace(datamodule=data, strategy=device, state=state, training=False)
    told = failure(error, trainer)
    assert told is None if said is None else str(told).startswith(said)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("\nParameter indices which did not receive grad for rank 1: 1 2\n In addition, you can set", "2.weight and 1 more"),
        ("\nParameter indices which did not receive grad for rank 0: 2\n In addition, you can set", "2.bias"),
        ("", "some parameters"),
    ],
    ids=["two", "one", "untold"],
)
def test_ddp_names_the_parameters_that_got_no_gradient(end, said):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].requires_grad_(False)
    error = RuntimeError(f"Expected to have finished reduction in the prior iteration before starting a new one.{end}")
    line = str(failure(error, SimpleNamespace(lightning_module=module)))
    assert line.startswith(
        f"the loss does not depend on {said}, for whose gradients DDP waits; allowed: a model without them, "
    )


KILLED = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
BROKEN = RuntimeError("release unlocked lock")  # raised in the code that torch's signal handler interrupted
BROKEN.__context__ = KILLED
EXITED = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
EXITED.__cause__ = KILLED


@pytest.mark.parametrize(
    ("error", "workers", "how"),
    [
        (KILLED, 2, "was ended by the signal 'Killed' (out of memory?)"),
        (BROKEN, 2, "was ended by the signal 'Killed' (out of memory?)"),
        (EXITED, 2, "was ended by the signal 'Killed' (out of memory?)"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), 2, "has ended"),
        (ConnectionResetError(104, "Connection reset by peer"), 2, "has ended"),
        (ConnectionResetError(104, "Connection reset by peer"), 0, None),
    ],
    ids=["told", "in a lock", "exited, and told", "exited", "its pipe broke", "no worker's pipe"],
)
def test_however_a_loaders_end_is_told_it_is_known(error, workers, how):
    data, state = SimpleNamespace(num_workers=workers), SimpleNamespace(fn=SimpleNamespace(value="validate"))
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        told = failure(error, SimpleNamespace(datamodule=data, state=state))
    finally:
        signal.signal(signal.SIGCHLD, handler)
    line = f"a process that loads data {how} in validate; data.num_workers is 2; allowed: fewer, or 0"
    assert told is None if how is None else str(told) == line
