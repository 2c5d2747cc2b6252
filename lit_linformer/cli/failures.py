"""Errors while a model is trained or used, in one line: out of memory, a process that has ended or was not found."""

import os
import re
import signal
from collections.abc import Iterator

import torch
from lightning.pytorch import Trainer

from lit_linformer.callbacks.checkpoint import MissingMetric
from lit_linformer.utils.errors import SettingError, UserError, out_of_memory

UNLOGGED = re.compile(r"Early stopping conditioned on metric `(.+?)` which is not available.*following: (.+)", re.DOTALL)
SEVERAL = re.compile(r"You provided multiple `(\w+)_dataloader`, but no `dataloader_idx` argument in `(.+?)\(\)`")
LONG_INTERVAL = re.compile(r"`val_check_interval` \((\d+)\) must be less than or equal to .*?\((\d+)\)", re.DOTALL)
UNUSED = re.compile(r"Expected to have finished reduction in(?:.*did not receive grad for rank \d+: ([\d ]+))?", re.DOTALL)
WORKER = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal: ([\w ]+)|exited)(?!.*killed by signal)", re.DOTALL)


def failure(error: BaseException, trainer: Trainer) -> UserError | None:
    """The error to show the user instead; None if this one is none of these."""
    if out_of_memory(error):
        return _memory(trainer)
    if isinstance(error, RuntimeError) and (found := UNLOGGED.match(str(error))):
        metric, logged = found[1], found[2].replace("`", "")
        module = type(trainer.lightning_module).__name__
        return MissingMetric("EarlyStopping.monitor", metric, logged, more=f", which {module} had not logged when it looked")
    if isinstance(error, RuntimeError) and (found := SEVERAL.match(str(error))):
        what = f"data={type(trainer.datamodule).__name__} gives several loaders by {found[1]}_dataloader"
        return UserError(what, f"one, or a {found[2]} that takes dataloader_idx")
    if isinstance(error, RuntimeError) and (found := UNUSED.match(str(error))):
        return _unused(found[1], trainer)
    if found := LONG_INTERVAL.search(str(error)):
        # With a global batch it counts steps, and the data module has multiplied it.
        each = trainer.accumulate_grad_batches if getattr(trainer.datamodule, "global_batch_size", None) else 1
        every, most = (int(number) // each for number in found.groups())
        allowed = f"up to {most}, as many as an epoch has, or trainer.check_val_every_n_epoch null, which counts across epochs"
        return SettingError("trainer.val_check_interval", every, allowed)
    # torch's handler raises in whatever code is running, which may fail in turn: its message may be anywhere in the chain.
    # Or the pipe of a process that has just been killed breaks before torch has noticed its end.
    found = WORKER.search(" ".join(str(one) for one in _chain(error)))
    if found or (isinstance(error, ConnectionResetError) and getattr(trainer.datamodule, "num_workers", 0)):
        # The handler would raise again for every other worker, and all of them end now.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return _worker(found[1] if found else None, trainer)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
        own = "activation_checkpointing" in trainer.lightning_module.hparams  # a classifier's
        less += [f"model.{'' if own else 'encoder.'}activation_checkpointing true", "trainer.precision bf16-mixed"]
    return UserError(f"out of memory {_where(trainer)} on {trainer.strategy.root_device} with {given}", ", ".join(less))


def _unused(indices: str | None, trainer: Trainer) -> UserError:
    """indices: of the parameters that learn, as DDP counts them; None if it does not tell."""
    learning = [name for name, weight in trainer.lightning_module.named_parameters() if weight.requires_grad]
    names = [learning[int(index)] for index in (indices or "").split()]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"the loss does not depend on {names[0] if names else 'some parameters'}{more}, for whose gradients DDP waits"
    return UserError(what, "a model without them, or --trainer.strategy ddp_find_unused_parameters_true")


def _worker(by: str | None, trainer: Trainer) -> UserError:
    how = f"was ended by the signal {by!r}" if by else "has ended"
    reasons = {"Killed": " (out of memory?)", "Bus error": " (no room in /dev/shm?)"}
    workers = getattr(trainer.datamodule, "num_workers", None)
    line = f"a process that loads data {how}{reasons.get(by, '')} {_where(trainer)}; data.num_workers is {workers}"
    return UserError(line, "fewer, or 0" + ("; --ckpt_path last continues the run" if trainer.state.fn == "fit" else ""))


def _where(trainer: Trainer) -> str:
    if trainer.state.fn != "fit":
        return f"in {trainer.state.fn.value}"
    if trainer.sanity_checking:
        return "in the validation before training"
    return f"in step {trainer.global_step + 1}" if trainer.training else f"in the validation after step {trainer.global_step}"


def connection_error(error: BaseException) -> str | None:
    """One line for processes that did not find, or that lost, each other; None for any other error."""
    message = " ".join(str(error).split())
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    # DistStoreError in the first process, which waits; DistNetworkError in those that connect.
    if isinstance(error, torch.distributed.DistStoreError | torch.distributed.DistNetworkError) and re.search(
        r"connect|clients joined|waiting for clients|resolve|address", message, re.IGNORECASE
    ):
        return (
            f"the processes of the run did not find each other at {address} in the time that trainer.strategy.timeout "
            "gives them; allowed: MASTER_ADDR and MASTER_PORT of the first machine, which all others reach (is it started "
            "there, does a firewall close the port?), and trainer.num_nodes machines started"
        )
    lost = r"connection (closed|reset|refused by)|broken pipe|remote process exited|timed out|socket timeout"
    distributed = isinstance(error, torch.distributed.DistError) or "gloo" in message.lower() or "nccl" in message.lower()
    if distributed and re.search(lost, message, re.IGNORECASE):
        rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "?")
        return f"process {rank} lost another one of this run, whose own last lines say why; --ckpt_path last continues the run"
    return None
