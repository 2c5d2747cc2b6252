"""Fully sharded training (FSDP2): weights, gradients and AdamW's state divided among the processes, and its checkpoints.

A sharded checkpoint is a folder with a file for each process, in the format of torch.distributed.checkpoint. It goes on
with any number of processes, sharded or not; `load_sharded` makes a plain checkpoint of it.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

META = "meta.pt"  # everything but weights and AdamW's state


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, over all processes. Not for 16-mixed and 64-true, which Lightning refuses there.

    Args:
        process_group_backend: nccl or gloo; None: what suits the device.
        timeout: how long to wait for the other processes, at the start and in each exchange.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = timedelta(minutes=10)):
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only=True)
        # Lightning numbers an optimiser's parameters in the model's order, but ours are in the order of their groups.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=whole)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
            named = {"state": {order[number]: part for number, part in state["state"].items()}, "param_groups": groups}
            set_optimizer_state_dict(self.model, optimizer, named, options=whole)
        return checkpoint


def shard(net: nn.Module, mesh: Any) -> None:
    """Divides a network layer by layer; what is left, the shared E and the embeddings, goes together.

    A layer's weights are whole only while it computes. E is used by every layer, so it stays whole through the step.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if isinstance(net, FSDPModule):
        return
    for layer in net.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for name in ("loss", "nll"):
        if hasattr(net, name):
            register_fsdp_forward_method(net, name)


def check_sharded(folder: Path) -> dict[str, Any]:
    """What a sharded checkpoint holds beside tensors; ValueError or OSError where a part of it is missing."""
    from torch.distributed.checkpoint import FileSystemReader

    meta = torch.load(folder / META, map_location="cpu", weights_only=True)
    stored = FileSystemReader(folder).read_metadata().storage_data.values()
    missing = {part.relative_path for part in stored if not (folder / part.relative_path).is_file()}
    if missing:
        raise ValueError(f"it lacks {min(missing)} ({len(missing)} of its files in all)")
    return meta


def load_sharded(folder: Path) -> dict[str, Any]:
    """The plain checkpoint that a sharded one is equal to, in memory."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    checkpoint = check_sharded(folder)
    tensors: dict[str, Any] = {}
    _load_state_dict(tensors, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    checkpoint["state_dict"] = tensors.pop("state_dict")
    optimizers = [tensors[name] for name in sorted(tensors) if name.startswith("optimizer_")]
    checkpoint["optimizer_states"] = [_by_number(optimizer) for optimizer in optimizers]
    return checkpoint


def _by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with its parameters numbered, as torch.optim has it, instead of named."""
    groups, names = [], []
    for group in optimizer["param_groups"]:
        groups.append({**group, "params": list(range(len(names), len(names) + len(group["params"])))})
        names += group["params"]
    return {"state": {names.index(name): state for name, state in optimizer["state"].items()}, "param_groups": groups}
