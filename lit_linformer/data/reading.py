"""Files and hub data sets, read row by row: what pretraining and fine-tuning data have in common.

`setting` is what error messages call the source that is being read.
"""

import codecs
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_linformer.utils.errors import SettingError, UserError, first_line

JSON, PARQUET, COMPRESSED = {".jsonl", ".ndjson", ".json"}, {".parquet"}, {".gz", ".xz", ".zst"}
LONGEST_LINE = 16_000_000  # most bytes of a line that are read at once, so that memory stays flat
LONGEST_JSON = 100_000_000  # bytes; a line of JSON is parsed whole
MOST_XZ_MEMORY = 150_000_000  # bytes
HALF_A_PAIR = re.compile("[\ud800-\udfff]")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def raw_parts(path: Path, setting: str, longest: int) -> Iterator[tuple[int, bytes, int, bool, bool]]:
    """(line number from 1, line, bytes of the file read so far, whether it is a whole line, whether it ends the line).

    The file is decompressed as its name says. A line of more than `longest` bytes comes in parts, all with its number, none of
    them whole.
    """
    with readable(path, setting), open(path, "rb") as raw, decompressed(raw, path) as stream:
        if not raw.seekable():
            raise UserError(f"{setting}: {path} is a pipe", "a file, since it is read more than once")
        number, begins, mark = 1, True, BYTE_ORDER_MARK
        while line := stream.readline(longest):
            ends = len(line) < longest or line.endswith(b"\n")
            yield number, line.removeprefix(mark), raw.tell(), begins and ends, ends
            number, begins, mark = number + ends, ends, b""
        if not begins:  # the file ends just where a part was full
            yield number, b"", raw.tell(), False, True


def raw_lines(path: Path, setting: str, longest: int | None = None) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, bytes of the file read so far); a line of more than `longest` bytes (None: LONGEST_LINE) is an error."""
    longest = longest or LONGEST_LINE
    for number, line, position, whole, _ in raw_parts(path, setting, longest):
        if not whole:
            raise UserError(f"{setting}: {path}, line {number} is longer than {longest:,} bytes", "lines up to that")
        yield number, line, position


def text_lines(path: Path, setting: str) -> Iterator[tuple[int, str, int]]:
    """The same, decoded as UTF-8, without line ends."""
    for number, line, position in raw_lines(path, setting):
        try:
            yield number, line.rstrip(b"\r\n").decode(), position
        except UnicodeDecodeError as error:
            raise not_utf8(setting, path, number, error) from error


def text_parts(path: Path, setting: str) -> Iterator[tuple[str, int, bool]]:
    """(line, bytes read so far, whether it is whole); a line of more than LONGEST_LINE bytes comes in parts, cut after white
    space."""
    decoder, rest, before = codecs.getincrementaldecoder("utf-8")(), "", 0
    for number, line, position, whole, ends in raw_parts(path, setting, LONGEST_LINE):
        try:
            text = line.decode() if whole else rest + decoder.decode(line, ends)
        except UnicodeDecodeError as error:
            raise not_utf8(setting, path, number, error, before + len(line) - len(error.object)) from error
        if ends:
            before, rest, text = 0, "", text.rstrip("\r\n")
        else:
            before += len(line)
            at = max(text.rfind(space, max(0, len(text) - 1_000_000)) for space in " \t\r\f\v") + 1
            text, rest = (text[:at], text[at:]) if at else (text, "")
        yield text, position, whole


def not_utf8(setting: str, path: Path, number: int, error: UnicodeDecodeError, before: int = 0) -> UserError:
    return UserError(
        f"{setting}: {path}, line {number} is not UTF-8: byte 0x{error.object[error.start]:02x} at its "
        f"position {before + error.start}",
        "a file in UTF-8",
    )


def json_object(line: bytes, where: str, setting: str) -> dict:
    """The object that a line of JSON holds; UserError if it holds none."""
    try:
        text = line.decode()  # given bytes, json.loads would accept lone surrogates
        row = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            written = json.dumps(row, ensure_ascii=False)
            if HALF_A_PAIR.search(written):  # of surrogates, which text that was cut may have, is not valid in UTF-8
                row = json.loads(HALF_A_PAIR.sub("\ufffd", written))
    except RecursionError as error:
        raise UserError(f"{setting}: {where} is nested too deep", "JSON that is at most some hundred levels deep") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise UserError(f"{setting}: {where} is not a line of JSON: {error}", "an object on each line") from error
    if not isinstance(row, dict):
        raise UserError(f"{setting}: {where} is a JSON {type(row).__name__}", "an object on each line")
    return row


def parquet_file(path: Path, setting: str):
    """pyarrow's ParquetFile."""
    import pyarrow.parquet

    with readable(path, setting):
        # by default a row group's whole column would be read at once
        return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)


def parquet_batches(file, path: Path, columns: list[str], setting: str) -> Iterator:
    """Arrow's record batches of these columns: a few megabytes each, or one of the file's pages if that is larger."""
    with readable(path, setting):
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            parts = [group.column(i) for i in range(group.num_columns)]
            size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema in columns)
            rows = min(100, max(1, 4_000_000 * group.num_rows // max(size, 1)))
            yield from file.iter_batches(batch_size=rows, row_groups=[number], columns=columns)


def cells(column, first: int, where, setting: str) -> Iterator:
    """Python values of an Arrow column, one by one.

    first, where, setting: for error messages, the number of the first row, the file and the source.
    """
    for number, cell in enumerate(column, first):
        try:
            yield cell.as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"{setting}: {where}, row {number} is not UTF-8: {error}") from error


def load_hub(name: str, config: str | None, split: str | None, source: str, setting: str):
    """A Hugging Face data set, or one split of it; by name or as a local folder in the hub's layout."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # requests', httpx', hub's and built-in errors, according to what went wrong
        reason = first_line(error)
        what = "name, configuration and split" if split else "name and configuration"
        raise SettingError(
            setting,
            source,
            f"a data set's {what}, or without network the path of a local copy",
            more=f", which cannot be loaded ({reason})",
        ) from error


def hub_stamp(name: str, *rest: str | None) -> dict:
    """What identifies a hub data set; for a local copy this includes its files."""
    root = Path(name)
    if not root.is_dir():
        return {"hub": [name, *rest], "files": None}
    return {"hub": [root.name, *rest], "files": stamps(sorted(p for p in root.rglob("*") if p.is_file()), root)}


def stamps(files: list[Path], root: Path | None) -> list:
    """[name, size, modification time] of each file, which identify contents without reading them."""
    stats = [path.stat() for path in files]
    names = [path.relative_to(root).as_posix() if root else path.name for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(names, stats, strict=True)]


@contextmanager
def readable(path: Path, setting: str):
    """Turns errors from reading a broken file into a UserError that names it."""
    try:
        yield
    except IsADirectoryError as error:
        raise UserError(f"{setting}: {path} is a folder", "a file of text, one on each line, or a table") from error
    # OSError: also gzip's and Arrow's (zstd) own; EOFError: a truncated gz or xz; ArrowInvalid is the ValueError
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{setting}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting}: {path} is not UTF-8: {error}") from error
    except ValueError as error:
        if type(error).__name__ == "ArrowInvalid":
            raise UserError(f"{setting}: {path} is no Parquet file: {error}") from error
        raise


def decompressed(raw, path: Path):
    """The decompressed content of an open file, as a stream; a name without .gz, .xz or .zst means uncompressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        # A decompression bomb of some kilobytes may need gigabytes of memory; xz -9 needs 65 MB.
        lzma.LZMADecompressor(memlimit=MOST_XZ_MEMORY).decompress(raw.read(1 << 16), max_length=1)
        raw.seek(0)
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 20)
    return raw
