"""Reads a text from a line of JSON that is too long to be parsed at once: piece by piece, in little memory.

`json.loads` takes up to 24 times a line's size (a list of empty lists), so a line of more than PARSED_AT_ONCE bytes is only
scanned for where its strings begin and end, and which of them is the value of the column.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator

PARSED_AT_ONCE = 4_000_000  # bytes
SLICE = 1_000_000
SIGN = re.compile(r"[{}\[\],:]")
OUTSIDE = re.compile(r'[^"]*')
# Inside a string: complete characters and escapes, the first half of a surrogate pair only if what follows is known.
INSIDE = re.compile(
    r"""(?: [^"\\]+ | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
          | \\u[0-9a-fA-F]{4}(?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) ) )*""",
    re.DOTALL | re.VERBOSE,
)
ESCAPE = 12  # characters of the longest escape, a surrogate pair


def text_of_line(parts: Iterable[bytes], column: str) -> Iterator[str]:
    """The text that a JSON object has under the key `column`, in pieces; no piece for null.

    Args:
        parts: The line, in parts.
        column: The key.

    Raises:
        KeyError: With the keys found instead.
        TypeError: With the kind of value found instead of text.
        NotImplementedError: The line is not an object.
        ValueError: The line is not JSON, as far as it was scanned.
    """
    keys: list[str] = []  # the first ones, for an error message
    depth, key, scalar = 0, "", ""
    at_key = wanted = found = False
    for inside, text, ends in _strings(parts):
        if inside:
            if wanted and depth == 1:
                found, scalar = True, '"'
                yield text
            elif at_key and depth == 1:
                key = (key + text)[:1000]
                if ends and len(keys) < 20:
                    keys.append(key)
            continue
        if depth == 0 and not keys and text.strip() and not text.lstrip().startswith("{"):
            raise NotImplementedError("no object")
        last = 0
        for sign in SIGN.finditer(text):
            if wanted and depth == 1:
                scalar = (scalar + text[last : sign.start()])[:100]
            last = sign.end()
            match sign[0]:
                case "{" | "[":
                    if wanted and depth == 1:
                        raise TypeError("dict" if sign[0] == "{" else "list")
                    depth, at_key, key = depth + 1, depth == 0, ""
                case ":" if depth == 1:
                    at_key, wanted, scalar = False, key == column, ""
                case "," | "}" if depth == 1:
                    if wanted and scalar.strip() not in ("null", '"'):
                        raise TypeError("a number or a truth value")
                    found, at_key, wanted, key = found or wanted, True, False, ""
                    depth -= sign[0] == "}"
                case "}" | "]":
                    depth -= 1
        if wanted and depth == 1:
            scalar = (scalar + text[last:])[:100]
    if depth:
        raise ValueError("its brackets do not match")
    if not found:
        raise KeyError(*keys)


def _strings(parts: Iterable[bytes]) -> Iterator[tuple[bool, str, bool]]:
    """(in a string?, piece, does it end here?) of a line: strings decoded, without their quotes."""
    decoder, rest, inside = codecs.getincrementaldecoder("utf-8")(), "", False
    for piece in (part[at : at + SLICE] for part in parts for at in range(0, len(part), SLICE)):
        text, at, rest = rest + decoder.decode(piece), 0, ""
        while at < len(text):
            end = (INSIDE if inside else OUTSIDE).match(text, at).end()
            ends = text[end : end + 1] == '"'
            if ends or end > at:
                yield inside, _plain(text[at:end]) if inside else text[at:end], ends
            if not ends:
                rest = text[end:]  # an escape that may continue in the next piece
                if len(rest) >= ESCAPE:
                    _plain(rest)  # raises, saying what is wrong with it
                break
            inside, at = not inside, end + 1
    decoder.decode(b"", True)
    if inside:
        _plain(rest)
        raise ValueError("it ends within a string")


def _plain(text: str) -> str:
    if text.isprintable() and "\\" not in text:
        return text
    text = json.loads(f'"{text}"')
    text.encode()  # fails for half a surrogate pair
    return text
