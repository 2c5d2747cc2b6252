"""Tables: the same rows from CSV, TSV, JSON lines and Parquet, for pretraining, fine-tuning and predict; and bad files."""

import csv
import gzip
import io
import json
import lzma
import shlex

import pyarrow
import pyarrow.parquet
import pytest

from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.prompts import read_texts
from lit_linformer.data.finetuning.text_tasks import own_task
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.prompts import read_prompts
from lit_linformer.data.tables import column_names, kind_of, table_rows

PLAIN = [("a film, so good", "good"), ('it "is" bad', "bad"), ("größer", "good")]
ROWS = [*PLAIN, ("two\nlines\r\nof it", "bad")]  # which TSV cannot hold
OWN = own_task(["text"], labels=["bad", "good"])
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write(folder, name, rows=ROWS, newline="\r\n"):
    """Writes a table with a column before the text and one after the label."""
    heads = ["id", "text", "label", "more"]
    full = [[i, text, label, ""] for i, (text, label) in enumerate(rows)]
    kind = name.split(".")[1]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table([list(column) for column in zip(*full, strict=True)], heads), folder / name)
        return folder / name
    if kind == "csv":
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator=newline).writerows([heads, *full])
        text = text.getvalue()
    elif kind == "tsv":
        text = "".join("\t".join(map(str, row)) + "\n" for row in [heads, *full])
    else:
        text = "".join(json.dumps(dict(zip(heads, row, strict=True))) + "\n" for row in full)
    (folder / name).write_bytes(PACK.get(name[name.rindex(".") :], bytes)(text.encode()))
    return folder / name


@pytest.mark.parametrize(
    "name", ["t.csv", "t.csv.gz", "t.csv.xz", "t.tsv", "t.tsv.gz", "t.jsonl", "t.json", "t.ndjson.xz", "t.parquet"]
)
def test_every_command_reads_the_same_rows(tmp_path, name):
    rows = PLAIN if ".tsv" in name else ROWS
    path = write(tmp_path, name, rows)
    assert list(Corpus(str(path))) == list(Corpus(str(tmp_path))) == [text for text, _ in rows]
    assert [(row.texts[0], OWN.labels[row.label]) for row in LabelledSource(str(path), OWN).rows("train")] == rows
    assert LabelledSource(str(path), OWN).splits() == ["train"]
    (tmp_path / "split").mkdir()
    path.rename(tmp_path / "split" / f"dev.{name[2:]}")
    found = LabelledSource(str(tmp_path / "split"), OWN).rows("validation")
    assert [(row.texts[0], OWN.labels[row.label]) for row in found] == rows
    path = str(tmp_path / "split" / f"dev.{name[2:]}")
    found = read_texts(None, None, path, OWN)
    assert [(prompt.texts[0], OWN.label_name(prompt.label)) for prompt in found] == rows
    prompts = read_prompts("one", path, "text")
    assert [prompt.texts[0] for prompt in prompts] == ["one", *(text for text, _ in rows)]
    unit = "row" if name == "t.parquet" else "line"
    headers = any(kind in name for kind in (".csv", ".tsv"))
    assert [prompt.place for prompt in prompts[:3]] == [{}, {unit: 1 + headers}, {unit: 2 + headers}]
    assert prompts[2].where == f"data.file={path!r}, {unit} {2 + headers}"


def test_lines_of_a_csv_are_those_of_the_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\n"a\nb\nc",good\n\n  x ,bad\n')
    rows = list(table_rows(path, lambda where, names: ["text", None, "label"], "data.source"))
    assert [(row.where[1:], row.values) for row in rows] == [
        (("line", 2), ["a\nb\nc", None, "good"]),
        (("line", 6), ["  x ", None, "bad"]),
    ]
    assert [row.fraction for row in rows][-1] == 1.0 and column_names(path, "data.source") == ["text", "label"]


def test_a_long_field_is_no_error(tmp_path):
    (tmp_path / "t.csv").write_text("text\n" + "word " * 100_000 + "\n")
    assert [len(text) for text in Corpus(str(tmp_path))] == [500_000]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "text;label\nx;good\n", r"t.csv has no column 'text' .*'text;label'; its first line looks divided by ';'"),
        ("t.csv", "text\tlabel\nx\tgood\n", r"its first line looks divided by tabs, and a .csv file is divided by commas$"),
        ("t.tsv", "text,label\nx,good\n", r"its first line looks divided by commas, and a .tsv file is divided by tabs$"),
        ("t.csv", "so fine,1\nx,0\n", r"'so fine', '1'; its first line looks like a row: the first line names the columns$"),
        (
            "t.csv",
            "body,label\nx,good\n",
            r"no column 'text' \(data.columns\); allowed: .*, 'body', 'label'$",
        ),
        ("t.csv", "text,class\nx,good\n", r"no column 'label' \(data.label_column\); allowed: .* 'text', 'class'$"),
        ("t.csv", "text,text,label\nx,y,good\n", r"has two columns 'text'; allowed: one of that name$"),
        ("t.csv", "text,label\nx,good\ny, z,bad\n", r"t.csv, line 3 has 3 fields; allowed: 2, as its first line \(quotes"),
        ("t.csv", "text,label\nx\n", r"t.csv, line 2 has 1 fields; allowed: 2"),
        ("t.csv", 'text,label\nx,good\n"y,bad\nz,good\n', r"t.csv, line 3 begins a row that is no CSV: a quote is opened and"),
        ("t.csv", 'text,label\n"y"z,bad\n', r"t.csv, line 2 begins a row that is no CSV: a quoted field continues after"),
        ("t.csv", "text,label\nx\ry,good\n", r"t.csv, line 2 begins a row that is no CSV: a carriage return is outside"),
        ("t.csv", b"text,label\nx\xff,good\n", r"t.csv, line 2 is not UTF-8: byte 0xff at its position 1"),
        ("t.csv", "", r"t.csv is empty; allowed: a line with the columns' names, and rows$"),
        ("t.csv", "text,label\n", r"whose train split is empty; allowed: 1 row or more"),
        ("t.csv", "text,label\nx,fine\n", r"t.csv, line 2: label is 'fine'; allowed: 'bad', 'good', or"),
        (
            "t.csv",
            "text,label\nx,-1\n",
            r"line 2 has the label -1, which stands for none; allowed: one in every train row, or '-1' among data.labels$",
        ),
        ("t.csv", "text,label\nx,\n", r"t.csv, line 2 has no label; allowed: one in every train row$"),
        (
            "t.csv",
            "text,label\n ,good\n",
            r"line 2: 'text' is empty; allowed: text, or none with data.empty_texts keep$",
        ),
        ("t.csv.gz", "text,label\n", r"t.csv.gz cannot be read: "),
    ],
)
def test_bad_tables(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        list(LabelledSource(str(path), OWN).rows("train"))
    assert str(caught.value).startswith("data.source") and "\n" not in str(caught.value)


def test_two_columns_of_one_name_in_parquet(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["good"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text", "label"]), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t.parquet has two columns 'text'; allowed: one of that name$"):
        list(LabelledSource(str(tmp_path / "t.parquet"), OWN).rows("train"))


def test_rows_of_parquet_are_counted_through_its_parts(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [*"abcdef"]}), tmp_path / "t.parquet", row_group_size=2)
    rows = table_rows(tmp_path / "t.parquet", lambda where, names: ["text"], "data.source")
    assert [(row.where[2], row.fraction, row.values) for row in rows] == [(i, i / 6, (x,)) for i, x in enumerate("abcdef", 1)]


def test_classes_and_columns_are_asked_for_with_those_that_are_there(tmp_path):
    from lit_linformer.data.finetuning.text_tasks import chosen_task

    path = write(tmp_path, "t.csv")
    with pytest.raises(
        ValueError, match=r"line 2: label is 'good'; allowed: a finite number .*, here --data.labels '\[bad,good\]'$"
    ):
        list(LabelledSource(str(path), own_task(["text"])).rows("train"))
    with pytest.raises(ValueError, match=r"label is 'good'; allowed: 'no', 'yes', .*, here --data.labels '\[bad,good\]'$"):
        list(LabelledSource(str(path), own_task(["text"], labels=["no", "yes"])).rows("train"))
    with pytest.raises(ValueError, match=r"label is 'bad'; allowed: 'fine', 'good', or .* no label\)$"):  # one bad row, perhaps
        list(LabelledSource(str(path), own_task(["text"], labels=["fine", "good"])).rows("train"))
    scores = write(tmp_path, "scores.csv", [("fine", "4.5"), ("bad", "n/a"), ("so so", "3")])
    with pytest.raises(ValueError, match=r"label is 'n/a'; allowed: a finite number \(.*\)$"):  # no classes that are numbers
        list(LabelledSource(str(scores), own_task(["text"])).rows("train"))
    with pytest.raises(ValueError, match=r"^data.columns is not given; allowed: .* 'id', 'text', 'label', 'more'$"):
        chosen_task(None, None, "label", None, None, str(path))


def test_a_row_with_several_labels_and_a_class_with_an_apostrophe(tmp_path):
    (tmp_path / "several.jsonl").write_text('{"text": "a", "label": ["good", "new"]}\n')
    with pytest.raises(
        ValueError,
        match=r"line 1: label is \['good', 'new'\]; allowed: a text or a number: a row has one label, "
        r"unless data.label_separator allows several$",
    ):
        list(LabelledSource(str(tmp_path / "several.jsonl"), own_task(["text"], labels=["new", "good"])).rows("train"))
    path = write(tmp_path, "t.csv", [("fine", "it's"), ("bad", "no")])
    with pytest.raises(ValueError) as refused:
        list(LabelledSource(str(path), own_task(["text"])).rows("train"))
    told = str(refused.value).partition(", here ")[2]
    assert shlex.split(told) == ["--data.labels", """["it's","no"]"""]  # as a shell splits it


def test_a_stray_table_in_a_folder_of_texts(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "numbers.csv").write_text("x,y\n1,2\n")
    with pytest.raises(
        ValueError, match=r"^data.column is 'text', which .*numbers.csv does not have; allowed: 'x', 'y'; or data.source"
    ):
        list(Corpus(str(tmp_path)))
    assert list(Corpus(str(tmp_path / "**/*.txt"))) == ["text"]


def test_kinds():
    from pathlib import Path

    kinds = {"a.CSV": "csv", "a.txt.gz": "text", "a": "text", "a.tsv.zst": "tsv", "a.parquet.gz": None, "a.pdf": None}
    assert {name: kind_of(Path(name)) for name in kinds} == kinds
