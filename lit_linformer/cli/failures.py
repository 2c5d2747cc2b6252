"""What goes wrong while a model is trained or used, in one line: too little memory, a loader's process that has ended."""

import re
import signal

import torch
from lightning.pytorch import Trainer

from lit_linformer.utils.errors import UserError

# As torch's allocators and the libraries below them say it.
NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
WORKER = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal: ([\w ]+)|exited)(?!.*killed by signal)", re.DOTALL)


def failure(error: BaseException, trainer: Trainer) -> UserError | None:
    """What to tell the user; None for any other error."""
    message = str(error)
    memory = isinstance(error, RuntimeError) and any(words in message for words in NO_MEMORY)
    if memory or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return _memory(trainer)
    if isinstance(error, RuntimeError) and (found := WORKER.search(f"{message} {error.__cause__}")):
        # torch's handler raises again for each further one that ends, which they all do now, in whatever code is running then.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return _worker(found[1], trainer)
    return None


def _memory(trainer: Trainer) -> UserError:
    data = trainer.datamodule
    rows = "eval_batch_size" if hasattr(data, "eval_batch_size") and not trainer.training else "batch_size"
    sizes = {f"data.{name}": getattr(data, name, None) for name in (rows, "max_length")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    given = " and ".join(f"{name} {value}" for name, value in sizes.items()) or "these batches"
    less = [f"a smaller {name}" for name in sizes]
    if trainer.training:
        if "data.batch_size" in sizes:
            less[0] += " (data.global_batch_size keeps the rows of a step)"
        less += ["model.encoder.activation_checkpointing true", "trainer.precision bf16-mixed"]
    return UserError(f"out of memory {_where(trainer)} on {trainer.strategy.root_device} with {given}", ", ".join(less))


def _worker(by: str | None, trainer: Trainer) -> UserError:
    how = f"was ended by the signal {by!r}" if by else "has ended"
    reasons = {"Killed": " (out of memory?)", "Bus error": " (no room in /dev/shm?)"}
    workers = getattr(trainer.datamodule, "num_workers", None)
    line = f"a process that loads data {how}{reasons.get(by, '')} {_where(trainer)}; data.num_workers is {workers}"
    return UserError(line, "fewer, or 0" + ("; --ckpt_path last goes on" if trainer.state.fn == "fit" else ""))


def _where(trainer: Trainer) -> str:
    if trainer.state.fn != "fit":
        return f"in {trainer.state.fn.value}"
    if trainer.sanity_checking:
        return "in the validation before training"
    return f"in step {trainer.global_step + 1}" if trainer.training else f"in the validation after step {trainer.global_step}"
