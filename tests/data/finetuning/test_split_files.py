"""Which files hold which split: the hub's layout, names, shards, configurations."""

import lzma

import pyarrow.parquet
import pytest

from lit_linformer.data.finetuning.labelled_rows import LabelledRow, LabelledSource
from lit_linformer.data.finetuning.text_tasks import find_task, own_task
from tests.data.finetuning.glue import FILES, write_glue
from tests.data.finetuning.test_labelled_rows import OWN, ROWS, as_dicts, read, write_json


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
    told = r"data.source: 'hub:.*', split train, row 2 has the label -1, which stands for none; allowed: one in every"
    with pytest.raises(ValueError, match=told):
        list(source.rows("train"))


@pytest.mark.parametrize("name", ["validation.jsonl", "dev.jsonl", "valid.jsonl", "val.JSONL"])
def test_names_of_the_validation_split(tmp_path, name):
    write_json(tmp_path / "data" / name, as_dicts(ROWS, OWN))
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


def test_a_class_without_training_texts(tmp_path):
    task = own_task(["text"], labels=["neg", "so so", "pos"])
    for split, classes in (("train", ["neg", "pos", "other"]), ("test", ["pos"])):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.txt").write_text("a film")
    source = LabelledSource(str(tmp_path), task)
    assert list(source.rows("test")) == [LabelledRow(("a film",), 2)]  # few texts may be of one class
    with pytest.raises(ValueError, match=r"^data.source: .*/train has no texts of 'so so'; allowed: a folder .* each class$"):
        source.splits()
    (tmp_path / "train" / "so so").mkdir()
    (tmp_path / "train" / "neg" / "1.txt").unlink()
    with pytest.raises(ValueError, match=r"/train has no texts of 'neg', 'so so'; allowed"):
        list(LabelledSource(str(tmp_path), task).rows("train"))


def test_pairs_are_in_tables(tmp_path):
    for label in ("neg", "pos"):
        (tmp_path / "train" / label).mkdir(parents=True)
        (tmp_path / "train" / label / "1.txt").write_text("a film")
    source = LabelledSource(str(tmp_path), own_task(["text", "other"], labels=["neg", "pos"]))
    with pytest.raises(ValueError, match=r"^data.source: .*/train has one text in each file; allowed: tables with both"):
        source.splits()


def test_a_lost_shard(tmp_path):
    write_json(tmp_path / "train-00001-of-00002.jsonl", as_dicts(ROWS[2:], OWN))
    with pytest.raises(ValueError, match=r"train-00001-of-00002.jsonl is one of 1 shards; allowed: all 2 of its name$"):
        LabelledSource(str(tmp_path), OWN).splits()
    write_json(tmp_path / "train-00000-of-00002-0123456789abcdef.jsonl", as_dicts(ROWS[:2], OWN))
    assert list(LabelledSource(str(tmp_path), OWN).rows("train")) == ROWS


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
