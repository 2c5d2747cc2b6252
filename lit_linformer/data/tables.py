"""Tables: CSV, TSV, JSON lines and Parquet, row by row, with the requested columns; the first three also compressed.

Every command reads tables with this module, except the JSON lines of a pretraining corpus (`pretraining/corpus.py`).

    .csv                    RFC 4180: a header, commas, quotes around fields that hold commas, quotes or newlines
    .tsv                    GLUE's: a header, split at tabs only, quotes are plain characters
    .jsonl .ndjson .json    an object on each line
    .parquet
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from lit_linformer.data.reading import (
    COMPRESSED,
    JSON,
    LONGEST_JSON,
    LONGEST_LINE,
    PARQUET,
    cells,
    json_object,
    not_utf8,
    parquet_batches,
    parquet_file,
    raw_lines,
    text_lines,
)
from lit_linformer.utils.errors import UserError

CSV, TSV, TEXT = {".csv"}, {".tsv"}, {"", ".txt", ".text", ".tokens", ".md", ".raw"}
KINDS = {"csv": CSV, "tsv": TSV, "json": JSON, "parquet": PARQUET, "text": TEXT}
TABLES = ("csv", "tsv", "json", "parquet")
TABLE_FILES = ".csv .tsv .jsonl .ndjson .json, each also .gz .xz .zst, and .parquet"
SEPARATORS = {";": "';'", "\t": "tabs", "|": "'|'", ":": "':'"}


class Row(NamedTuple):
    """Values of a row's columns, and where it is: (file, "line" or "row", number from 1)."""

    fraction: float  # share of the file read so far
    where: tuple
    values: Sequence


def row_name(where: tuple) -> str:
    """What error messages call a row, given `Row.where`."""
    place, unit, number = where
    return f"{place}, {unit} {number}"


# A function of what error messages call the table and of its columns' names → the names to read, None for an optional one
# that is missing.
Chooser = Callable[[object, Iterable[str]], Sequence[str | None]]


def kind_of(path: Path) -> str | None:
    """One of KINDS, by the file's name; None: not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes.pop() if suffixes else ""
    if last in COMPRESSED:
        last = suffixes.pop() if suffixes else ""
        if last in PARQUET:
            return None
    return next((kind for kind, names in KINDS.items() if last in names), None)


def table_rows(
    path: Path,
    choose: Chooser,
    setting: str,
    headerless: Callable[[list[str]], Sequence[str] | None] | None = None,
    ragged: Callable[[], None] | None = None,
) -> Iterator[Row]:
    """Rows of a file that is a table by its name (`kind_of`).

    Args:
        path: The file.
        choose: Chooses the columns to read.
        setting: What error messages call the file.
        headerless: For TSV: returns the columns' names, given the first line's fields; None if that line is a header.
        ragged: For TSV: called for each line with too few or too many fields, which is then skipped; None: an error.
    """
    kind = kind_of(path)
    if kind in ("csv", "tsv"):
        return _delimited(path, choose, setting, kind, headerless, ragged)
    return _json(path, choose, setting) if kind == "json" else _parquet(path, choose, setting)


def column_names(path: Path, setting: str) -> list[str]:
    """Names of a table's columns; empty for an empty file of JSON lines."""
    found: list[str] = []

    def take(where: object, names: Iterable[str]) -> list[str]:
        found.extend(names)
        return found[:1]

    next(table_rows(path, take, setting), None)
    return found


def _json(path: Path, choose: Chooser, setting: str) -> Iterator[Row]:
    size = path.stat().st_size
    for number, line, position in raw_lines(path, setting, LONGEST_JSON):
        if line.isspace():
            continue
        row = json_object(line, f"{path}, line {number}", setting)
        chosen = choose(f"{path}, line {number}", row)
        values = [None if name is None else row[name] for name in chosen]
        yield Row(position / size, (path, "line", number), values)


def _parquet(path: Path, choose: Chooser, setting: str) -> Iterator[Row]:
    file = parquet_file(path, setting)
    names = file.schema_arrow.names
    chosen = choose(path, names)
    _check_unique(chosen, names, path, setting)
    batches = parquet_batches(file, path, [name for name in chosen if name is not None], setting)
    yield from _arrow_rows(batches, file.metadata.num_rows, chosen, path, setting)


def hub_rows(rows, chosen: Sequence[str | None], where: str, setting: str) -> Iterator[Row]:
    """Rows of a split of a Hugging Face data set."""
    columns = rows.select_columns([name for name in chosen if name is not None])
    return _arrow_rows(columns.with_format("arrow").iter(batch_size=1000), len(rows), chosen, where, setting)


def _arrow_rows(tables: Iterable, size: int, chosen: Sequence[str | None], where, setting: str) -> Iterator[Row]:
    """Rows of Arrow tables, `size` in total; where a name in `chosen` is None, so is the value."""
    read = 0
    for table in tables:
        columns = (
            repeat(None, table.num_rows) if name is None else cells(table.column(name), read + 1, where, setting)
            for name in chosen
        )
        for number, values in enumerate(zip(*columns, strict=True), read + 1):
            yield Row(number / size, (where, "row", number), values)
        read += table.num_rows


def _check_unique(chosen: Sequence[str | None], names: list[str], path: Path, setting: str) -> None:
    if twice := [name for name in chosen if name is not None and names.count(name) > 1]:
        raise UserError(f"{setting}: {path} has two columns {twice[0]!r}", "one of that name")


def _delimited(path: Path, choose: Chooser, setting: str, kind: str, headerless, ragged) -> Iterator[Row]:
    size, names, places = path.stat().st_size, None, []
    for number, fields, position in (_csv_fields if kind == "csv" else _tsv_fields)(path, setting):
        if not fields:
            continue
        if names is None:
            own = headerless(fields) if headerless else None
            names = fields if own is None else list(own)
            try:
                chosen = choose(path, names)
            except ValueError as error:
                raise UserError(f"{error}{_advice(fields, kind)}") from error
            _check_unique(chosen, names, path, setting)
            places = [None if name is None else names.index(name) for name in chosen]
            if own is None:
                continue
        if len(fields) != len(names):
            if ragged is None:
                quotes = " (quotes around a field that holds a comma)" if kind == "csv" else ""
                raise UserError(
                    f"{setting}: {path}, line {number} has {len(fields)} fields", f"{len(names)}, as its first line{quotes}"
                )
            ragged()
            continue
        yield Row(position / size, (path, "line", number), [None if place is None else fields[place] for place in places])
    if names is None:
        raise UserError(f"{setting}: {path} is empty", "a line with the columns' names, and rows")


def _tsv_fields(path: Path, setting: str) -> Iterator[tuple[int, list[str], int]]:
    for number, line, position in text_lines(path, setting):
        yield number, line.split("\t") if line else [], position


def _csv_fields(path: Path, setting: str) -> Iterator[tuple[int, list[str], int]]:
    """(number of the line on which a row begins, its fields, bytes read so far)."""
    at = 0, 0  # the line that was read last, and where in the file it ends

    def lines() -> Iterator[str]:
        nonlocal at
        for number, line, position in raw_lines(path, setting):
            at = number, position
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(setting, path, number, error) from error

    csv.field_size_limit(LONGEST_LINE)  # the default of 131,072 would refuse a long text
    begins = 1
    try:
        for fields in csv.reader(lines(), strict=True):
            yield begins, fields, at[1]
            begins = at[0] + 1
    except csv.Error as error:
        raise UserError(
            f"{setting}: {path}, line {begins} begins a row that is no CSV: {_in_words(str(error))}",
            "RFC 4180, quotes around a field that holds commas, quotes (written twice) or newlines",
        ) from error


def _in_words(error: str) -> str:
    """The csv module's error in a user's terms."""
    if "field larger" in error:
        return f"a quote is opened and not closed within {LONGEST_LINE:,} characters"
    if "unexpected end" in error:
        return "a quote is opened and never closed"
    if "new-line character" in error:
        return "a carriage return is outside quotes"
    return "a quoted field continues after its closing quote" if "expected after" in error else error


def _advice(fields: list[str], kind: str) -> str:
    """What the first line of a table looks like instead of a header, for an error message."""
    separators = SEPARATORS if kind == "csv" else {",": "commas", ";": "';'"}
    if len(fields) <= 2:
        line = fields[0]
        found = max(separators, key=line.count)
        if line.count(found):
            usual = "commas" if kind == "csv" else "tabs"
            return f"; its first line looks divided by {separators[found]}, and a .{kind} file is divided by {usual}"
    if any(not field or len(field) > 40 or is_number(field) for field in fields):
        return "; its first line looks like a row: the first line names the columns"
    return ""


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
