"""Lines, rows and files too long to be read at once: read in parts, nothing lost, in little memory."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.text_tasks import own_task
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.reading import text_lines


@pytest.fixture
def short(monkeypatch):
    """Counts lines of more than 100 bytes as long."""
    for module in ("reading", "finetuning.labelled_rows"):
        monkeypatch.setattr(f"lit_linformer.data.{module}.LONGEST_LINE", 100)


LONG = {
    "words": "word café " * 40,
    "one word": "é" * 333,
    "not a character a byte": "\N{GRINNING FACE}x" * 77,
    "exactly two parts": "a" * 200,
    "almost": "a" * 100,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\nnext"])
def test_a_long_line_is_cut_into_documents(short, tmp_path, name, end):
    (tmp_path / "a.txt").write_bytes(f"\ufefffirst\nof two\n{LONG[name]}{end}".encode())
    first, *parts = Corpus(str(tmp_path))
    assert first == "first\nof two"
    if end.endswith("next"):
        assert parts.pop() == "next"
    assert "".join(parts) == LONG[name]
    assert len(parts) > 1 or name == "almost"
    assert all(part.endswith(" ") for part in parts[:-1]) or " " not in LONG[name]


def test_a_long_line_behind_a_byte_order_mark(short, tmp_path):
    (tmp_path / "a.txt").write_bytes(("\ufeff" + LONG["one word"]).encode())  # the first part ends within a character
    assert "".join(Corpus(str(tmp_path))) == LONG["one word"]


def test_what_is_not_utf8_in_a_long_line_is_named_by_its_place(short, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n" + b"x" * 250 + b"\xff" + b"x" * 30)
    with pytest.raises(ValueError, match=r"a.txt, line 2 is not UTF-8: byte 0xff at its position 250; allowed"):
        list(Corpus(str(tmp_path)))
    (tmp_path / "a.txt").write_bytes("é".encode() * 100 + b"\xc3")
    with pytest.raises(ValueError, match=r"a.txt, line 1 is not UTF-8: byte 0xc3 at its position 200"):
        list(Corpus(str(tmp_path)))


def test_a_labelled_row_that_is_too_long_is_refused(short, tmp_path):
    (tmp_path / "train.tsv").write_text(f"text\tlabel\n{'x' * 200}\ta")
    with pytest.raises(ValueError, match=r"train\S+, line \d is longer than 100 bytes; allowed: lines up to that"):
        list(LabelledSource(str(tmp_path), own_task(["text"], labels=["a", "b"])).rows("train"))


def test_a_csv_field_that_is_too_long_may_have_closed_its_quote(monkeypatch, tmp_path):
    """The error said that the quote was never closed."""
    monkeypatch.setattr("lit_linformer.data.tables.LONGEST_LINE", 100)
    (tmp_path / "train.csv").write_text(f'text,label\n"{"x, " * 50}",a\n')
    with pytest.raises(ValueError, match=r"line 2 begins .* a quote is opened and not closed within 100 characters; allowed"):
        list(LabelledSource(str(tmp_path), own_task(["text"], labels=["a", "b"])).rows("train"))


@pytest.mark.parametrize(
    "kind, place, unit", [("folders", "row", "bytes"), ("json", "line", "characters"), ("parquet", "row", "characters")]
)
def test_a_labelled_text_that_is_too_long_is_refused(short, tmp_path, kind, place, unit):
    if kind == "folders":
        for label in ("a", "b"):
            (tmp_path / "train" / label).mkdir(parents=True)
            (tmp_path / "train" / label / "1.txt").write_text("one\n" * 50)
    elif kind == "json":
        (tmp_path / "train.jsonl").write_text(json.dumps({"text": "x" * 200, "label": "a"}))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 200], "label": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=f", {place} 1 has a text of more than 100 {unit}; allowed: up to that"):
        list(LabelledSource(str(tmp_path), own_task(["text"], labels=["a", "b"])).rows("train"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_long_rows_are_cut_into_documents(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("lit_linformer.data.pretraining.corpus.LONGEST_DOCUMENT", 300)
    texts = ["x\n" * 400, "kurz", "\N{GRINNING FACE} é\n" * 60, "", None]
    if suffix == ".jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"id": [{}], "text": text}) for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    parts = list(Corpus(str(tmp_path)))
    assert [len(part) for part in parts] == [300, 300, 200, 4, 240]
    assert "".join(parts) == "".join(filter(None, texts))


def test_a_line_of_json_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_linformer.data.tables.LONGEST_JSON", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + json.dumps({"text": "x" * 100}))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2 is longer than 100 bytes; allowed: lines up to that"):
        list(Corpus(str(tmp_path)))


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "x"}', r"a.jsonl, line 1 is nested too deep; allowed: JSON"),
        (b'{"text": "\xed\xa0\x80"}', r"a.jsonl, line 1 is not a line of JSON: 'utf-8' codec can't decode"),
    ],
)
def test_json_that_python_stumbles_over_is_named_by_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=message):
        list(Corpus(str(tmp_path)))


def test_a_folder_is_no_file_of_texts(tmp_path):
    with pytest.raises(ValueError, match=r"^file: .* is a folder; allowed: a file of text, one on each line, or a table$"):
        list(text_lines(tmp_path, "file"))


def test_a_pipe_is_refused():
    read, write = os.pipe()
    try:
        with pytest.raises(ValueError, match=rf"data.file: /dev/fd/{read} is a pipe; allowed: a file"):
            list(text_lines(Path(f"/dev/fd/{read}"), "data.file"))
    finally:
        os.close(read)
        os.close(write)


def test_half_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d\ude00 cut \ud83d", "n": 1}' + b"\n" + rb'{"text": "\\ud800"}')
    assert list(Corpus(str(tmp_path))) == ["\U0001f600 cut \ufffd", "\\ud800"]


def test_parquet_that_is_not_utf8_is_named_by_file_and_row(tmp_path):
    column = pyarrow.array([b"fine", b"\xff"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet, row 2 is not UTF-8: 'utf-8' codec can't decode byte 0xff"):
        list(Corpus(str(tmp_path)))


def test_an_archive_that_wants_a_gigabyte_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text", filters=filters))
    with pytest.raises(ValueError, match=r"a.txt.xz cannot be read: Memory usage limit exceeded"):
        list(Corpus(str(tmp_path)))


# Memory


PREPARE = """
import sys

def peak():  # ru_maxrss may count the parent
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

from lit_linformer.cli import app, main
imported = peak()
main(sys.argv[1:])
print(peak() - imported)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_no_text_takes_a_gigabyte(tmp_path, tokenizer):
    """Beyond imports, 0.44 GB (CUDA: 0.84). A byte of zeros or emoji takes 130 in a tokenizer, one of lists 24 in a parser."""
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    with lzma.open(tmp_path / "texts/zeros.txt.xz", "wb", preset=0) as file:
        for _ in range(5):
            file.write(bytes(1_000_000))
    (tmp_path / "texts/emoji.txt").write_text("\N{GRINNING FACE}" * 1_000_000)
    (tmp_path / "texts/lists.jsonl").write_text('{"x": [' + "[]," * 2_000_000 + '0], "text": "hello world"}\n')
    (tmp_path / "texts/spaces.txt").write_text(" " * 20_000_000 + "end")
    settings = {"source": "texts", "tokenizer": "tokenizer.json", "validation_fraction": 0, "test_fraction": 0}
    argv = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    result = subprocess.run([sys.executable, "-c", PREPARE, "prepare", *argv], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < 400_000_000
