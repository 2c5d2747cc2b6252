"""Labelled texts: every layout gives the same rows, and errors name the file and the row."""

import json
import lzma

import pytest

from lit_linformer.data.finetuning.labelled_rows import LabelledRow, LabelledSource
from lit_linformer.data.finetuning.text_tasks import TASKS, find_task, own_task
from tests.data.finetuning.glue import FILES, TEXTS, write_glue

OWN = own_task(["text"], labels=["neg", "pos"])
ROWS = [
    LabelledRow(("Bad, bad.",), 0),
    LabelledRow(('" Good',), 1),
    LabelledRow(("naïve café",), 1),
    LabelledRow(("worse",), 0),
]


def read(source, task):
    return {split: list(source.rows(split)) for split in source.splits()}


def write_json(path, rows, compress=bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress("\n".join(map(json.dumps, rows)).encode()))


def as_dicts(rows, task):
    """Rows as on the hub: its column names, its class numbers, -1 for no label."""
    names = [aliases[0] for aliases in task.columns]
    return [dict(zip(names, row.texts, strict=True)) | {"label": -1 if row.label is None else row.label, "idx": i}
            for i, row in enumerate(rows)]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_glues_own_files(tmp_path, name):
    expected, task = write_glue(tmp_path, name), find_task(name)
    assert len(expected) == (5 if name == "MNLI" else 3)
    assert read(LabelledSource(str(tmp_path), task), task) == expected
    assert read(LabelledSource(str(tmp_path / name), task), task) == expected  # given the task's own folder


def test_mnlis_two_development_sets_differ(tmp_path):
    expected = write_glue(tmp_path, "MNLI")
    assert expected["validation_matched"] != expected["validation_mismatched"]


def test_imdbs_folders_and_json_lines(tmp_path):
    imdb = find_task("IMDB")
    for split in ("train", "test"):
        for row, number in zip(ROWS, "1023", strict=True):
            file = tmp_path / "aclImdb" / split / imdb.labels[row.label] / f"{number}_7.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(row.texts[0], encoding="utf-8")
        (tmp_path / "aclImdb" / split / "unsup").mkdir()
        (tmp_path / "aclImdb" / split / "urls_neg.txt").write_text("no review")
        names = [{"id": i, "text": row.texts[0], "label": imdb.labels[row.label]} for i, row in enumerate(ROWS)]
        write_json(tmp_path / "json" / f"{split}.jsonl.xz", names, lzma.compress)
    write_json(tmp_path / "json" / "unsup.jsonl", [{"text": "?", "label": -1}])
    for root in (tmp_path, tmp_path / "aclImdb"):
        # sorted by class, then by file name
        expected = [ROWS[0], ROWS[3], ROWS[1], ROWS[2]]
        assert read(LabelledSource(str(root), imdb), imdb) == {"train": expected, "test": expected}
    assert read(LabelledSource(str(tmp_path / "json"), imdb), imdb) == {"train": ROWS, "test": ROWS}
    (tmp_path / "aclImdb/test/pos/9_7.txt").write_text("two\nlines\n")
    assert list(LabelledSource(str(tmp_path), imdb).rows("test"))[-1].texts == ("two\nlines",)


@pytest.mark.parametrize(
    "source, message",
    [
        ("", r"^data.source is ''; allowed: a folder"),
        ("hub:", r"^data.source is 'hub:'; allowed: hub:NAME or hub:NAME:CONFIG$"),
        ("hub:a:b:c", r"^data.source is 'hub:a:b:c'; allowed: hub"),
        ("hub:a:", r"^data.source is 'hub:a:'; allowed: hub"),
        ("no/such/folder", r"^data.source is 'no/such/folder', which is not there; allowed: a folder, a table, hub:NAME"),
    ],
)
def test_bad_sources(source, message):
    with pytest.raises(ValueError, match=message):
        LabelledSource(source, OWN).splits()


SST2, QQP, STSB = find_task("SST-2"), find_task("QQP"), find_task("STS-B")


@pytest.mark.parametrize(
    "task, split, text, message",
    [
        (
            SST2,
            "train",
            "sentence\tlabel\nfine\t1\nbad\t2\n",
            r"train.tsv, line 3: label is '2'; allowed: 'negative', 'positive'",
        ),
        (SST2, "train", "sentence\tlabel\nfine\t-1\n", r"line 2 has the label -1, which stands for none; allowed: one in ev"),
        (SST2, "train", "text\tlabel\nfine\t1\n", r"train.tsv has no column 'sentence' .*allowed: .*, 'text', 'label'$"),
        (SST2, "train", "sentence\tclass\nfine\t1\n", r"train.tsv has no column 'label' \(data.label_column\); .* 'class'$"),
        (SST2, "train", "sentence\tlabel\nfine\t1\t1\n", r"train.tsv, line 2 has 3 fields; allowed: 2, as its first line$"),
        (SST2, "train", "sentence\tlabel\nfine\n", r"train.tsv, line 2 has 1 fields; allowed: 2, as its first line$"),
        (SST2, "train", "sentence\tlabel\n \t1\n", r"train.tsv, line 2: 'sentence' is empty; allowed: .* data.empty"),
        (SST2, "train", "sentence\tlabel\n", r"data.source is '.*', whose train split is empty; allowed: 1 row"),
        (SST2, "test", "sentence\tlabel\na\t-1\nb\t1\n", r"test.tsv, line 3 has a label, though others have none"),
        (SST2, "test", "sentence\tlabel\na\t1\nb\t-1\n", r"test.tsv, line 3 has no label, though others have one"),
        (
            STSB,
            "train",
            "sentence1\tsentence2\tscore\na\tb\tnan\n",
            r"train.tsv, line 2: label is 'nan'; allowed: a number from 0",
        ),
        (find_task("CoLA"), "train", "gj04\t1\t\n", r"train.tsv, line 1 has 3 fields; allowed: 4"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, task, split, text, message):
    (tmp_path / f"{split}.tsv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        list(LabelledSource(str(tmp_path), task).rows(split))
    assert str(caught.value).startswith("data.source") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": 3, "label": 1}, r"train.jsonl, line 2: 'text' is int; allowed: text"),
        ({"text": None, "label": 1}, r"train.jsonl, line 2: 'text' is nothing; allowed: text"),
        ({"body": "x", "label": 1}, r"train.jsonl, line 2 has no column 'text' .*allowed: .*, 'body', 'label'$"),
        ({"text": "x"}, r"train.jsonl, line 2 has no column 'label' \(data.label_column\)"),
        ({"text": "x", "label": None}, r"train.jsonl, line 2 has no label"),
        ({"text": "x", "label": "good"}, r"train.jsonl, line 2: label is 'good'; allowed: 'neg', 'pos'"),
    ],
)
def test_bad_json_rows(tmp_path, row, message):
    write_json(tmp_path / "train.jsonl", [{"text": "fine", "label": 1}, row])
    with pytest.raises(ValueError, match=message):
        list(LabelledSource(str(tmp_path), OWN).rows("train"))


def test_errors_show_the_beginning_of_a_document(tmp_path):
    """A table without a header was refused with its whole first row, and a label_column of texts with two whole documents."""
    document = "of thousands of words " * 1000
    for name, header in {"a": "", "b": "body,text\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text(f"{header}{document},good\n")
    for name, label, there in (("a", "label", "has no column 'text'"), ("b", "body", "line 2: label is 'of thousands")):
        with pytest.raises(ValueError, match=there) as caught:
            list(LabelledSource(str(tmp_path / name), own_task(["text"], label, ["neg", "pos"])).rows("train"))
        assert len(str(caught.value)) < 600 and "words of…'" in str(caught.value)


def test_broken_files(tmp_path):
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x", "label": 1}\n' * 1000)[:-30])
    (tmp_path / "test.parquet").write_bytes(b"PAR1 but not really PAR1")
    (tmp_path / "dev.jsonl").write_bytes(b'{"text": "fine", "label": 1}\n{"text": \n')
    source = LabelledSource(str(tmp_path), OWN)
    for split, message in {"train": "cannot be read", "test": "is no Parquet file", "validation": "line 2 is not"}.items():
        with pytest.raises(ValueError, match=message):
            list(source.rows(split))


def test_empty_texts_may_be_kept(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n\t1\n")
    assert list(LabelledSource(str(tmp_path), SST2, "keep").rows("train")) == [LabelledRow(("",), 1)]


def test_qqps_ragged_lines_are_skipped_and_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    (tmp_path / "train.tsv").write_text(header + "1\t2\t3\tWhy?\tWhy not?\t0\n4\t5\t6\tcut short\n7\t8\t9\tHow?\tHow so?\t1\n")
    source = LabelledSource(str(tmp_path), QQP)
    assert list(source.rows("train")) == [LabelledRow(("Why?", "Why not?"), 0), LabelledRow(("How?", "How so?"), 1)]
    assert source.skipped == 1


def test_an_unlabelled_test_needs_no_label_column(tmp_path):
    write_json(tmp_path / "test.jsonl", [{"text": "fine"}, {"text": "bad"}])
    assert [row.label for row in LabelledSource(str(tmp_path), OWN).rows("test")] == [None, None]


def test_windows_line_ends_and_a_blank_last_line(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\r\nfine\t1\r\n\r\n")
    assert list(LabelledSource(str(tmp_path), SST2).rows("train")) == [LabelledRow(("fine",), 1)]


def test_how_far_reading_is(tmp_path):
    write_glue(tmp_path, "SST-2")
    source = LabelledSource(str(tmp_path), SST2)
    assert len(list(source.rows("train"))) == len(TEXTS) and source.fraction == pytest.approx(1)


def test_every_task_of_the_table_is_tested_here():
    assert {*FILES, "IMDB"} == {task.name for task in TASKS}
