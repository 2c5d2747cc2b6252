"""What several devices and machines need before training starts, and what goes wrong between them, in one line each."""

import os
import re
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_linformer.utils.errors import SettingError, UserError

# Names that Lightning still takes for others.
SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def check_machine(trainer: Trainer, precision: Any) -> None:
    """ValueError where the processes or the device are not what the settings say of a trainer that was built with them.

    precision: as it was asked for; Lightning may have put another one in its place.
    """
    started, starter = _started()
    # Without this the processes of a trainer with one device would each train alone, in one run directory.
    if started not in (None, trainer.num_devices * trainer.num_nodes):
        devices = f"trainer.devices × trainer.num_nodes is {trainer.num_devices} × {trainer.num_nodes}"
        raise UserError(devices, f"{started} in all, the processes that {starter} has started")
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


def _started() -> tuple[int | None, str]:
    """How many processes torchrun or srun has started, and which of them; None where this one was started alone."""
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"]), "torchrun"
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(os.environ["SLURM_NTASKS"]), "Slurm"
    return None, ""


def connection_error(error: BaseException) -> str | None:
    """One line for processes that did not find or that lost each other; None for any other error."""
    message = " ".join(str(error).split())
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    # DistStoreError: the first process waits, DistNetworkError: the others knock. Both exist since torch 2.1.
    if isinstance(error, torch.distributed.DistStoreError | torch.distributed.DistNetworkError) and re.search(
        r"connect|clients joined|waiting for clients|resolve|address", message, re.IGNORECASE
    ):
        return (
            f"the processes of the run did not find each other at {address} in the time that trainer.strategy.timeout "
            "gives them; allowed: MASTER_ADDR and MASTER_PORT of the first machine, which all others reach (is it started "
            "there, does a firewall close the port?), and trainer.num_nodes machines started"
        )
    lost = r"connection (closed|reset|refused) by|connection (closed|reset)|broken pipe|remote process exited|Socket Timeout"
    distributed = isinstance(error, torch.distributed.DistError) or "gloo" in message.lower() or "nccl" in message.lower()
    if distributed and re.search(rf"{lost}|timed out", message, re.IGNORECASE):
        rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "?")
        return f"process {rank} lost another one of this run, whose own last lines tell why; --ckpt_path last goes on"
    return None
