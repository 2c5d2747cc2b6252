"""Masks: counts, shares, tokens never chosen, whole words; and that they depend on (seed, epoch, index) alone."""

import numpy as np
import pytest

from lit_linformer.data.pretraining.masking import Masker, random_numbers, word_starts
from lit_linformer.model.heads import IGNORED

VOCABULARY, SPECIAL, MASK = 1000, [0, 1, 2, 3, 4], 4


def make_rows(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """bos, then ordinary tokens with an occasional eos."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, VOCABULARY, (rows, length))
    ids[rng.random(ids.shape) < 0.05] = 2
    ids[:, 0] = 0
    return ids


def keys(rows: int, epoch: int = 0):
    return [(epoch, index) for index in range(rows)]


def check(ids: np.ndarray, batch: dict) -> None:
    """Checks what holds for every batch."""
    positions, labels = batch["positions"], batch["labels"]
    real = labels != IGNORED
    originals = np.take_along_axis(ids, positions, axis=1)
    assert (labels[real] == originals[real]).all() and (positions[~real] == 0).all()
    assert not np.isin(originals[real], SPECIAL).any()
    assert (np.diff(positions, axis=1) >= 0).all()
    for row, kept in zip(positions, real, strict=True):
        assert len(set(row[kept])) == kept.sum()
    untouched = np.ones(ids.shape, dtype=bool)
    for row, columns, kept in zip(untouched, positions, real, strict=True):
        row[columns[kept]] = False
    assert (batch["input_ids"] == ids)[untouched].all()
    assert all(array.dtype == np.int64 for array in batch.values())


@pytest.mark.parametrize("length, rate, count", [(128, 0.15, 19), (512, 0.15, 77), (64, 0.4, 26), (8, 0.01, 1)])
@pytest.mark.parametrize("whole_word", [False, True])
def test_count_is_the_same_in_every_row(length, rate, count, whole_word):
    rng = np.random.default_rng(1)
    tables = (rng.random(VOCABULARY) < 0.5, rng.random(VOCABULARY) < 0.9) if whole_word else None
    ids = make_rows(40, length)
    batch = Masker(VOCABULARY, SPECIAL, MASK, rate, word_tables=tables)(ids.copy(), keys(40))
    assert batch["positions"].shape == batch["labels"].shape == (40, count)
    assert (batch["labels"] != IGNORED).all()
    check(ids, batch)


def test_shares_of_mask_random_and_unchanged_and_even_choice():
    ids = make_rows(2000, 128)
    batch = Masker(VOCABULARY, SPECIAL, MASK)(ids.copy(), keys(2000))
    check(ids, batch)
    new = np.take_along_axis(batch["input_ids"], batch["positions"], axis=1)
    n = new.size  # 38,000
    masked, same = (new == MASK).mean(), (new == batch["labels"]).mean()
    for share, expected in ((masked, 0.8), (same, 0.1 + 0.1 / 995), (1 - masked - same, 0.1 - 0.1 / 995)):
        assert abs(share - expected) < 5 * (expected * (1 - expected) / n) ** 0.5
    drawn = new[(new != MASK) & (new != batch["labels"])]
    assert not np.isin(drawn, SPECIAL).any() and drawn.min() < 20 and drawn.max() > VOCABULARY - 20
    chosen = np.bincount(batch["positions"].ravel(), minlength=128)
    assert chosen[0] == 0
    assert abs(chosen[1:] - n / 127).max() < 6 * (n / 127) ** 0.5


def test_rows_with_few_candidates_are_filled_up_without_targets():
    ids = np.full((3, 64), 1)
    ids[:, 0] = 0
    ids[1, 1:4] = [50, 60, 2]
    ids[2, 1:33] = 70
    batch = Masker(VOCABULARY, SPECIAL, MASK)(ids.copy(), keys(3))
    check(ids, batch)
    assert (batch["labels"] != IGNORED).sum(axis=1).tolist() == [0, 2, 10]
    assert (batch["input_ids"][:, 0] == 0).all()


@pytest.mark.parametrize("n", [64, 128])
def test_a_padded_row_is_masked_as_if_it_were_alone(n):
    ids = np.full((3, n), 1)
    for row, length in enumerate((40, 64, 2)):
        ids[row, :length] = make_rows(1, length, seed=row)
    masker = Masker(VOCABULARY, SPECIAL, MASK)
    batch = masker(ids.copy(), keys(3), lengths=np.array([40, 64, 2]))
    check(ids, batch)
    assert batch["positions"].shape[1] == masker.count(n)  # static shapes, also in a batch of short rows
    assert (batch["labels"] != IGNORED).sum(axis=1).tolist() == [6, 10, 1]
    alone = masker(ids[:1, :40].copy(), keys(1))
    assert np.array_equal(batch["input_ids"][0, :40], alone["input_ids"][0])
    assert np.array_equal(batch["positions"][0, -6:], alone["positions"][0])


def test_masks_depend_on_seed_epoch_and_index_and_on_nothing_else():
    ids = make_rows(16, 128)
    masker = Masker(VOCABULARY, SPECIAL, MASK, seed=3)
    together = masker(ids.copy(), keys(16, epoch=5))
    np.random.seed(1)
    for index in reversed(range(16)):  # another order, other batches, another object
        alone = Masker(VOCABULARY, SPECIAL, MASK, seed=3)(ids[index : index + 1].copy(), [(5, index)])
        for name, array in alone.items():
            assert np.array_equal(array[0], together[name][index])
    same_row = np.repeat(ids[:1], 3, axis=0)
    first, second, third = masker(same_row, [(5, 0), (6, 0), (5, 1)])["positions"]
    other = Masker(VOCABULARY, SPECIAL, MASK, seed=4)(ids[:1].copy(), [(5, 0)])["positions"][0]
    assert len({tuple(row) for row in (first, second, third, other)}) == 4


def test_random_numbers_are_as_they_always_were():
    """A resumed run must draw the numbers that the interrupted one would have drawn, even after an upgrade of this project."""
    assert random_numbers(1, 3, 2, 3).tolist() == pytest.approx([0.36046836, 0.09025063, 0.20810978], abs=1e-8)


def test_whole_words_are_whole():
    """Words of one to five tokens: each is masked as a whole or not at all, except the last, cut to fit the count."""
    rng = np.random.default_rng(0)
    joins, ends_word = np.zeros(VOCABULARY, dtype=bool), np.ones(VOCABULARY, dtype=bool)
    joins[500:] = True  # tokens 5 … 499 start a word, the others continue one
    ends_word[SPECIAL] = False
    ids = np.where(rng.random((200, 128)) < 0.4, rng.integers(5, 500, (200, 128)), rng.integers(500, 1000, (200, 128)))
    ids[:, 0], ids[:, 60] = 0, 2
    starts = word_starts(ids, joins, ends_word)
    batch = Masker(VOCABULARY, SPECIAL, MASK, word_tables=(joins, ends_word))(ids.copy(), keys(200))
    check(ids, batch)
    cut = 0
    for row, columns in zip(starts, batch["positions"], strict=True):
        masked = np.zeros(128, dtype=bool)
        masked[columns] = True
        partly = [s for s in set(row[columns]) if not masked[row == s].all()]
        assert len(partly) <= 1
        for s in partly:  # cut at its end: what is masked is its beginning
            inside = masked[row == s]
            assert inside[: inside.sum()].all()
        cut += len(partly)
    assert 0 < cut < 200


def test_a_word_of_more_tokens_than_are_masked_is_masked_token_by_token():
    """A row of DNA is one word, of which always the first tokens were masked; words beside it stay whole."""
    joins, ends_word = np.full(VOCABULARY, True), np.full(VOCABULARY, True)
    joins[SPECIAL] = ends_word[SPECIAL] = joins[5] = False
    ids = np.full((400, 64), 7)
    ids[:, 0], ids[:, 50::7] = 0, 5
    batch = Masker(VOCABULARY, SPECIAL, MASK, word_tables=(joins, ends_word))(ids.copy(), keys(400))
    check(ids, batch)
    chosen = np.bincount(batch["positions"].ravel(), minlength=64)
    assert chosen[1:50].min() > 20 and np.ptp(chosen[50:57]) < 60  # the last word of a row may be cut


def test_word_starts():
    joins = np.array([False, False, True, True])
    ends_word = np.array([False, True, True, False])
    ids = np.array([[0, 2, 2, 1, 2, 3, 2, 1]])  # after 0 and 3 a new word begins
    assert word_starts(ids, joins, ends_word).tolist() == [[0, 1, 1, 3, 3, 3, 6, 7]]
