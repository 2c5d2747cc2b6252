"""Files and hub data sets, read row by row: what pretraining and fine-tuning data have in common.

`setting` is what error messages call the source that is being read.
"""

import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

JSON, PARQUET, COMPRESSED = {".jsonl", ".ndjson", ".json"}, {".parquet"}, {".gz", ".xz", ".zst"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def raw_lines(path: Path, setting: str) -> Iterator[tuple[int, bytes, int]]:
    """(number from 1, line, bytes of the file read so far), decompressed according to the file's name."""
    with readable(path, setting), open(path, "rb") as raw, decompressed(raw, path) as stream:
        for number, line in enumerate(stream, 1):
            yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, raw.tell()


def text_lines(path: Path, setting: str) -> Iterator[tuple[int, str, int]]:
    """The same in UTF-8, without line ends."""
    for number, line, position in raw_lines(path, setting):
        try:
            yield number, line.rstrip(b"\r\n").decode(), position
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{setting}: {path}, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at its "
                f"position {error.start}: convert the file to UTF-8"
            ) from error


def json_objects(path: Path, setting: str) -> Iterator[tuple[int, dict, int]]:
    """(line number, object, bytes read so far) of JSON lines."""
    for number, line, position in raw_lines(path, setting):
        if line.isspace():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
            raise ValueError(f"{setting}: {where} is not a line of JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{setting}: {where} must hold one JSON object a line, not {type(row).__name__}")
        yield number, row, position


def load_hub(name: str, config: str | None, split: str | None, source: str, setting: str):
    """A Hugging Face data set, or one split of it; by name or as a local folder in the hub's layout."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # requests', httpx', hub's and built-in errors, according to what went wrong
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = "name, configuration and split" if split else "name and configuration"
        raise ValueError(
            f"{setting}={source!r} cannot be loaded: {reason} (check {what}; without network give the path of a local copy)"
        ) from error


def hub_stamp(name: str, *rest: str | None) -> dict:
    """What tells one hub data set from another; of a local copy also its files."""
    root = Path(name)
    if not root.is_dir():
        return {"hub": [name, *rest], "files": None}
    return {"hub": [root.name, *rest], "files": stamps(sorted(p for p in root.rglob("*") if p.is_file()), root)}


def stamps(files: list[Path], root: Path | None) -> list:
    """[name, size, time of last change] of each file: other contents have another stamp."""
    stats = [(path, path.stat()) for path in files]
    names = [path.relative_to(root).as_posix() if root else path.name for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, (_, stat) in zip(names, stats, strict=True)]


@contextmanager
def readable(path: Path, setting: str):
    """Turns what reading a broken file raises into a ValueError that names it."""
    try:
        yield
    # OSError: also gzip's and Arrow's (zstd) own; EOFError: a truncated gz or xz; ArrowInvalid is the ValueError
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{setting}: {path} cannot be read: {error}") from error
    except ValueError as error:
        if type(error).__name__ == "ArrowInvalid":
            raise ValueError(f"{setting}: {path} is no Parquet file: {error}") from error
        raise


def decompressed(raw, path: Path):
    """A stream of what is in an open file that is named .gz, .xz, .zst or otherwise."""
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
