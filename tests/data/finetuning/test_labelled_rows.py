"""Labelled texts: every layout gives the same rows, and what is broken is named by file and row."""

import json
import lzma

import pyarrow
import pyarrow.parquet
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
    """Rows as the hub has them: its column names, its class numbers, -1 for no label."""
    names = [aliases[0] for aliases in task.columns]
    return [dict(zip(names, row.texts, strict=True)) | {"label": -1 if row.label is None else row.label, "idx": i}
            for i, row in enumerate(rows)]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_glues_own_files(tmp_path, name):
    expected, task = write_glue(tmp_path, name), find_task(name)
    assert len(expected) == (5 if name == "MNLI" else 3)
    assert read(LabelledSource(str(tmp_path), task), task) == expected
    assert read(LabelledSource(str(tmp_path / name), task), task) == expected  # the folder itself


def test_mnlis_two_development_sets_differ(tmp_path):
    expected = write_glue(tmp_path, "MNLI")
    assert expected["validation_matched"] != expected["validation_mismatched"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["parquet", "shards", "jsonl", "jsonl.xz", "hub"])
def test_the_hubs_layout_gives_the_same_rows(tmp_path, monkeypatch, name, kind):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    expected, task = write_glue(tmp_path / "tsv", name), find_task(name)
    root, folder = tmp_path / "hub", tmp_path / "hub" / task.hub[1]
    folder.mkdir(parents=True)
    for split, rows in expected.items():
        dicts = as_dicts(rows, task)
        if "jsonl" in kind:
            write_json(folder / f"{split}.{kind}", dicts, lzma.compress if "xz" in kind else bytes)
            continue
        parts = [dicts[:3], dicts[3:]] if kind == "shards" else [dicts]
        for i, part in enumerate(parts):
            file = folder / f"{split}-{i:05}-of-{len(parts):05}.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), file, row_group_size=2)
    source = str(root)
    if kind == "hub":
        files = "".join(f"  - split: {split}\n    path: {task.hub[1]}/{split}-*\n" for split in expected)
        (root / "README.md").write_text(f"---\nconfigs:\n- config_name: {task.hub[1]}\n  data_files:\n{files}---\n")
        source = f"hub:{root}:{task.hub[1]}"
    assert read(LabelledSource(source, task), task) == expected


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
dataset_info:
- config_name: default
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': pos
          '1': neg
---
"""


def test_a_hub_data_set_with_its_classes_in_another_order_counts_by_name(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    root = tmp_path / "hub"
    write_json(root / "train.jsonl", [{"text": "good", "label": 0}, {"text": "?", "label": -1}])
    write_json(root / "test.jsonl", [{"text": "good", "label": 0}, {"text": "bad", "label": 1}])
    (root / "README.md").write_text(CARD)
    source = LabelledSource(f"hub:{root}", OWN)
    assert list(source.rows("test")) == [LabelledRow(("good",), 1), LabelledRow(("bad",), 0)]
    with pytest.raises(ValueError, match=r"data.source: 'hub:.*', split train, row 2 has no label; allowed: one in every"):
        list(source.rows("train"))


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


@pytest.mark.parametrize("name", ["validation", "dev", "valid", "val"])
def test_names_of_the_validation_split(tmp_path, name):
    write_json(tmp_path / "data" / f"{name}.jsonl", as_dicts(ROWS, OWN))
    assert read(LabelledSource(str(tmp_path), OWN), OWN) == {"validation": ROWS}


def test_a_split_that_is_there_twice(tmp_path):
    write_json(tmp_path / "train.jsonl", as_dicts(ROWS, OWN))
    for other in ("train.tsv", "train.jsonl.xz", "data/train.jsonl", "train-00000-of-00001.parquet"):
        path = tmp_path / other
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=rf"the train split twice, in .*train.* and .*{other}|{other} and .*train.jsonl"):
            LabelledSource(str(tmp_path), OWN).splits()
        path.unlink()
    (tmp_path / "train" / "pos").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the train split twice, in .*train.jsonl and .*train; allowed: once"):
        LabelledSource(str(tmp_path), OWN).splits()


def test_a_lost_shard(tmp_path):
    write_json(tmp_path / "train-00001-of-00002.jsonl", as_dicts(ROWS[2:], OWN))
    with pytest.raises(ValueError, match=r"train-00001-of-00002.jsonl is one of 1 shards; allowed: all 2 of its name$"):
        LabelledSource(str(tmp_path), OWN).splits()
    write_json(tmp_path / "train-00000-of-00002-0123456789abcdef.jsonl", as_dicts(ROWS[:2], OWN))
    assert list(LabelledSource(str(tmp_path), OWN).rows("train")) == ROWS


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


def test_a_missing_split_and_a_file(tmp_path):
    write_json(tmp_path / "train.jsonl", as_dicts(ROWS, OWN))
    with pytest.raises(
        ValueError, match=r"has no test split; allowed: test.tsv, test.csv, test.jsonl, .* or test/LABEL/\*.txt, there"
    ):
        list(LabelledSource(str(tmp_path), OWN).rows("test"))
    with pytest.raises(
        ValueError, match=r"no validation_matched split; allowed: .*dev_matched.tsv, .* or in MNLI, mnli, plain"
    ):
        list(LabelledSource(str(tmp_path), find_task("MNLI")).rows("validation_matched"))
    (tmp_path / "train.pdf").write_text("")
    with pytest.raises(ValueError, match=r"train.pdf'; allowed: a table \(.csv .tsv .*\), or a folder$"):
        LabelledSource(str(tmp_path / "train.pdf"), OWN).splits()


def test_an_unknown_configuration_of_a_hub_data_set(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    write_json(tmp_path / "hub" / "small" / "train.jsonl", as_dicts(ROWS, OWN))
    files = "  - split: train\n    path: small/train.jsonl\n"
    (tmp_path / "hub" / "README.md").write_text(f"---\nconfigs:\n- config_name: small\n  data_files:\n{files}---\n")
    with pytest.raises(
        ValueError, match=r"^data.source is 'hub:.*:large', which cannot be loaded .*large.*path of a local copy"
    ):
        LabelledSource(f"hub:{tmp_path / 'hub'}:large", OWN).splits()
    source = LabelledSource(f"hub:{tmp_path / 'hub'}", OWN)
    assert list(source.rows("train")) == ROWS
    with pytest.raises(ValueError, match=r"has no test split; allowed: train$"):
        list(source.rows("test"))


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
        (SST2, "train", "sentence\tlabel\nfine\t-1\n", r"train.tsv, line 2 has no label; allowed: one in every train row"),
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


def test_broken_files(tmp_path):
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x", "label": 1}\n' * 1000)[:-30])
    (tmp_path / "test.parquet").write_bytes(b"PAR1 but not really PAR1")
    (tmp_path / "dev.jsonl").write_bytes(b'{"text": "fine", "label": 1}\n{"text": \n')
    source = LabelledSource(str(tmp_path), OWN)
    for split, message in {"train": "cannot be read", "test": "is no Parquet file", "validation": ":2 is not a line"}.items():
        with pytest.raises(ValueError, match=message):
            list(source.rows(split))


def test_empty_texts_may_be_kept(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n\t1\n")
    assert list(LabelledSource(str(tmp_path), SST2, "keep").rows("train")) == [LabelledRow(("",), 1)]
    with pytest.raises(ValueError, match=r"^data.empty_texts is 'drop'; allowed: error, keep$"):
        LabelledSource(str(tmp_path), SST2, "drop")


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
