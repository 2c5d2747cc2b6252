"""Fully sharded training (FSDP2): weights, gradients and AdamW's state divided among the processes.

Its checkpoint is a folder (runs/sharded.py). A run resumes from it with any number of processes, sharded or not.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lit_linformer.runs.checkpoints import TRAINING_WEIGHTS
from lit_linformer.runs.folder import remove, replace
from lit_linformer.runs.sharded import Planner, Reader, check_sharded, write_checksums
from lit_linformer.utils import compat
from lit_linformer.utils.errors import UserError


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, over all processes. Not for 16-mixed and 64-true, which Lightning refuses with it.

    Args:
        process_group_backend: nccl or gloo; None: the one that suits the device.
        timeout: how long to wait for the other processes, at the start and in each exchange.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = timedelta(minutes=10)):
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    def setup_environment(self) -> None:
        compat.shard_over_all(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        if path.is_dir():
            return self._load_folder(path)
        # Lightning numbers an optimiser's parameters in the model's order, but ours are in the order of their groups.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        weights, training = checkpoint.pop("state_dict"), checkpoint.pop(TRAINING_WEIGHTS, {})
        if self.optimizers:  # training continues from the unaveraged weights: `Averaging` does not work with sharded runs
            weights |= training
        set_model_state_dict(self.model, weights, options=whole)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        states = checkpoint["optimizer_states"] if self.optimizers else []
        for optimizer, state in zip(self.optimizers, states, strict=True):
            order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
            named = {"state": {order[number]: part for number, part in state["state"].items()}, "param_groups": groups}
            set_optimizer_state_dict(self.model, optimizer, named, options=whole)
        return checkpoint

    def _load_folder(self, path: Path) -> dict[str, Any]:
        """As Lightning does, but with a reader that runs no code from pickles."""
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        def read(state: dict[str, Any]) -> dict[str, Any]:
            load(state, storage_reader=Reader(path), planner=Planner())
            return state

        meta = check_sharded(path)  # before anything else, since its errors are one line
        weights = read({"state_dict": get_model_state_dict(self.model)})["state_dict"]
        self.model.load_state_dict(weights, strict=self.lightning_module.strict_loading)
        for index, optimizer in enumerate(self.optimizers):
            name = f"optimizer_{index}"  # one at a time: this creates the state of one that has not stepped
            state = read({name: get_optimizer_state_dict(self.model, optimizer)})[name]
            set_optimizer_state_dict(self.model, optimizer, state, options=StateDictOptions(cpu_offload=True))
        return meta

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Writes to a temporary folder, then renames it, as for plain checkpoints: under its name a folder is complete."""
        path = Path(self.broadcast(str(filepath)))
        temporary = path.with_name(path.name + ".tmp")
        try:
            if self.is_global_zero and temporary.exists():  # left by a process that was killed
                remove(temporary)
            self.barrier()
            super().save_checkpoint(checkpoint, temporary, storage_options)
            if self.is_global_zero:
                write_checksums(temporary)
                replace(temporary, path)
        except (OSError, RuntimeError, CheckpointException) as error:
            raise OSError(
                f"cannot write the checkpoint {path}: {' '.join(str(error).split())[:200]}; those before it are intact"
            ) from error


def check_whole(module: nn.Module, net: nn.Module) -> None:
    """Raises UserError for weights outside ``net``, which are not sharded: nothing would synchronise their gradients."""
    inside = set(net.parameters())
    for name, weight in module.named_parameters():
        if weight.requires_grad and weight not in inside:
            sharded = "and trainer.strategy shards the weights of `net` alone"
            raise UserError(f"the model has {name}, {sharded}", "weights inside `net`, or ddp")


def shard(net: nn.Module, mesh: Any) -> None:
    """Shards a network's encoder, if it has one, layer by layer; the rest, a shared E and the embeddings, is sharded together.

    A layer's weights are gathered only while it computes. E is used by every layer, so it stays gathered through the step.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if isinstance(net, FSDPModule):
        return
    for layer in getattr(getattr(net, "encoder", None), "layers", ()):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for name in ("loss", "exact_logits"):
        if hasattr(net, name):
            register_fsdp_forward_method(net, name)
