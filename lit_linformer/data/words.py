"""Which tokens of a vocabulary make a word together, for masks of whole words."""

import numpy as np


def word_tables(vocabulary: dict[str, int], size: int, prefix: str, byte_level: bool) -> tuple[np.ndarray, np.ndarray]:
    """`Tokenizer.word_tables` before its special tokens are taken out, of {token: id} and the number of ids in all.

    prefix: of tokens that continue a word, WordPiece's "##"; "" where there is none. byte_level: whether tokens are spelt in
    GPT-2's alphabet of bytes.
    """
    joins, ends_word = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    to_byte = _byte_alphabet() if byte_level else None
    for token, i in vocabulary.items():
        if prefix:
            joins[i], ends_word[i] = token.startswith(prefix), True
            continue
        if to_byte is not None and all(c in to_byte for c in token):
            # a token may hold a part of a character: it decodes to U+FFFD, and such characters are mostly letters
            token = bytes(to_byte[c] for c in token).decode("utf-8", "replace")
        joins[i], ends_word[i] = _is_word(token[:1]), _is_word(token[-1:])
    return joins, ends_word


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character → byte: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
