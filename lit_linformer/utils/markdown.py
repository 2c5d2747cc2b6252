"""Markdown that reads well on a terminal, too."""

import re
from collections.abc import Iterable, Sequence
from typing import Any


def aligned(lines: list[list[str]], right: bool = False, words: int = 0) -> str:
    """A Markdown table, its first line the header, that reads well on a terminal too.

    Columns are left-aligned; with ``right`` all but the first ``words`` are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = [right and place >= words for place in range(len(widths))]
    rules = ["-" * (width - 1) + ":" if at_right else "-" * width for width, at_right in zip(widths, to_right, strict=True)]
    padded = (
        [text.rjust(w) if at_right else text.ljust(w) for text, w, at_right in zip(line, widths, to_right, strict=True)]
        for line in (lines[0], rules, *lines[1:])
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def of_words(lines: Iterable[Sequence[Any]], right: bool = False, words: int = 0) -> str:
    """As `aligned`, for cells of any type that may hold the column separator."""
    return aligned([[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines], right, words)


def plain(text: str) -> str:
    """A user's name, escaped so that Markdown and HTML show it as it is, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]#|~]|\b_|_\b)", r"\\\1", text)


def code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`" if text.strip() else ""


def demoted(text: str, levels: int = 1) -> str:
    """The text with its headings ``levels`` deeper."""
    return re.sub(r"^(#+ )", "#" * levels + r"\1", text, flags=re.MULTILINE)
