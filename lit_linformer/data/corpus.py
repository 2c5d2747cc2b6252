"""Corpus: a source of text, named by one string, as a stream of documents.

    Corpus("embedded")                            the documentation that every Python carries
    Corpus("texts/")                              a folder, a file or a glob
    Corpus("hub:wikitext:wikitext-103-raw-v1:train")   a Hugging Face data set, or a local folder in the hub's layout

Plain text holds a document between blank lines; JSON lines, Parquet and the hub hold one a row. Everything streams:
memory does not grow with the corpus.
"""

import glob
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEXT, JSON, PARQUET = {"", ".txt", ".text", ".tokens", ".md", ".raw"}, {".jsonl", ".ndjson", ".json"}, {".parquet"}
COMPRESSED = {".gz", ".xz", ".zst"}
SUPPORTED = "text (.txt .text .tokens .md .raw or none), .jsonl .ndjson .json, each also .gz .xz .zst, and .parquet"
# A file without blank lines is cut here (at a line's end), so that memory stays flat whatever the file is.
LONGEST_DOCUMENT = 16_000_000


class Corpus:
    """Documents of a source; can be iterated again and again.

    Args:
        source: "embedded", "hub:NAME:SPLIT", "hub:NAME:CONFIG:SPLIT", or a file, folder or glob.
        column: Where the text is, in JSON lines, Parquet and hub data sets.
        document_start: Regular expression; a line (or row) that it matches at its start begins a document, and blank
            lines are dropped instead of separating.
        setting: What error messages call `source`.
    """

    def __init__(self, source: str, column: str = "text", document_start: str | None = None, setting: str = "data.source"):
        if not source:
            raise ValueError(f"{setting} is empty: give 'embedded', 'hub:NAME:SPLIT', or a file, folder or glob")
        self.source, self.column, self.setting, self.document_start = source, column, setting, document_start
        try:
            self.starts = re.compile(document_start).match if document_start is not None else None
        except re.error as error:
            raise ValueError(f"data.document_start={document_start!r} is no regular expression: {error}") from error
        self.hub = _parse_hub(source, setting) if source.startswith("hub:") else None
        self.fraction = 0.0  # of the source read so far, for progress bars

    def __iter__(self) -> Iterator[str]:
        self.fraction = 0.0
        empty = True
        for document in self._documents():
            if document and not document.isspace():
                empty = False
                yield document
        if empty:
            raise ValueError(f"{self.setting}={self.source!r} holds no text")

    def stamp(self) -> dict:
        """JSON-able description of all that shapes the documents, without reading them."""
        stamp: dict = {"column": self.column, "document_start": self.document_start}
        if self.source == "embedded":
            return {"embedded": list(sys.version_info[:3])}
        if self.hub:
            root = Path(self.hub[0])
            local = _stamps(sorted(p for p in root.rglob("*") if p.is_file()), root) if root.is_dir() else None
            return stamp | {"hub": self.hub if local is None else [root.name, *self.hub[1:]], "files": local}
        root = Path(self.source)
        return stamp | {"files": _stamps(self.files(), root if root.is_dir() else None)}

    def files(self) -> list[Path]:
        """The files of a local source, sorted."""
        root = Path(self.source)
        if root.is_file():
            candidates = [root]
        elif root.is_dir():
            candidates = [p for p in root.rglob("*") if not any(part[0] == "." for part in p.relative_to(root).parts)]
        else:
            candidates = [Path(match) for match in glob.glob(self.source, recursive=True)]
            if not candidates:
                raise ValueError(f"{self.setting}={self.source!r}: no such file, folder, glob, 'embedded' or 'hub:…'")
        files = sorted(p for p in candidates if p.is_file() and _kind(p))
        if not files:
            raise ValueError(f"{self.setting}={self.source!r}: no file of a kind that is read: {SUPPORTED}")
        return files

    def _documents(self) -> Iterator[str]:
        if self.source == "embedded":
            from lit_linformer.data.embedded import embedded_documents

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
                kind = _kind(path)
                if kind == "parquet":
                    yield from self._group_rows(self._parquet_rows(path, done, total))
                elif kind == "json":
                    yield from self._group_rows(self._json_rows(path, done, total))
                else:
                    yield from self._group_lines(self._lines(path, done, total))
                done += path.stat().st_size

    # Grouping lines and rows into documents

    def _group_lines(self, lines: Iterable[str]) -> Iterator[str]:
        if self.starts is not None:
            yield from self._group_rows(lines)
            return
        paragraphs, size = [], 0
        for line in lines:
            if line and not line.isspace():
                paragraphs.append(line)
                size += len(line) + 1
                if size < LONGEST_DOCUMENT:
                    continue
            if paragraphs:
                yield "\n".join(paragraphs)
                paragraphs, size = [], 0
        yield "\n".join(paragraphs)

    def _group_rows(self, rows: Iterable[str]) -> Iterator[str]:
        if self.starts is None:
            yield from rows
            return
        document, size = [], 0
        for row in rows:
            if not row or row.isspace():
                continue
            if document and (self.starts(row) or size >= LONGEST_DOCUMENT):
                yield "\n".join(document)
                document, size = [], 0
            document.append(row)
            size += len(row) + 1
        yield "\n".join(document)

    # Reading

    def _raw_lines(self, path: Path, done: int, total: int) -> Iterator[tuple[int, bytes]]:
        with self._readable(path), open(path, "rb") as raw, _decompressed(raw, path) as stream:
            for number, line in enumerate(stream, 1):
                self.fraction = (done + raw.tell()) / total
                yield number, line

    def _lines(self, path: Path, done: int, total: int) -> Iterator[str]:
        for number, line in self._raw_lines(path, done, total):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte-order mark
            try:
                yield line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.setting}: {path}, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at its "
                    f"position {error.start}: convert the file to UTF-8"
                ) from error

    def _json_rows(self, path: Path, done: int, total: int) -> Iterator[str]:
        for number, line in self._raw_lines(path, done, total):
            if line.isspace():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
                raise ValueError(f"{self.setting}: {where} is not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{self.setting}: {where} must hold one JSON object a line, not {type(row).__name__}")
            if self.column not in row:
                raise self._no_column(where, row)
            yield self._text(row[self.column], where)

    def _parquet_rows(self, path: Path, done: int, total: int) -> Iterator[str]:
        import pyarrow.parquet

        with self._readable(path):
            file = pyarrow.parquet.ParquetFile(path)
            if self.column not in file.schema_arrow.names:
                raise self._no_column(path, file.schema_arrow.names)
            rows, read = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=1000, columns=[self.column]):
                for value in batch.column(0).to_pylist():
                    yield self._text(value, path)
                read += batch.num_rows
                self.fraction = (done + path.stat().st_size * read / rows) / total

    def _hub_rows(self, name: str, config: str | None, split: str) -> Iterator[str]:
        import datasets

        try:
            rows = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # requests', httpx', hub's and built-in errors, according to what went wrong
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"{self.setting}={self.source!r} cannot be loaded: {reason} "
                "(check name, configuration and split; without network give the path of a local copy)"
            ) from error
        if self.column not in rows.column_names:
            raise self._no_column(self.source, rows.column_names)
        rows, read = rows.select_columns([self.column]), 0
        for batch in rows.iter(batch_size=1000):
            for value in batch[self.column]:
                yield self._text(value, self.source)
            read += len(batch[self.column])
            self.fraction = read / len(rows)

    def _text(self, value, where) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            kind = type(value).__name__
            raise ValueError(f"data.column={self.column!r} holds {kind}, not text, in {where}: name another column")
        return value

    def _no_column(self, where, columns: Iterable[str]) -> ValueError:
        return ValueError(f"data.column={self.column!r} is not in {where}: there are {', '.join(map(repr, columns))}")

    @contextmanager
    def _readable(self, path: Path):
        try:
            yield
        # OSError: also gzip's and Arrow's (zstd) own; EOFError: a truncated gz or xz; ArrowInvalid is the ValueError
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{self.setting}: {path} cannot be read: {error}") from error
        except ValueError as error:
            if type(error).__name__ == "ArrowInvalid":
                raise ValueError(f"{self.setting}: {path} is no Parquet file: {error}") from error
            raise


def _parse_hub(source: str, setting: str) -> list:
    """hub:NAME[:CONFIG]:SPLIT → [name, config or None, split]; a colon in brackets is the split's own (train[:1%])."""
    parts = re.split(r":(?![^\[]*\])", source)[1:]
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"{setting}={source!r}: a data set is written hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    return [parts[0], parts[1] if len(parts) == 3 else None, parts[-1]]


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes.pop() if suffixes else ""
    if last in PARQUET:
        return "parquet"
    if last in COMPRESSED:
        last = suffixes.pop() if suffixes else ""
    return "json" if last in JSON else "text" if last in TEXT else None


def _stamps(files: list[Path], root: Path | None) -> list:
    stats = [(path, path.stat()) for path in files]
    names = [path.relative_to(root).as_posix() if root else path.name for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, (_, stat) in zip(names, stats, strict=True)]


def _decompressed(raw, path: Path):
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 20)
    return raw
