"""Whether a Trainer's processes are those that were started, and whether this machine can run them."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.signals import other_rank

# Old names that Lightning still accepts.
SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@contextlib.contextmanager
def slurm_in_words() -> Iterator[None]:
    """Raises UserError where Lightning does not find, in a Slurm job, what it needs to build a Trainer."""
    try:
        yield
    except RuntimeError as error:
        if "ntasks-per-node" not in str(error):
            raise
        asked = f"SLURM_NTASKS is {os.environ.get('SLURM_NTASKS')} and the job has no --ntasks-per-node"
        raise UserError(asked, "sbatch with --ntasks-per-node, as in scripts/slurm.sh") from error
    except KeyError as error:
        if not str(error).startswith("'SLURM_"):
            raise
        allowed = "srun before the command; without it a job of the name interactive; outside of Slurm --trainer.plugins null"
        raise UserError(f"{error.args[0]} is not set, as srun does for each process", allowed) from error


def check_processes(trainer: Trainer) -> None:
    """Raises UserError if variables number this process otherwise than the trainer, or cannot lead it to the other ones.

    A run's only process that believes to be another one would neither lock the run's folder nor ask what that holds.
    """
    if (name := other_rank()) is not None and (trainer.is_global_zero or trainer.global_rank >= trainer.world_size):
        what = f"{name} is {os.environ[name]} in the environment, and {_processes(trainer)}"
        raise UserError(what, f"`unset {name}`, or trainer.devices and trainer.num_nodes as the processes were started")
    port = os.environ.get("MASTER_PORT")
    if trainer.world_size > 1 and port is not None and not port.isdecimal():
        raise SettingError("MASTER_PORT", port, "the number of a port of the first machine", more=" in the environment")
    started = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and port is None and isinstance(started, LightningEnvironment):
        allowed = "MASTER_ADDR, MASTER_PORT and NODE_RANK before the command on each machine, or torchrun, or srun"
        raise SettingError("trainer.num_nodes", trainer.num_nodes, allowed, more=", and MASTER_PORT is not set")


def check_machine(trainer: Trainer, precision: Any) -> None:
    """Raises ValueError if the processes or the device do not match the settings that the trainer was built with.

    precision: the setting; Lightning may have replaced it with another.
    """
    started, starter = _started()
    # Otherwise the processes of a trainer with one device would each train alone, in the same run folder.
    if started not in (None, trainer.num_devices * trainer.num_nodes):
        raise UserError(_processes(trainer), f"{started} in all, the processes that {starter} has started")
    device, asked = trainer.strategy.root_device, SHORT.get(str(precision), str(precision))
    lacks, instead = False, "32-true, 16-mixed"
    if device.type == "cpu":
        lacks, instead = asked == "16-mixed", "32-true, bf16-mixed"
    elif device.type == "cuda":
        lacks = asked.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        lacks = asked.startswith("64")
    if lacks:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"accelerator {device.type}"
        raise SettingError("trainer.precision", asked, instead, more=f", which {name} lacks", when="there")


def _processes(trainer: Trainer) -> str:
    return f"trainer.devices × trainer.num_nodes is {trainer.num_devices} × {trainer.num_nodes}"


def _started() -> tuple[int | None, str]:
    """How many processes torchrun or Slurm has started, and which of the two; None if this one was started alone."""
    if torch.distributed.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"]), "torchrun"
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(os.environ["SLURM_NTASKS"]), "Slurm"
    return None, ""
