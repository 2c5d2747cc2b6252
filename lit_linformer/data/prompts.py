"""Input of `predict`: `data.text`, and the rows of `data.file`, which is read like the files of training."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lit_linformer.data.reading import text_lines
from lit_linformer.data.tables import TABLE_FILES, TABLES, kind_of
from lit_linformer.utils.errors import SettingError, UserError


class Prompt(NamedTuple):
    """A text, or a pair of them, to fill or to classify.

    Args:
        where: What error messages call it.
        texts: One text, or the two of a pair.
        place: Where it is in data.file, as in predictions.jsonl: {"line": 3}, or {"row": 3} of Parquet.
        label: The class number or value given with it.
    """

    where: str
    texts: tuple[str, ...]
    place: Mapping[str, int] = {}
    label: int | float | None = None


def no_prompts(file: str | None) -> UserError:
    """The error to raise if data.text and data.file give no text."""
    if file is not None:
        return SettingError("data.file", file, "a file with one text on each line, or a table", more=", which holds no text")
    allowed = "a text or a list of them, or a file (one text on each line, or a table)"
    return UserError("data.text is not given, nor is data.file", allowed)


def given_texts(text: str | list[str] | None) -> list[Prompt]:
    texts = [text] if isinstance(text, str) else list(text or [])
    return [Prompt("data.text", (each,)) for each in texts]


def is_table(file: str) -> bool:
    path = Path(file)
    if kind_of(path) in TABLES and not path.is_file():
        raise SettingError("data.file", file, f"a file of text, or a table ({TABLE_FILES})", more=", which is not there")
    return kind_of(path) in TABLES


def text_prompts(file: str) -> Iterator[Prompt]:
    """The lines of a plain-text file that are not blank."""
    for number, line, _ in text_lines(Path(file), "data.file"):
        if line.strip():
            yield Prompt(at(file, "line", number), (line,), {"line": number})


def at(file: str, unit: str, number: int) -> str:
    return f"data.file={file!r}, {unit} {number}"
