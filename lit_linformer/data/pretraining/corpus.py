"""Corpus: a source of text, named by one string, as a stream of documents.

    Corpus("embedded")                            the documentation that comes with Python
    Corpus("texts/")                              a folder, a file or a glob
    Corpus("hub:wikitext:wikitext-103-raw-v1:train")   a Hugging Face data set, or a local folder in the hub's layout

In plain text, blank lines separate documents; tables (CSV, TSV, JSON lines, Parquet) and the hub have one in each row.
Everything streams: memory does not grow with the corpus.
"""

import functools
import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lit_linformer.data.notes import note
from lit_linformer.data.reading import COMPRESSED, hub_stamp, load_hub, stamps, text_parts
from lit_linformer.data.tables import TABLE_FILES, hub_rows, kind_of, row_name, table_rows
from lit_linformer.utils.errors import SettingError, UserError, shown

SUPPORTED = f"text (.txt .text .tokens .md .raw or none), {TABLE_FILES}"
SOURCES = "embedded, hub:NAME:SPLIT, hub:NAME:CONFIG:SPLIT, or a file, folder or glob"
# Characters. A longer document is cut (in a file at a line's end), so that memory stays flat for any text.
LONGEST_DOCUMENT = 16_000_000

# Files beside a corpus that describe it.
ABOUT = {"README", "LICENSE", "LICENCE", "COPYING", "NOTICE", "CHANGELOG", "CONTRIBUTING"}
TITLE = re.compile(r" = [^=].* = ?$")  # title of an article in WikiText


class Corpus:
    """Documents of a source; can be iterated any number of times.

    Args:
        source: "embedded", "hub:NAME:SPLIT", "hub:NAME:CONFIG:SPLIT", or a file, folder or glob.
        column: Where the text is, in tables and hub data sets.
        document_start: Regular expression; a line (or row) that it matches at its start begins a document, and blank
            lines are dropped instead of separating documents.
        setting: What error messages call `source`.
    """

    def __init__(self, source: str, column: str = "text", document_start: str | None = None, setting: str = "data.source"):
        if not source:
            raise SettingError(setting, "", SOURCES)
        self.source, self.column, self.setting, self.document_start = source, column, setting, document_start
        try:
            self.starts = re.compile(document_start).match if document_start is not None else None
        except re.error as error:
            raise SettingError("data.document_start", document_start, f"a regular expression ({error})") from error
        self.hub = _parse_hub(source, setting) if source.startswith("hub:") else None
        self.fraction = 0.0  # share of the source read so far, for progress bars
        self._titles = 0

    def __iter__(self) -> Iterator[str]:
        self.fraction = 0.0
        empty = True
        for document in self._documents():
            if document and not document.isspace():
                empty = False
                yield document
            del document  # it may be large, and the next one is being read
        if empty:
            raise SettingError(self.setting, self.source, "a source with some", more=", which holds no text")

    def stamp(self) -> dict:
        """JSON-able description of all that shapes the documents, without reading them."""
        stamp: dict = {"column": self.column, "document_start": self.document_start}
        if self.source == "embedded":
            return {"embedded": list(sys.version_info[:3])}
        if self.hub:
            return stamp | hub_stamp(*self.hub)
        root = Path(self.source)
        return stamp | {"files": stamps(self.files(), root if root.is_dir() else None)}

    @property
    def local(self) -> bool:
        """Whether the source is files of the user, not the hub or the embedded corpus."""
        return self.source != "embedded" and not self.hub

    def files(self) -> list[Path]:
        """The files of a local source, sorted."""
        root = Path(self.source)
        if root.is_file():
            candidates = [root]
        elif root.is_dir():
            candidates = _below(root, self.setting)
        else:
            candidates = [Path(match) for match in glob.glob(self.source, recursive=True)]
            if not candidates:
                raise SettingError(self.setting, self.source, SOURCES, more=", which is not there")
        # Each once: a pattern may find a file twice, and a link may lead to one that is there, too. Only folders and links are
        # resolved: to resolve each file takes twice as long as finding them all.
        found: dict[tuple[str, str], Path] = {}
        real = functools.cache(os.path.realpath)
        for path in sorted(p for p in candidates if p.is_file() and kind_of(p)):
            at = path.resolve() if path.is_symlink() else path
            found.setdefault((real(at.parent), at.name), path)
        if not found:
            raise SettingError(self.setting, self.source, SUPPORTED, more=", where no file is of a kind that is read")
        return list(found.values())

    def files_read(self) -> str | None:
        """Which files a folder or a glob stands for, in one line; None for another source."""
        if not self.local or Path(self.source).is_file():
            return None
        files = self.files()
        by_suffix = ", ".join(
            f"{count} {suffix or 'without suffix'}" for suffix, count in Counter(map(_suffix, files)).most_common()
        )
        size = sum(path.stat().st_size for path in files) / 1e6
        told = f"{self.setting} {self.source}: {len(files)} file{'s' * (len(files) > 1)} ({by_suffix}), {size:,.1f} MB"
        about = [path for path in files if path.stem.upper() in ABOUT]
        texts = Counter(_suffix(path) for path in files if path.stem.upper() not in ABOUT)
        most = max(texts, key=texts.__getitem__, default="")
        # A pattern without a suffix, or with that of one of these files, would not leave them out.
        if about and most and most not in map(_suffix, about) and Path(self.source).is_dir():
            pattern, names = Path(self.source) / "**" / f"*{most}", ", ".join(sorted({path.name for path in about}))
            told += f"; {names} among them, which a pattern may leave out: {self.setting} '{pattern}'"
        return told

    def _documents(self) -> Iterator[str]:
        if self.source == "embedded":
            from lit_linformer.data.pretraining.embedded import embedded_documents

            documents = embedded_documents()
            for i, document in enumerate(documents):
                self.fraction = i / len(documents)
                yield document
        elif self.hub:
            yield from self._group_rows(self._hub_rows(*self.hub))
        else:
            files = self.files()
            total, done = sum(p.stat().st_size for p in files) or 1, 0
            for path in files:
                kind = kind_of(path)
                if kind == "text":
                    yield from self._group_lines(self._lines(path, done, total))
                else:
                    yield from self._group_rows(self._table_rows(path, done, total))
                done += path.stat().st_size

    # Grouping lines and rows into documents

    def _group_lines(self, lines: Iterable[tuple[str, bool]]) -> Iterator[str]:
        """Documents made of (line, whole?); the parts of a line that is too long are documents of their own."""
        if self.starts is not None:
            yield from self._group_rows(line for line, _ in lines)
            return
        paragraphs: list[str] = []
        size = 0
        for line, whole in lines:
            self._look_for_titles(line)
            if whole and line and not line.isspace():
                paragraphs.append(line)
                size += len(line) + 1
                if size < LONGEST_DOCUMENT:
                    continue
            if paragraphs:
                yield _joined(paragraphs)
                size = 0
            if not whole:
                yield line
        yield _joined(paragraphs)

    def _group_rows(self, rows: Iterable[str]) -> Iterator[str]:
        if self.starts is None:
            for row in rows:
                self._look_for_titles(row)
                yield row
            return
        document: list[str] = []
        size = 0
        for row in rows:
            if not row or row.isspace():
                continue
            if document and (self.starts(row) or size >= LONGEST_DOCUMENT):
                yield _joined(document)
                size = 0
            document.append(row)
            size += len(row) + 1
        yield _joined(document)

    def _look_for_titles(self, line: str) -> None:
        """Prints a note, once, on how to read WikiText's articles as documents, if lines look like their titles."""
        if not line.startswith(" = ") or self._titles > 2 or not TITLE.match(line):
            return
        self._titles += 1
        if self._titles > 2:
            note(
                f"{self.setting} {self.source}: lines such as {line.rstrip()!r} look like the titles of WikiText's articles; "
                "with --data.document_start '^ = [^=]' each article is a document"
            )

    # Reading

    def _lines(self, path: Path, done: int, total: int) -> Iterator[tuple[str, bool]]:
        for line, position, whole in text_parts(path, self.setting):
            self.fraction = (done + position) / total
            yield line, whole

    def _table_rows(self, path: Path, done: int, total: int) -> Iterator[str]:
        size = path.stat().st_size
        for fraction, where, (value,) in table_rows(path, self.choose, self.setting):
            self.fraction = (done + size * fraction) / total
            yield from self._text(value, where)

    def _hub_rows(self, name: str, config: str | None, split: str) -> Iterator[str]:
        rows = load_hub(name, config, split, self.source, self.setting)
        chosen = self.choose(self.source, rows.column_names)
        for fraction, where, (value,) in hub_rows(rows, chosen, self.source, self.setting):
            self.fraction = fraction
            yield from self._text(value, where)

    def _text(self, value, where: tuple) -> Iterator[str]:
        """The text of a row, in parts if it is too long for a document; none for a missing value."""
        text = self.checked(value, where)
        yield from (text[at : at + LONGEST_DOCUMENT] for at in range(0, len(text), LONGEST_DOCUMENT))

    def checked(self, value, where: tuple) -> str:
        """A row's value, "" if it is missing; UserError, which names the place, if it is no text."""
        if value is not None and not isinstance(value, str):
            more = f", which holds {type(value).__name__} in {row_name(where)}"
            raise SettingError("data.column", self.column, "a column of texts", more=more)
        return value or ""

    def choose(self, where, columns: Iterable[str]) -> list[str]:
        """The column to read from a table, as `tables.Chooser` wants it; UserError if there is no such column."""
        if self.column not in columns:
            allowed = ", ".join(map(shown, columns))
            error = SettingError("data.column", self.column, allowed, more=f", which {where} does not have")
            other = f"; or {self.setting} with a pattern, as '{self.source}/**/*.txt'" if Path(self.source).is_dir() else ""
            raise UserError(f"{error}{other}")
        return [self.column]


def _below(root: Path, setting: str) -> list[Path]:
    """Files below a folder that are not hidden; links are followed, each folder read once. UserError if one cannot be read."""

    def refuse(error: OSError) -> None:
        allowed = "folders that are open to reading, or a pattern that leaves it out"
        raise UserError(f"{setting}: {error.filename} cannot be read: {error.strerror}", allowed) from error

    found, seen = [], {root.resolve()}
    for here, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        shown = [name for name in sorted(folders) if name[0] != "." and name != "lost+found"]  # a file system's own
        inner = {Path(here, name).resolve(): name for name in shown}
        folders[:] = [name for path, name in inner.items() if path not in seen]
        seen |= inner.keys()
        found += [Path(here, name) for name in names if name[0] != "."]
    return found


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix


def _joined(lines: list[str]) -> str:
    """Joins lines into a document, and empties the list, so that nothing refers to them any longer."""
    document = "\n".join(lines)
    lines.clear()
    return document


def _parse_hub(source: str, setting: str) -> list:
    """hub:NAME[:CONFIG]:SPLIT → [name, config or None, split]; a colon in brackets is the split's own (train[:1%])."""
    parts = re.split(r":(?![^\[]*\])", source)[1:]
    if len(parts) not in (2, 3) or not all(parts):
        raise SettingError(setting, source, "hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    return [parts[0], parts[1] if len(parts) == 3 else None, parts[-1]]
