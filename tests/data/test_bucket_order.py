"""Batches by length: the same stream of samples, little padding, and one sequence for any number of ranks and interruptions."""

import numpy as np
import pytest
import torch

from lit_linformer.data.loader import WINDOW, BucketOrder, EvaluationLoader, ResumableLoader, by_length, even_batches
from tests.data.test_loader import Keys, rows, take


def lengths_of(size, seed=0):
    """Sentence lengths: lognormal, with a median of 20 tokens, clipped to 3 … 128."""
    return np.clip(np.random.default_rng(seed).lognormal(3, 0.6, size).astype(int), 3, 128)


def loader(size, batch_size, **settings):
    return ResumableLoader(Keys(size), batch_size, lengths=lengths_of(size), **settings)


@pytest.mark.parametrize("size, batch_size", [(2000, 4), (300, 4), (23, 4), (24, 4), (3, 8), (1, 5), (40, 40)])
def test_a_pass_has_every_sample_once_and_batches_are_never_short(size, batch_size):
    batches = take(loader(size, batch_size), 4 * max(1, size // batch_size) + 3 * WINDOW)
    assert all(len(batch) == batch_size for batch in batches)
    seen = rows(batches)
    whole = len(seen) // size - 1  # an epoch may end within a window that is not finished
    assert len(set(seen)) == len(seen)
    for epoch in range(min(whole, 3)):
        assert sorted(index for e, index in seen if e == epoch) == list(range(size))


def test_a_window_is_no_longer_than_a_pass():
    """Otherwise sorting would fill a batch with one sample, from several epochs."""
    for batch in take(loader(100, 32), 50):
        assert torch.unique(batch[:, 1], return_counts=True)[1].max() <= 2


def test_consecutive_batches_are_of_any_length():
    means = [lengths_of(5000)[batch[:, 1]].mean() for batch in take(loader(5000, 8), WINDOW)]
    assert sorted(means) != means and abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.4


@pytest.mark.parametrize("batch_size", [16, 32])
def test_few_tokens_are_pads(batch_size):
    """For 20,000 sentences less than 10 % is padding; in the stream's own order it is more than half."""
    lengths, waste = lengths_of(20_000), {}
    for name, given in {"sorted": lengths, "unsorted": None}.items():
        batches = [lengths[b[:, 1]] for b in ResumableLoader(Keys(20_000), batch_size, lengths=given)]
        waste[name] = 1 - sum(b.sum() for b in batches) / sum(b.max() * len(b) for b in batches)
    assert waste["sorted"] < 0.1 < 0.5 < waste["unsorted"]


def test_held_out_rows_come_in_batches_with_hardly_a_pad():
    lengths = np.sort(lengths_of(900))[::-1]
    batches = even_batches(lengths.tolist(), 16)
    assert [row for batch in batches for row in batch] == list(range(900)) and max(map(len, batches)) == 16
    assert all(lengths[batch].sum() >= 0.95 * lengths[batch[0]] * len(batch) for batch in batches)
    assert even_batches([9, 9, 9, 5, 5, 2], 2) == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert even_batches([], 2) == [] and by_length([5, 9, 2, 9, 5, 9], 3) == [[1, 3, 5], [0, 4], [2]]


def test_ranks_have_the_same_batches_of_held_out_rows():
    lengths = np.sort(lengths_of(103))[::-1]
    together = [batch[:, 1].tolist() for batch in EvaluationLoader(Keys(103), 8, lengths=lengths)]
    ranks = [[b[:, 1].tolist() for b in EvaluationLoader(Keys(103), 4, rank, 2, lengths=lengths)] for rank in range(2)]
    for whole, *parts in zip(together, *ranks, strict=True):  # a rank that has no row has a filler
        assert parts == [whole[0::2], whole[1::2] or [-1]]


def test_the_first_batches_of_held_out_rows_are_a_sample():
    """Of lengths, and of a file that is sorted by class: Trainer.limit_val_batches scores no others."""
    for lengths in (np.sort(lengths_of(4000))[::-1], np.full(4000, 64)):
        batches = [batch[:, 1].numpy() for batch in EvaluationLoader(Keys(4000), 16, lengths=lengths)]
        assert sorted(np.concatenate(batches)) == list(range(4000))
        first = np.concatenate(batches[: len(batches) // 4])
        assert lengths[first].mean() == pytest.approx(lengths.mean(), rel=0.1)
        assert 0.4 < (first < 2000).mean() < 0.6


def test_ranks_share_what_one_process_would_read():
    one = take(loader(700, 32), 100)
    ranks = [take(loader(700, 16, rank=rank, world_size=2), 100) for rank in range(2)]
    for together, *parts in zip(one, *ranks, strict=True):
        assert torch.equal(together[0::2], parts[0]) and torch.equal(together[1::2], parts[1])


@pytest.mark.parametrize("settings", [(8, 1, 2), (4, 1, 4), (4, 2, 2), (2, 2, 4), (1, 16, 1)])
def test_a_steps_rows_depend_on_their_number_alone(settings):
    """Not on how ranks and micro-batches share them: as data.global_batch_size promises."""
    batch_size, ranks, accumulate = settings
    expected = [set(rows([batch])) for batch in take(loader(900, 16), 150)]  # nearly three epochs
    of_ranks = [
        take(loader(900, batch_size, accumulate=accumulate, rank=r, world_size=ranks), 150 * accumulate) for r in range(ranks)
    ]
    for step, whole in enumerate(expected):
        part = slice(step * accumulate, (step + 1) * accumulate)
        found = [row for batches in of_ranks for row in rows(batches[part])]
        assert len(found) == 16 and set(found) == whole
    one = loader(900, 16)
    first = take(one, 70)
    other = [loader(900, batch_size, accumulate=accumulate, rank=r, world_size=ranks) for r in range(ranks)]
    for each in other:
        each.load_state_dict(one.state_dict())
    rest = [row for each in other for row in rows(take(each, (112 - 70) * accumulate))]
    assert len(set(rows(first) + rest)) == 112 * 16  # no row of the two epochs twice


@pytest.mark.parametrize("world_size, batches", [(1, 0), (1, 1), (1, 63), (1, 64), (1, 65), (1, 130), (2, 70), (2, 128)])
def test_resumes_after_any_number_of_batches(world_size, batches):
    settings = {"rank": world_size - 1, "world_size": world_size}
    expected = take(loader(900, 6, **settings), batches + 8)
    before = loader(900, 6, **settings)
    take(before, batches)
    after = loader(900, 6, **settings)
    iterator = iter(after)  # Lightning makes the iterator before it loads the state
    after.load_state_dict(before.state_dict())
    for batch in expected[batches:]:
        assert torch.equal(next(iterator), batch)


def test_a_batch_depends_on_its_number_alone():
    def order():
        return BucketOrder(lengths_of(900), 900, 6, 10, 3, 0, 1)

    whole = order()
    batches = [whole.batch(number).tolist() for number in range(300)]
    for number in (299, 0, 64, 63, 150):
        assert order().batch(number).tolist() == batches[number]
    assert BucketOrder(lengths_of(900), 900, 6, 10, 4, 0, 1).batch(0).tolist() != batches[0]
    tiny = BucketOrder(np.array([5, 3, 9, 4, 7, 1]), 6, 2, 3, 0, 0, 1)
    # must never change: resumed runs depend on it
    assert [tiny.batch(number).tolist() for number in range(4)] == [
        [[0, 3], [0, 0]], [[0, 4], [0, 2]], [[0, 5], [0, 1]], [[1, 5], [1, 1]],
    ]  # fmt: skip
    odd = np.arange(900) % 2
    two = BucketOrder(odd, 900, 6, 10, 3, 0, 1)
    keys = two.keys(np.arange(900))
    steps = np.concatenate([keys[odd[keys[:, 1]] == length] for length in (0, 1)]).reshape(-1, 6, 2).tolist()
    # Rows of equal length stay in the stream's order, whatever sorting this CPU is fast at.
    assert sorted(two.batch(number).tolist() for number in range(150)) == sorted(steps)
    assert [steps.index(two.batch(number).tolist()) for number in range(5)] == [13, 99, 3, 9, 72]


def test_resumed_with_another_batch_the_one_that_it_lies_in_comes_again():
    one = loader(900, 32)
    one.load_state_dict({"samples": 48})  # one and a half batches
    assert torch.equal(next(iter(one)), take(loader(900, 32), 2)[1])


def test_overfitting_uses_the_first_rows_only():
    one = loader(500, 4, num_samples=8)
    assert {index for _, index in rows(take(one, 20))} == set(range(8)) and len(one) == 2
