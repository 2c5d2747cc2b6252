"""Rows of tokens, exact to the token: truncation of pairs, windows of a long text, padding and masks."""

import numpy as np
import pytest
import torch

from lit_linformer.data.finetuning.row_layout import RowLayout

BOS, EOS, PAD = 0, 2, 1


def layout(max_length, **settings):
    return RowLayout(BOS, EOS, PAD, max_length, **settings)


def text(length, start=10):
    return np.arange(start, start + length, dtype=np.uint16)


def one_by_one(first, second, capacity):
    """The definition of longest_first: drops one token at a time from the longer text, or from the second if they are equal."""
    while first + second > capacity:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    return [first, second]


@pytest.mark.parametrize("max_length", [8, 9, 12, 13])
def test_longest_first_takes_tokens_off_the_longer_text_one_by_one(max_length):
    pair = layout(max_length, pair=True)
    lengths = np.array([(a, b) for a in range(20) for b in range(20)])
    assert pair.cut(lengths).tolist() == [one_by_one(a, b, max_length - 4) for a, b in lengths.tolist()]


@pytest.mark.parametrize(
    "truncation, lengths, kept",
    [
        ("longest_first", (10, 3), (3, 3)),  # room for 6: the short one stays whole
        ("longest_first", (3, 10), (3, 3)),
        ("longest_first", (2, 10), (2, 4)),
        ("longest_first", (10, 10), (3, 3)),
        ("longest_first", (2, 4), (2, 4)),
        ("longest_first", (0, 9), (0, 6)),
        ("only_first", (10, 2), (4, 2)),
        ("only_first", (3, 3), (3, 3)),
        ("only_second", (2, 10), (2, 4)),
        ("only_second", (5, 10), (5, 1)),
    ],
)
def test_pairs_by_hand(truncation, lengths, kept):
    pair, (a, b) = layout(10, pair=True, truncation=truncation), lengths
    (row,) = pair.rows([text(a), text(b, 50)])
    assert row == [BOS, *range(10, 10 + kept[0]), EOS, EOS, *range(50, 50 + kept[1]), EOS]
    assert pair.lengths(np.array([lengths])).tolist() == [len(row)] and len(row) <= 10
    assert pair.too_long(np.array([lengths])) is None


@pytest.mark.parametrize("truncation, lengths", [("only_first", (1, 6)), ("only_first", (3, 9)), ("only_second", (6, 2))])
def test_a_text_that_may_not_be_cut_must_leave_room(truncation, lengths):
    pair = layout(10, pair=True, truncation=truncation)
    assert pair.too_long(np.array([(2, 2), lengths])) == 1
    assert layout(10, pair=True).too_long(np.array([lengths])) is None


def test_one_text_is_cut_at_its_end():
    single = layout(8)
    assert single.rows([text(20)]) == [[BOS, *range(10, 16), EOS]]
    assert single.rows([text(3)]) == [[BOS, 10, 11, 12, EOS]]
    assert single.rows([text(0)]) == [[BOS, EOS]]
    assert single.lengths(np.array([[20], [6], [3], [0]])).tolist() == [8, 8, 5, 2]


def test_windows_by_hand():
    windows = layout(8, max_windows=3, window_overlap=2)  # rows of 6 text tokens, 4 of them new
    rows = {length: windows.rows([text(length)]) for length in (6, 7, 10, 11, 14, 40)}
    assert rows[6] == [[BOS, *range(10, 16), EOS]]
    assert rows[7] == [[BOS, *range(10, 14), EOS], [BOS, *range(12, 17), EOS]]
    assert rows[10] == [[BOS, *range(10, 16), EOS], [BOS, *range(14, 20), EOS]]
    assert rows[11] == [[BOS, *range(10, 15), EOS], [BOS, *range(13, 18), EOS], [BOS, *range(16, 21), EOS]]
    assert rows[14] == rows[40] == [*rows[10], [BOS, *range(18, 24), EOS]]


@pytest.mark.parametrize("max_windows, overlap", [(1, 32), (2, 0), (3, 2), (5, 7), (100, 3)])
def test_lengths_are_those_of_the_rows(max_windows, overlap):
    windows = layout(12, max_windows=max_windows, window_overlap=overlap)
    lengths = np.arange(80)[:, None]
    rows = [windows.rows([text(length)]) for (length,) in lengths.tolist()]
    assert windows.lengths(lengths).tolist() == [sum(map(len, each)) for each in rows]
    assert all(max(map(len, each)) - min(map(len, each)) <= 1 for each in rows)  # so batches need hardly any padding
    assert all(len(row) <= 12 for each in rows for row in each) and max(map(len, rows)) <= max_windows
    for length, each in zip(lengths[:, 0].tolist(), rows, strict=True):  # every token that the windows cover is in a row
        seen = {token for row in each for token in row} - {BOS, EOS}
        assert seen == set(range(10, 10 + min(length, 10 + (max_windows - 1) * (10 - overlap))))


def test_a_batch_is_padded_to_its_longest_row():
    batch = layout(8).batch([[text(2)], None, [text(4)]])
    assert batch["input_ids"].tolist() == [
        [BOS, 10, 11, EOS, PAD, PAD],
        [BOS, EOS, PAD, PAD, PAD, PAD],
        [BOS, 10, 11, 12, 13, EOS],
    ]
    assert batch["attention_mask"].tolist() == [[True] * 4 + [False] * 2, [True] * 2 + [False] * 4, [True] * 6]
    assert batch["input_ids"].dtype == torch.int64 and batch["attention_mask"].dtype == torch.bool
    assert batch.keys() == {"input_ids", "attention_mask"}


def test_no_mask_where_there_are_no_pads():
    assert layout(8).batch([[text(9)], [text(6)]]).keys() == {"input_ids"}


def test_a_batch_of_windows_tells_which_text_a_row_belongs_to():
    batch = layout(8, max_windows=3, window_overlap=2).batch([[text(3)], [text(11)], None, [text(7)]])
    assert batch["document"].tolist() == [0, 1, 1, 1, 2, 3, 3] and batch["input_ids"].shape == (7, 7)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"truncation": "only_second"}, r"^data.truncation is 'only_second'; allowed for a task with one text: longest_first$"),
        ({"max_windows": 2, "pair": True}, r"^data.max_windows is 2; allowed for pairs of texts: 1$"),
        (
            {"max_windows": 2, "window_overlap": 14},
            r"^data.window_overlap is 14; allowed: at least 0, less than 14, the tokens",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        layout(**({"max_length": 16} | settings))
