"""Training text: the part of a source that a tokenizer is trained on, in pieces, so that training takes little memory.

A vocabulary hardly changes after 100 MB of text, and a trainer's memory grows with the distinct words: about 120 bytes for
each byte of them (tokenizers 0.23). 100 MB of English Wikipedia hold 2.5 MB of distinct words; text that
repeats less, for example in a script without spaces, is read until it holds MOST_DISTINCT_BYTES of them.
"""

import re
import string
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator

from lit_linformer.data.pieces import pieces_of, size_of

MOST_CHARACTERS = 100_000_000
MOST_DISTINCT_BYTES = 3_000_000
PIECE_CHARACTERS = 10_000  # the trainer reads 256 pieces at a time, and splits as many in parallel as there are cores
# Each merge scans all words that it occurs in: words of half a million letters would take hours.
LONGEST_WORD = 20_000
SPACES = re.compile(r"\s{2,}")
WORDS = re.compile(r"[^\W\d_]+|\d+|[^\w\s]+|_+|\s+")  # roughly how a tokenizer splits text into words and punctuation
# By BERT's rules Chinese characters and punctuation marks are words of their own.
SINGLE = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]|[^\W\d_\u3400-\u9fff]+|\d+|[^\w\s]|_")


def training_text(documents: Iterable[str], single_characters: bool = False) -> Iterator[str]:
    """Pieces of the documents, cut where it makes no difference to a tokenizer that is trained here.

    The last document is read to its end, unless it holds too many distinct words. single_characters: the tokenizer
    makes Chinese characters and punctuation words of their own.
    """
    distinct = DistinctWords(SINGLE if single_characters else WORDS)
    left = MOST_CHARACTERS
    for document in documents:
        for piece, _ in pieces_of(document, safe=True, size=PIECE_CHARACTERS, longest=LONGEST_WORD):
            yield piece
            distinct.add(piece)
            if distinct.bytes >= MOST_DISTINCT_BYTES:
                return
        left -= len(document)
        if left <= 0:
            return


class DistinctWords:
    """An estimate of the bytes in a text's distinct words: a word counts if its checksum is new, so about 1 % are missed."""

    def __init__(self, words: re.Pattern):
        self.words, self.bytes = words, 0
        self._seen = bytearray(1 << 23), bytearray(1 << 23)  # a bit for each 26-bit checksum
        self._waiting: dict[str, None] = {}  # in order of occurrence: that of a set differs between processes
        self._size = 0

    def add(self, text: str) -> None:
        """Adds a text; `bytes` is updated every 200,000 characters."""
        self._waiting |= dict.fromkeys([*text.split(), *SPACES.findall(text)])
        self._size += len(text)
        if self._size < 200_000:
            return
        spaced, single = self._seen
        for word in self._waiting:
            if _new(word, spaced):
                self.bytes += sum(size_of(part) + 1 for part in self.words.findall(word) if _new(part, single))
        self._waiting, self._size = {}, 0


def _new(word: str, seen: bytearray) -> bool:
    checksum = zlib.crc32(word.encode())
    place, bit = checksum >> 9, 1 << (checksum >> 6 & 7)
    new = not seen[place] & bit
    seen[place] |= bit
    return new


def unpacked(packed: list[bytes]) -> Iterator[str]:
    return (zlib.decompress(text).decode() for text in packed)


def frequent_characters(documents: Iterable[str], normalizer, limit: int) -> list[str]:
    """The most frequent characters, sorted."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(normalizer.normalize_str(document))
    characters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(characters[:limit])


def stands_alone(character: str) -> bool:
    """Whether BERT's rules make it a word of its own: ASCII and Unicode punctuation, and (by its name) Chinese characters."""
    category, name = unicodedata.category(character), unicodedata.name(character, "")
    return category[0] == "P" or character in string.punctuation or name.startswith("CJK UNIFIED")
