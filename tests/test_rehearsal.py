"""A rehearsal of 64 processes on one processor: data order, shapes, gradients, checkpoints.

If data must really be exchanged, the processes are threads, as in torch's own tests. If shapes suffice, one process is a
rank of 64 whose others do not exist.
"""

import copy
import multiprocessing
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from lit_linformer.data.loader import BucketOrder, EvaluationLoader, ResumableLoader
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.runs.sharded import Planner, Reader, write_checksums
from lit_linformer.tasks.sharding import shard
from tests.data.test_loader import Keys, rows, take
from tests.helpers import HANGS

MANY = 64
SHAPE = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
SHAPE |= {"projection_dim": 4, "local_width": 3, "norm": "pre", "dropout": 0.0, "attention_dropout": 0.0}


def make_net() -> MaskedLanguageModel:
    torch.manual_seed(0)
    return MaskedLanguageModel(EncoderConfig(**SHAPE))


def make_batch(number: int) -> dict[str, torch.Tensor]:
    """12 rows, which divide evenly among 1, 2, 3, 4, 6 or 12 processes."""
    ids = torch.randint(1, 50, (12, 16), generator=torch.Generator().manual_seed(number))
    positions = torch.arange(0, 16, 3).repeat(12, 1)
    return {"input_ids": ids, "positions": positions, "labels": ids.gather(1, positions)}


def in_threads(count: int, work) -> list:
    """Runs work(rank) in that many threads, each a rank of one group; returns their results."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    found, errors, store = [None] * count, [], dist.HashStore()

    def process(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=process, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return found


def sharded(rank: int, count: int, base: MaskedLanguageModel):
    net = copy.deepcopy(base)
    shard(net, init_device_mesh("cpu", (count,)))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(net, optimizer, batch) -> None:
    optimizer.zero_grad()
    net.loss(**batch).backward()
    optimizer.step()


def whole(net) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in net.named_parameters()}


def test_sharded_steps_and_checkpoints_of_four_three_and_one_process_are_the_same(tmp_path):
    """Two steps and a checkpoint on four processes, one more step on three that read it; and all three steps on one.

    In float64, as AdamW's first steps divide a gradient by its own size, and so amplify rounding errors of small ones.
    """
    one, batches, base = make_net().double(), [make_batch(number) for number in range(3)], make_net().double()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for batch in batches:
        step(one, optimizer, batch)

    def begin(rank: int) -> None:
        net, optimizer = sharded(rank, 4, base)
        for batch in batches[:2]:
            step(net, optimizer, {name: value[rank::4] for name, value in batch.items()})
        state = {"state_dict": get_model_state_dict(net), "optimizer_0": get_optimizer_state_dict(net, optimizer)}
        save(state, storage_writer=FileSystemWriter(tmp_path / "last.ckpt"))

    def go_on(rank: int) -> dict[str, torch.Tensor]:
        net, optimizer = sharded(rank, 3, base)
        state = {"state_dict": get_model_state_dict(net), "optimizer_0": get_optimizer_state_dict(net, optimizer)}
        load(state, storage_reader=Reader(tmp_path / "last.ckpt"), planner=Planner())
        net.load_state_dict(state["state_dict"])
        set_optimizer_state_dict(net, optimizer, state["optimizer_0"], options=StateDictOptions())
        step(net, optimizer, {name: value[rank::3] for name, value in batches[2].items()})
        return whole(net)

    in_threads(4, begin)
    write_checksums_without_meta(tmp_path / "last.ckpt")
    for weights in in_threads(3, go_on):
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-11)


def write_checksums_without_meta(folder: Path) -> None:
    (folder / "meta.pt").touch()  # Lightning's has all except tensors
    write_checksums(folder)


def pretend(rank: int, connection) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=MANY, store=FakeStore())
    net, optimizer = sharded(rank, MANY, make_net())
    step(net, optimizer, {name: value[:2] for name, value in make_batch(0).items()})
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    shapes = {name: tuple(parameter.to_local().shape) for name, parameter in net.named_parameters()}
    averages = {name: optimizer.state[parameter]["exp_avg"].to_local().shape for name, parameter in net.named_parameters()}
    assert all(tuple(averages[name]) == shape for name, shape in shapes.items())
    connection.send(shapes)
    dist.destroy_process_group()


def test_of_64_processes_each_holds_its_rows_of_each_weight_or_none():
    """Most weights here have fewer rows than there are processes: some hold none of them, and step all the same."""
    found = {}
    for rank in (0, 7, 15, 63):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=pretend, args=(rank, there))
        process.start()
        process.join(HANGS)
        assert process.exitcode == 0
        found[rank] = here.recv()
    for name, parameter in make_net().named_parameters():
        size = parameter.shape[0]
        for rank, shapes in found.items():
            part = -(-size // MANY)
            assert shapes[name] == (max(0, min(size, (rank + 1) * part) - rank * part), *parameter.shape[1:]), (name, rank)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_64_processes_read_each_row_once_a_pass_and_together_what_one_reads(batch_size):
    size, together = 1000, batch_size * MANY
    one = take(ResumableLoader(Keys(size), together), 40)
    ranks = [take(ResumableLoader(Keys(size), batch_size, rank=rank, world_size=MANY), 40) for rank in range(MANY)]
    for joined, *parts in zip(one, *ranks, strict=True):
        assert sorted(rows([joined])) == sorted(rows(parts))
    seen = [row for rank in ranks for row in rows(rank)]
    passes = {epoch: sorted(index for other, index in seen if other == epoch) for epoch in {epoch for epoch, _ in seen}}
    assert len(seen) == len(set(seen)) == 40 * together
    assert all(indices == list(range(size)) for epoch, indices in passes.items() if epoch < max(passes))


def test_64_processes_go_on_on_48():
    before = [ResumableLoader(Keys(1000), 3, rank=rank, world_size=MANY) for rank in range(MANY)]
    read = [row for loader in before for row in rows(take(loader, 4))]
    states = {tuple(loader.state_dict().items()) for loader in before}
    after = [ResumableLoader(Keys(1000), 4, rank=rank, world_size=48) for rank in range(48)]
    for loader in after:
        loader.load_state_dict(dict(*states))
    read += [row for loader in after for row in rows(take(loader, 4))]
    assert sorted(read) == sorted(rows(take(ResumableLoader(Keys(1000), 192), 8)))


def test_64_processes_validate_each_row_once_in_as_many_batches():
    for size in (1, 63, 65, 1000):
        loaders = [EvaluationLoader(Keys(size), 4, rank=rank, world_size=MANY) for rank in range(MANY)]
        assert len({len(loader) for loader in loaders}) == 1
        seen = [row for loader in loaders for row in rows(loader) if row[1] >= 0]
        assert sorted(seen) == [(0, index) for index in range(size)]


def test_64_processes_share_batches_of_rows_of_like_length():
    lengths = torch.randint(4, 512, (3000,), generator=torch.Generator().manual_seed(0)).numpy()
    orders = [BucketOrder(lengths, len(lengths), 4, 22, 0, rank, MANY) for rank in range(MANY)]  # nearly two epochs
    seen = [key for order in orders for batch in order for key in batch]
    assert len(seen) == len(set(seen)) == 22 * 4 * MANY
    assert {index for epoch, index in seen if epoch == 0} == set(range(3000))
