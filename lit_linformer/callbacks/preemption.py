"""Preemption: on SIGTERM, or Slurm's SIGUSR1, a run saves its last step and ends; Slurm is asked to start it again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_linformer.callbacks.checkpoint import LastCheckpoint


class Stopped(SystemExit):
    """Ends the program with a signal's exit status, 128 + its number."""


class Preemption(Checkpoint):
    """Stops all processes of a run after the same optimiser step, with last.ckpt written.

    Not a signal later than the step: that one is finished, and so is a validation that has begun. Lightning's own handler
    sends messages to the other processes from within the signal, which may hang, and saves in the middle of an
    accumulation.
    """

    def __init__(self) -> None:
        self.received = 0
        self._agreed = 0
        self._before: dict[int, Any] = {}
        self._step_before_batch = -1
        self._group = self._pending = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals = [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]
        self._before = {number: signal.signal(number, self._receive) for number in signals}
        if dist.is_available() and dist.is_initialized() and trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=getattr(trainer.strategy, "_timeout", None))
            # Lightning asks before every batch whether process 0 has had a signal, and a GPU waits for the answer.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
            steps = torch.full((trainer.world_size,), -1)
            steps[trainer.global_rank] = trainer.global_step
            dist.all_reduce(steps, dist.ReduceOp.MAX, group=self._group)
            if steps.unique().numel() > 1:
                raise ValueError(
                    f"ckpt_path: the processes would go on from steps {steps.tolist()}; allowed: one checkpoint, in a run "
                    "directory that all machines see"
                )

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_before_batch = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step_before_batch:
            return
        self._agreed = self._agree()
        loop = trainer.fit_loop
        # Where a validation follows, the run ends after it, so that its point is in the curves.
        if self._agreed and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed and not trainer.sanity_checking:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_answer()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Of the processes that Lightning has started on this machine, the one that ended first and took the others along.
        started = getattr(trainer.strategy.launcher, "procs", None) or []
        processes = [process for process in started if isinstance(process, subprocess.Popen)]
        until = time.monotonic() + 2.0  # its connections are closed a moment before its end is known
        while processes and not any(process.poll() for process in processes) and time.monotonic() < until:
            time.sleep(0.05)
        for rank, process in enumerate(processes, 1):
            if not (status := process.poll()):
                continue
            how = f"with exit status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
            memory = " (out of memory?)" if status == -signal.SIGKILL else ""
            print(f"process {rank} of this machine was ended {how}{memory}", file=sys.stderr, flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _agree(self) -> int:
        """The signal that any process has had, the same number on all of them.

        With several, what was had by the step before: the question goes round while the next step is computed.
        """
        if self._group is None:
            return self.received
        answer = self._take_answer()
        flag = torch.tensor(self.received)
        self._pending = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer

    def _take_answer(self) -> int:
        if self._pending is None:
            return 0
        (flag, work), self._pending = self._pending, None
        work.wait()
        return int(flag)

    def _stop(self, trainer: Trainer) -> None:
        self._take_answer()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, LastCheckpoint):
                callback.save(trainer)
        trainer.strategy.barrier()  # the checkpoint is whole before any process ends, which ends the others
        name = signal.Signals(self._agreed).name
        if trainer.is_global_zero:
            print(f"stopped by {name} at step {trainer.global_step}; --ckpt_path last goes on", flush=True)
            if self._agreed == signal.SIGUSR1:
                _requeue()
        raise Stopped(128 + self._agreed)


def _requeue() -> None:
    """Puts this Slurm job back into its queue."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job
    reason = "scontrol is not on this machine's PATH"
    if shutil.which("scontrol"):
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        if done.returncode == 0:
            print(f"job {job} is in Slurm's queue again", flush=True)
            return
    print(f"warning: job {job} was not requeued: {reason}", file=sys.stderr, flush=True)
