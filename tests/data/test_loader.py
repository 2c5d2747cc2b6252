"""Loaders: the order is the same sequence for any number of ranks, workers and interruptions."""

import multiprocessing
import signal
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch

from lit_linformer.data.loader import EvaluationLoader, ResumableLoader, StreamOrder, shuffled
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.masking import MaskedBlocks, Masker
from lit_linformer.data.pretraining.token_files import Holdout, TokenBlocks, make_token_files
from lit_linformer.model.heads import IGNORED
from tests.helpers import HANGS, slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tokenizer, text_file):
    cache = tmp_path_factory.mktemp("cache")
    folder = make_token_files(cache, {"train": Corpus(str(text_file))}, Holdout(0, 0), tokenizer, progress=False)
    blocks = TokenBlocks(folder, "train", 600, tokenizer.bos_id, tokenizer.pad_id)
    assert 30 < len(blocks) < 200 and blocks.full == len(blocks) - 1
    return MaskedBlocks(blocks, Masker(len(tokenizer), tokenizer.special_ids, tokenizer.mask_id))


class Keys(torch.utils.data.Dataset):
    """A data set whose batches are their keys (epoch, index)."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, keys):
        return torch.tensor(keys)


class Stuck(Keys):
    """Blocks after the first batches of each worker, like a file system that is no longer reachable."""

    def __getitem__(self, keys):
        if keys[0][1] >= 4:
            time.sleep(2 * HANGS)
        return super().__getitem__(keys)


def take(loader, count):
    """The next batches, over as many epochs as it takes."""
    batches = []
    while len(batches) < count:
        for batch in loader:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def rows(batches):
    return [tuple(row.tolist()) for batch in batches for row in batch]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size, batch_size", [(23, 4), (24, 4), (3, 8), (1, 5), (40, 40)])
def test_a_pass_has_every_sample_once_and_batches_are_never_short(size, batch_size):
    loader = ResumableLoader(Keys(size), batch_size)
    batches = take(loader, -(-3 * size // batch_size))
    assert all(len(batch) == batch_size for batch in batches)
    seen = rows(batches)[: 3 * size]
    for epoch in range(3):
        part = seen[epoch * size : (epoch + 1) * size]
        assert sorted(part) == [(epoch, index) for index in range(size)]
    if size > 20:
        assert [i for _, i in seen[:size]] != [i for _, i in seen[size : 2 * size]] != sorted(range(size))


def order(size, seed, epoch):
    return shuffled(np.arange(size), np.full(size, epoch), size, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 65537])
def test_shuffle_is_one(size):
    for epoch in range(3):
        assert np.array_equal(np.sort(order(size, 1, epoch)), np.arange(size))


@pytest.mark.parametrize("size", [5, 7, 64])
def test_shuffles_put_everything_everywhere_equally_often(size):
    passes = 400 * size
    places, epochs = np.tile(np.arange(size), passes), np.repeat(np.arange(passes), size)
    orders = shuffled(places, epochs, size, 0).reshape(passes, size)
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size**2)  # neighbours are independent
    assert not pairs.reshape(size, size).diagonal().any()
    different = pairs[np.flatnonzero(np.eye(size) == 0)]
    for counts in (*(np.bincount(column, minlength=size) for column in orders.T), different):
        expected, freedom = passes / len(counts), len(counts) - 1
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_long_pass_takes_no_memory():
    tracemalloc.start()
    try:
        batch = next(iter(StreamOrder(488_000_000, 64, 10, seed=0, rank=3, world_size=8)))  # 1 TB of text
        assert len(set(batch)) == 64 and max(index for _, index in batch) > 400_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_large_batches_are_looked_up_one_by_one():
    tracemalloc.start()
    try:
        batch = next(iter(StreamOrder(5_000_000, 100_000, 10, seed=0, rank=0, world_size=1)))
        assert len(set(batch)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 60_000_000  # 64 batches at once took a gigabyte
    finally:
        tracemalloc.stop()


def test_order_is_the_seeds():
    assert rows(take(ResumableLoader(Keys(50), 5), 20)) == rows(take(ResumableLoader(Keys(50), 5), 20))
    assert rows(take(ResumableLoader(Keys(50), 5), 20)) != rows(take(ResumableLoader(Keys(50), 5, seed=1), 20))
    assert order(8, 0, 0).tolist() == [2, 5, 3, 1, 6, 7, 0, 4]  # must never change: resumed runs depend on it


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_what_one_process_would_read(world_size):
    one = take(ResumableLoader(Keys(23), 2 * world_size), 30)
    ranks = [take(ResumableLoader(Keys(23), 2, rank=r, world_size=world_size), 30) for r in range(world_size)]
    for together, *parts in zip(one, *ranks, strict=True):
        assert sorted(rows([together])) == sorted(rows(parts))


@pytest.mark.parametrize("workers_before, workers_after", [(0, 0), (2, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize("batches", [0, 1, 5, 8, 9, 17])
def test_resumes_after_any_number_of_batches(dataset, batches, workers_before, workers_after):
    expected = take(ResumableLoader(dataset, 7), batches + 4)
    before = ResumableLoader(dataset, 7, num_workers=workers_before)
    assert all(map(equal, take(before, batches), expected)) and before.state_dict() == {"samples": batches * 7}
    after = ResumableLoader(dataset, 7, num_workers=workers_after)
    iterator = iter(after)  # Lightning makes the iterator before it loads the state
    after.load_state_dict(before.state_dict())
    resumed = [next(iterator) for _ in range(4)]
    assert all(equal(a, b) for a, b in zip(resumed, expected[batches:], strict=True))


def test_state_means_the_same_on_another_number_of_ranks():
    state = {"samples": 24}
    one = ResumableLoader(Keys(23), 4)
    two = [ResumableLoader(Keys(23), 2, rank=r, world_size=2) for r in range(2)]
    for loader in (one, *two):
        loader.load_state_dict(state)
    assert sorted(rows(take(one, 5))) == sorted(rows(take(two[0], 5)) + rows(take(two[1], 5)))
    assert {loader.state_dict()["samples"] for loader in (one, *two)} == {44}


@pytest.mark.parametrize(
    "size, batch_size, world_size, accumulate, length",
    [(100, 10, 1, 1, 10), (100, 10, 1, 4, 8), (100, 10, 2, 2, 4), (5, 4, 1, 4, 4), (3, 8, 1, 1, 1), (109, 10, 1, 1, 10)],
)
def test_length_is_whole_optimiser_steps(size, batch_size, world_size, accumulate, length):
    loader = ResumableLoader(Keys(size), batch_size, accumulate=accumulate, world_size=world_size)
    assert len(loader) == len(list(loader)) == length
    assert len(list(loader)) == length  # and the next epoch goes on
    assert loader.samples == 2 * length * batch_size * world_size


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_global_generator_is_left_alone(dataset, num_workers):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    take(ResumableLoader(dataset, 4, num_workers=num_workers), 3)
    list(EvaluationLoader(dataset, 4, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_mask_only_where_there_are_pads(dataset):
    batches = list(EvaluationLoader(dataset, 1))
    assert ["attention_mask" in batch for batch in batches] == [False] * (len(batches) - 1) + [True]
    last = batches[-1]
    pad = dataset.blocks.pad_id
    assert torch.equal(last["attention_mask"], last["input_ids"] != pad) and not last["attention_mask"].all()
    assert {name: str(value.dtype) for name, value in last.items()} == {
        "input_ids": "torch.int64", "positions": "torch.int64", "labels": "torch.int64", "attention_mask": "torch.bool",
    }  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_is_fixed_and_in_order(dataset, num_workers):
    loader = EvaluationLoader(dataset, 8, num_workers=num_workers)
    first, second = list(loader), list(loader)
    assert len(loader) == len(first) == -(-len(dataset) // 8)
    assert all(map(equal, first, second))
    # unmasked, it equals the file
    whole = torch.cat([b["input_ids"].scatter(1, b["positions"], b["labels"].clamp_min(0)) for b in first])
    real = torch.cat([b["labels"] for b in first]) != IGNORED
    assert real[:-1].all()
    assert torch.equal(whole[:-1], torch.from_numpy(dataset.blocks.rows(range(len(dataset))))[:-1])


@pytest.mark.parametrize("method", [slow("fork"), "forkserver"])
def test_a_worker_that_is_stuck_ends_with_its_process(method):
    def child():
        multiprocessing.set_start_method(method, force=True)  # Python 3.14's default is forkserver
        take(EvaluationLoader(Stuck(40), 2, num_workers=1), 2)
        sys.exit(7)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HANGS)
    status = process.exitcode
    process.kill()
    assert status == 7


@pytest.mark.parametrize("size, batch_size, world_size", [(29, 4, 2), (5, 1, 2), (16, 4, 2), (17, 4, 2), (1, 4, 3), (7, 2, 3)])
def test_validation_shards_have_every_row_once_and_equally_many_batches(size, batch_size, world_size):
    loaders = [EvaluationLoader(Keys(size), batch_size, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = [row for loader in loaders for row in rows(loader)]
    assert sorted(row for row in seen if row[1] >= 0) == [(0, index) for index in range(size)]


def test_filler_rows_have_no_targets(dataset):
    batch = dataset[[(0, -1), (0, 2)]]
    assert (batch["labels"][0] == IGNORED).all() and (batch["labels"][1] != IGNORED).all()


class Deaf(Keys):
    """Whether the worker blocks SIGTERM."""

    def __getitem__(self, keys):
        return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_can_be_ended_where_signals_do_not_tell_their_sender(monkeypatch):
    """macOS has no sigwaitinfo: with SIGTERM blocked and nobody waiting for it, the command would not end."""
    monkeypatch.delattr(signal, "sigwaitinfo", raising=False)
    assert not any(EvaluationLoader(Deaf(4), 2, num_workers=1))


def test_workers_can_be_spawned():
    loader = EvaluationLoader(Keys(4), 2, num_workers=1)
    loader.multiprocessing_context = "spawn"  # as on macOS
    assert [batch.tolist() for batch in loader] == [[[0, 0], [0, 1]], [[0, 2], [0, 3]]]
