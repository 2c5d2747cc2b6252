"""How a run ends early: on a signal, or when its loss is not finite, all processes end after the same step."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_linformer.callbacks.checkpoint import LastCheckpoint
from lit_linformer.callbacks.finite import Finite, NotFinite
from lit_linformer.callbacks.observing import Stepping, at_max_steps, callback_of
from lit_linformer.utils import compat
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.signals import Stopped, requeue, watch


class Preemption(Stepping, Checkpoint):
    """Stops all processes of a run after the same optimiser step: on a signal last.ckpt is written, on a bad loss it is not.

    After a signal the step is finished, and so is a validation that has begun; one that has not is left to the resumed run.
    Lightning's own handlers (which RunTrainer leaves out) send messages to the other processes from within the handler, which
    may hang, and save in the middle of an accumulation.
    """

    def __init__(self, finite: Finite) -> None:
        self._agreed = 0
        self._finite = finite
        self._group = self._pending = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watch.training = True
        if watch.received:  # during code from which no exception escapes, such as a destructor
            raise Stopped(128 + watch.received)
        if dist.is_available() and dist.is_initialized() and trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=compat.timeout(trainer.strategy))
            compat.no_broadcast_of_signals(trainer)
            steps = torch.full((trainer.world_size,), -1)
            steps[trainer.global_rank] = trainer.global_step
            dist.all_reduce(steps, dist.ReduceOp.MAX, group=self._group)
            if steps.unique().numel() > 1:
                raise UserError(
                    f"ckpt_path: the processes would continue from steps {steps.tolist()}",
                    "one checkpoint, in a run directory that all machines see",
                )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self.stepped(trainer):
            return
        self._agreed, step, kind = self._agree(self._finite.bad or (0, 0))
        if step:
            self._take_answer()
            self._finite.refuse(trainer, step, kind)
        # After its last step the run is about to end anyway.
        if self._agreed and not at_max_steps(trainer) and not compat.validation_follows(trainer):
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed and not trainer.sanity_checking and not at_max_steps(trainer):
            self._stop(trainer, owing=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or at_max_steps(trainer) or not self.stepped(trainer):  # within an accumulation
            return
        if not self._agreed:  # a signal that came during the validation does not wait for one more step
            answer = self._agree((0, 0))
            self._agreed = (answer if self._group is None else self._take_answer())[0]
        if self._agreed:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_answer()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Of the processes that Lightning started on this machine, say which ended first and so ended the others.
        started = getattr(trainer.strategy.launcher, "procs", None) or []
        processes = [process for process in started if isinstance(process, subprocess.Popen)]
        if isinstance(exception, Stopped | NotFinite):
            for process in processes if not watch.training else []:  # they have not agreed on it, and may have had no signal
                process.terminate()
        else:
            _tell_first(processes)
        # Lightning's watcher would kill this process, too, once it finds that one has ended; this one is about to end itself.
        started.clear()

    def _agree(self, bad: tuple[int, int]) -> tuple[int, int, int]:
        """The signal that any process has received, and the step and kind of a bad loss: the same numbers on all of them.

        With several processes they are those of the step before: the processes communicate while the next step is computed.
        """
        if self._group is None:
            return watch.received, 0, 0
        answer = self._take_answer()
        question = torch.tensor([watch.received, *bad])
        self._pending = question, dist.all_reduce(question, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer

    def _take_answer(self) -> tuple[int, int, int]:
        if self._pending is None:
            return 0, 0, 0
        (answer, work), self._pending = self._pending, None
        work.wait()
        return tuple(answer.tolist())

    def _stop(self, trainer: Trainer, owing: bool = False) -> None:
        self._take_answer()
        if (last := callback_of(trainer, LastCheckpoint)) is not None:
            last.save(trainer, owing)
        trainer.strategy.barrier()  # the checkpoint must be complete before any process ends, which ends the others
        name = signal.Signals(self._agreed).name
        if trainer.is_global_zero:
            print(f"stopped by {name} at step {trainer.global_step}; --ckpt_path last continues the run", flush=True)
            if self._agreed == signal.SIGUSR1:
                requeue()
        raise Stopped(128 + self._agreed)


def interrupted(trainer: Trainer) -> Stopped:
    """Prints that a KeyboardInterrupt raised by the user's own code ends the run; returns the exception that ends the program.

    Nothing is saved: unlike a signal, it did not wait for the end of a step.
    """
    line, last = "stopped by a KeyboardInterrupt", callback_of(trainer, LastCheckpoint)
    if trainer.state.fn == "fit":
        there = last is not None and (Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt").exists()
        goes_on = f"--ckpt_path last continues from step {last.saved_step}" if there else "it has no checkpoint yet"
        line += f" at step {trainer.global_step}; {goes_on}"
    if trainer.is_global_zero:
        print(line, flush=True)
    watch.training = False  # the other processes have not agreed on it
    return Stopped(128 + signal.SIGINT)


def _tell_first(processes: list[subprocess.Popen]) -> None:
    """Prints which process has ended, and how, since that may be why the others did."""
    until = time.monotonic() + 2.0  # its connections close a moment before its end is known
    while processes and not any(process.poll() for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    for rank, process in enumerate(processes, 1):
        if not (status := process.poll()):
            continue
        how = f"with exit status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        memory = " (out of memory?)" if status == -signal.SIGKILL else ""
        print(f"process {rank} of this machine was ended {how}{memory}", file=sys.stderr, flush=True)
