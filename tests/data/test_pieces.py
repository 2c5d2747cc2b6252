"""Pieces: for any text, none is too long, together they are the text, and they have its tokens."""

import json
import random

import numpy as np
import pytest

from lit_linformer.data.pieces import BATCH_BYTES, LONGEST_PIECE, batches_of, encode_texts, pieces_of
from lit_linformer.data.tokenizer import Tokenizer, train_tokenizer
from lit_linformer.data.training_text import WORDS, DistinctWords, training_text
from tests.data.conftest import make_documents

HARD = {
    "one letter": "a" * 2_100_000,
    "zeros": "\0" * 1_200_000,
    "white space": " \t" * 700_000,
    "not ASCII": "\N{GRINNING FACE}" * 300_000,
    "long words": f"{'b' * 400_000} " * 4,
    "longer words": f"{'b' * 700_000} b " * 2,
    "newlines": "\n" * 1_100_000,
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("safe", [True, False])
def test_no_piece_is_too_long_and_nothing_is_lost(name, safe):
    text = HARD[name]
    pieces, lasts = zip(*pieces_of(text, safe), strict=True)
    assert lasts.index(True) == len(pieces) - 1
    assert max(map(len, pieces)) <= LONGEST_PIECE[text.isascii()] and "".join(pieces) == text


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def kind(request, documents):
    return train_tokenizer(request.param, [*documents, "a  b   c\n\n\td"] * 3, 500)


def test_a_long_line_of_words_has_the_tokens_of_the_whole(kind, documents):
    text = " ".join(" ".join(documents * 3).split()).replace("naïve", "naïve  and   more")
    assert len(text) > 150_000 and "\n" not in text
    pieces = [piece for piece, _ in pieces_of(text, safe=True, size=200)]
    assert len(pieces) > 300 and max(map(len, pieces)) < 1000 and "".join(pieces) == text
    assert [i for piece in pieces for i in kind.encode(piece)] == kind.encode(text)
    (ids,) = encode_texts([text], kind)
    assert ids.tolist() == kind.encode(text)


def test_a_text_of_chinese_punctuation_is_cut_at_its_newlines(kind):
    text = "注意力，矩阵。\n" * 200
    pieces = [piece for piece, _ in pieces_of(text, safe=True, size=50)]
    assert len(pieces) > 20 and [i for piece in pieces for i in kind.encode(piece)] == kind.encode(text)


def test_a_tokenizer_that_puts_something_before_a_text_is_given_ordinary_texts_whole(documents):
    from tokenizers import Tokenizer as Backend

    config = json.loads(train_tokenizer("bpe", documents, 400).to_str())
    config["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer = Tokenizer(Backend.from_str(json.dumps(config)), "prefix")
    assert not tokenizer.splits_at_newlines
    text = "\n".join(documents)[:90_000]
    (ids,) = encode_texts([text], tokenizer)
    assert ids.tolist() == tokenizer.encode(text)


def test_texts_come_one_by_one_and_in_order(tokenizer, monkeypatch):
    monkeypatch.setattr("lit_linformer.data.pieces.PIECE_CHARACTERS", 40)
    monkeypatch.setattr("lit_linformer.data.pieces.BATCH_BYTES", 300)
    texts = ["", *make_documents(30), "", "x"]
    encoded = list(encode_texts(texts, tokenizer))
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text) for text in texts]
    assert all(ids.dtype == np.int64 for ids in encoded)


def test_batches_count_bytes():
    batches = list(batches_of([("é" * 100_000, i) for i in range(12)]))
    assert [len(batch) for batch in batches] == [BATCH_BYTES // 200_000 + 1] * 4
    assert batches[0][0][1:] == (0, 200_000)


# What a tokenizer is trained on


def test_ordinary_training_text_is_read_whole(documents):
    assert "".join(training_text(documents)) == "".join(documents)


@pytest.mark.parametrize("single", [False, True])
def test_text_that_never_repeats_is_not_read_to_its_end(single, monkeypatch):
    monkeypatch.setattr("lit_linformer.data.training_text.MOST_DISTINCT_BYTES", 300_000)
    draw = random.Random(0)

    def document():
        return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(5000))

    read = sum(map(len, training_text((document() for _ in range(40)), single)))
    assert 300_000 <= read < 300_000 + 3 * 200_000  # it is counted every 200,000 characters


def test_distinct_words_are_counted_once_and_spaces_too():
    words = DistinctWords(WORDS)
    for _ in range(10):
        words.add("one two  three\n\n\n" * 20_000)
    assert words.bytes == len("one two three ") + len("  ") + 1 + len("\n\n\n") + 1


def test_distinct_words_are_counted_alike_in_every_process():
    """Some of so many words have equal checksums: which of them counts must not depend on Python's hash seed."""
    draw, words = random.Random(0), DistinctWords(WORDS)
    words.add(" ".join(f"{draw.randrange(10 ** draw.randrange(1, 10))}-x{draw.randrange(10**6)}" for _ in range(60_000)))
    assert words.bytes == 677_041
