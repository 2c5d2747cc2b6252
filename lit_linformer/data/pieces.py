"""Pieces: a text of any length, cut so that tokenising it takes little memory and gives the same tokens as the whole text.

A tokenizer needs 100 to 400 bytes of memory for each byte of text in a call (tokenizers 0.23: "a a a …" 165, WordPiece on
punctuation 395), so a long text is cut: before a newline, else before a space, where that changes no token. Text that has
neither for half a million characters is cut anyway, which may make two tokens of the one at the cut.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np

PIECE_CHARACTERS = 50_000
# About ten pieces, to keep the cores busy. 1 MB is no faster.
BATCH_BYTES = 500_000
# Most characters of a piece, in any text; one that is not ASCII may be four bytes and four tokens.
LONGEST_PIECE = {True: 500_000, False: 125_000}  # by str.isascii
# A newline after a character that no tokenizer takes for white space, or a space between two visible characters: a run of
# white space is never cut, since it may be one token.
SAFE = re.compile(r"\n(?<=[\w!-~\u3001-\u303f\uff01-\uff5e]\n)| (?<=[!-~] )(?=[!-~])")
BETWEEN_WORDS = re.compile(r"\n| (?<=[A-Za-z] )(?=[A-Za-z])")


def pieces_of(text: str, safe: bool, size: int | None = None, longest: int | None = None) -> Iterator[tuple[str, bool]]:
    """(piece, whether it is the last) of the text, in pieces of at least `size` characters and at most `longest`.

    Args:
        text: Text of any length.
        safe: Whether a cut before a newline or a space changes no token: `Tokenizer.splits_at_newlines`. Otherwise only a
            text of more than `longest` is cut.
        size: Smallest number of characters in a piece, except the last; None: PIECE_CHARACTERS.
        longest: Largest number of characters in a piece; None: LONGEST_PIECE.
    """
    size = PIECE_CHARACTERS if size is None else size
    longest = max(LONGEST_PIECE[text.isascii()] if longest is None else longest, 2 * size)
    whole, first, boundary = (2 * size, size, SAFE) if safe else (longest, longest // 2, BETWEEN_WORDS)
    start, end = 0, len(text)
    while end - start > whole:
        found = boundary.search(text, start + first, min(start + longest, end))
        if found is None and end - start <= longest:
            break
        at = found.start() if found else start + longest
        yield text[start:at], False
        start = at
    yield text[start:], True


def size_of(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def batches_of(pieces: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Pieces, tuples that begin with a text, in batches of about BATCH_BYTES; the text's size is appended to each tuple."""
    batch, total = [], 0
    for piece in pieces:
        size = size_of(piece[0])
        batch.append((*piece, size))
        total += size
        if total >= BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def encode_texts(texts: Iterable[str], tokenizer) -> Iterator[np.ndarray]:
    """Token ids (int64) of each text, however long, without bos and eos."""
    held: list[np.ndarray] = []
    for batch in batches_of(piece for text in texts for piece in pieces_of(text, tokenizer.splits_at_newlines)):
        encoded = tokenizer.encode_plain([piece for piece, _, _ in batch])
        for (_, ends, _), ids in zip(batch, encoded, strict=True):
            held.append(np.array(ids, np.int64))
            if ends:
                yield np.concatenate(held) if len(held) > 1 else held[0]
                held = []
