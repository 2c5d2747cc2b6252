"""A summary of the data: a line for each split, shown before training, and kept in result.json.

It is computed from the prepared files; no text is read again.
"""

import textwrap
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

NOTE_WIDTH = 68  # what the labels of the header leave of a terminal's line
LABELS = 6  # largest number of classes to show
Summary = dict[str, dict[str, Any]]  # by split


def data_rows(data: Any, longest: int | None) -> list[tuple[str, str]]:
    """What the terminal shows of a data module's `summary()`: (split, its counts), and ("note", advice) if there is any.

    longest: the most tokens that the model reads; None: not known.
    """
    summary = data.summary() if hasattr(data, "summary") else {}
    summary = summary if isinstance(summary, Mapping) else {}  # a user's own may be text
    hints = data.summary_hints(longest) if summary and hasattr(data, "summary_hints") else []
    notes = [textwrap.wrap(hint, NOTE_WIDTH, break_long_words=False, break_on_hyphens=False) for hint in hints]
    return [*summary_rows(summary), *(("" if line else "note", text) for note in notes for line, text in enumerate(note))]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """A row for each split, its counts in columns."""
    cells = {split: _cells(told) for split, told in summary.items()}
    widths = [max(map(len, column)) for column in zip_longest(*(row[:3] for row in cells.values()), fillvalue="")]
    label = max(map(len, cells), default=0) + 2
    return [
        (split.ljust(label), "  ".join([*map(str.rjust, row[:3], widths), ", ".join(row[3:])]).rstrip())
        for split, row in cells.items()
    ]


def _cells(told: Mapping[str, Any]) -> list[str]:
    """Three cells, to be aligned in columns, and what follows them."""
    if "documents" in told:
        documents = "document" if told["documents"] == 1 else "documents"
        rows = "row" if told["rows"] == 1 else "rows"
        of_rows = f"{told['rows']:,} {rows} of {told['row_length']}"
        return [f"{told['documents']:,} {documents}", f"{told['tokens']:,} tokens", of_rows]
    if "cut" not in told:  # from a user's own data module
        return [f"{value} {name}" for name, value in told.items()]
    kind = "pairs" if "pairs" in told else "rows"
    windows = f"{told['max_windows']} × " if "max_windows" in told else ""
    cut = f"{told['cut']:.1%}" if told["cut"] else "none"
    cells = [f"{told[kind]:,} {kind}", f"{told['tokens']:,} tokens", f"{cut} cut at {windows}{told['max_length']}"]
    if labels := told.get("labels"):
        cells += [f"{name}: {count:,}" for name, count in list(labels.items())[:LABELS]]
        cells += [f"… ({len(labels)} classes)"] * (len(labels) > LABELS)
    if values := told.get("values"):
        cells.append(f"{values['least']:g} to {values['greatest']:g}, mean {values['mean']:g}")
    return cells
