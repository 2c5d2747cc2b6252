"""Tokenised rows: reading returns what was written, and they are made once."""

import json
import os
import pickle

import numpy as np
import pytest
import torch

from lit_linformer.data.finetuning.encoded_texts import EncodedTexts, encoded_files, text_hash
from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.finetuning.text_tasks import find_task, own_task
from lit_linformer.data.loader import FILLER, EvaluationLoader
from lit_linformer.data.row_files import CLASSES, VALUES, RowFiles
from lit_linformer.data.tokenizer import train_tokenizer
from tests.data.conftest import make_documents
from tests.data.finetuning.glue import write_glue
from tests.data.finetuning.test_labelled_rows import write_json

OWN = own_task(["text"], labels=["neg", "pos"])


def layout_of(tokenizer, max_length=64, **settings):
    return RowLayout(tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, max_length, **settings)


def make(cache, root, tokenizer, task=OWN, split="train", **settings):
    return encoded_files(cache, LabelledSource(str(root), task, **settings), split, tokenizer)


@pytest.fixture
def root(tmp_path, documents):
    """100 rows, some of one word, some of 200 tokens; the last one has white space around it."""
    texts = [*documents[:50], *(document.split()[0] for document in documents[50:99]), "  the end \n"]
    write_json(tmp_path / "source" / "train.jsonl", [{"text": t, "label": i % 2} for i, t in enumerate(texts)])
    return tmp_path / "source"


@pytest.fixture
def texts(root):
    return [json.loads(line)["text"].strip() for line in (root / "train.jsonl").read_text().splitlines()]


def test_what_is_written_is_read_again(tmp_path, root, texts, tokenizer, monkeypatch):
    monkeypatch.setattr("lit_linformer.data.pieces.BATCH_BYTES", 700)  # many batches
    files = RowFiles(make(tmp_path, root, tokenizer), CLASSES)
    ids = [tokenizer.encode(text) for text in texts]
    assert [files.ids(row)[0].tolist() for row in range(files.rows)] == ids
    assert files.lengths.tolist() == [[len(each)] for each in ids]
    assert files.labels.tolist() == [0, 1] * 50 and files.labelled
    assert files.hashes.tolist() == [text_hash((text,)) for text in texts]
    assert len(set(files.hashes.tolist())) == len(set(texts))


def test_batches_hold_rows_labels_and_numbers(tmp_path, root, texts, tokenizer):
    rows = EncodedTexts(RowFiles(make(tmp_path, root, tokenizer), CLASSES), layout_of(tokenizer, 32))
    batch = rows[[(0, 99), (3, 2), (0, FILLER)]]
    ids = [tokenizer.encode(texts[99]), tokenizer.encode(texts[2])[:30], []]
    for row, each in zip(batch["input_ids"].tolist(), ids, strict=True):
        assert row == [tokenizer.bos_id, *each, tokenizer.eos_id] + [tokenizer.pad_id] * (30 - len(each))
    assert batch["attention_mask"].sum(1).tolist() == [len(each) + 2 for each in ids]
    assert batch["labels"].tolist() == [1, 0, -100] and batch["index"].tolist() == [99, 2, -1]
    assert {name: str(value.dtype) for name, value in batch.items()} == {
        "input_ids": "torch.int64", "attention_mask": "torch.bool", "labels": "torch.int64", "index": "torch.int64",
    }  # fmt: skip


def test_pairs_values_and_unlabelled_splits(tmp_path, tokenizer):
    expected = write_glue(tmp_path / "glue", "STS-B")
    task = find_task("STS-B")
    train, test = (
        EncodedTexts(
            RowFiles(make(tmp_path, tmp_path / "glue", tokenizer, task, split), VALUES), layout_of(tokenizer, pair=True)
        )
        for split in ("train", "test")
    )
    batch = train[[(0, 0), (0, 1)]]
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [0.0, 2.5]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    first, second = map(tokenizer.encode, expected["train"][1].texts)
    assert batch["input_ids"][1, : len(first) + len(second) + 4].tolist() == [bos, *first, eos, eos, *second, eos]
    assert not test.labelled and "labels" not in test[[(0, 0)]]


def test_by_length_and_chosen_rows(tmp_path, root, tokenizer):
    files, chosen = RowFiles(make(tmp_path, root, tokenizer), CLASSES), np.array([60, 3, 99, 5])
    rows = EncodedTexts(files, layout_of(tokenizer), chosen, by_length=True)
    assert (
        sorted(rows.rows.tolist()) == sorted(chosen.tolist()) and rows.lengths.tolist() == sorted(rows.lengths.tolist())[::-1]
    )
    batch = rows[[(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert batch["index"].tolist() == rows.rows.tolist()
    assert batch["attention_mask"].sum(1).tolist() == rows.lengths.tolist()


@pytest.mark.parametrize("size, world_size", [(100, 1), (100, 2), (100, 3), (1, 2), (2, 3), (7, 3)])
@pytest.mark.parametrize("max_windows", [1, 3])
def test_evaluation_has_every_row_once_and_few_pads(tmp_path, root, tokenizer, size, world_size, max_windows):
    files = RowFiles(make(tmp_path, root, tokenizer), CLASSES)
    rows = EncodedTexts(
        files, layout_of(tokenizer, 32, max_windows=max_windows, window_overlap=8), np.arange(size), by_length=True
    )
    ranks = [list(EvaluationLoader(rows, 8, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for each in ranks for batch in each]
    assert sorted(i for batch in batches for i in batch["index"].tolist() if i >= 0) == list(range(size))
    for batch in batches:
        real = batch["index"] >= 0
        assert batch["labels"][real].tolist() == [i % 2 for i in batch["index"][real].tolist()]
        assert (batch["labels"][~real] == -100).all()
        if max_windows > 1:
            assert batch["document"].unique().tolist() == list(range(len(batch["index"])))
    if size == 100 and max_windows == 1:
        real, tokens = sum(rows.lengths), sum(batch["input_ids"].numel() for batch in batches)
        assert 1 - real / tokens < 0.1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_load_the_same(tmp_path, root, tokenizer, num_workers):
    rows = EncodedTexts(RowFiles(make(tmp_path, root, tokenizer), CLASSES), layout_of(tokenizer), by_length=True)
    expected = [rows[[(0, i) for i in range(start, min(start + 16, 100))]] for start in range(0, 100, 16)]
    for batch, other in zip(EvaluationLoader(rows, 16, num_workers=num_workers), expected, strict=True):
        assert batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)


def test_pickled_rows_read_on(tmp_path, root, tokenizer):
    rows = EncodedTexts(RowFiles(make(tmp_path, root, tokenizer), CLASSES), layout_of(tokenizer))
    before = rows[[(0, 7)]]
    copy = pickle.loads(pickle.dumps(rows))
    assert torch.equal(copy[[(0, 7)]]["input_ids"], before["input_ids"])


def test_large_vocabularies_take_four_bytes(tmp_path, root, texts):
    large = train_tokenizer("bpe", make_documents(50), 400)
    large.backend.add_tokens([f"extra{i}" for i in range(70_000)])
    large = type(large)(large.backend, "large")
    files = RowFiles(make(tmp_path, root, large), CLASSES)
    assert files.dtype == np.uint32 and files.ids(3)[0].tolist() == large.encode(texts[3])


def test_second_start_builds_nothing_and_another_length_neither(tmp_path, root, tokenizer):
    folder = make(tmp_path / "cache", root, tokenizer)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.iterdir()]}
    assert make(tmp_path / "cache", root, tokenizer) == folder
    for max_length in (8, 32):
        rows = EncodedTexts(RowFiles(folder, CLASSES), layout_of(tokenizer, max_length))
        assert rows[[(0, 0)]]["input_ids"].shape == (1, max_length)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.iterdir()]} == before


def test_fingerprint_changes_with_all_that_shapes_the_rows(tmp_path, root, tokenizer, documents):
    os.utime(root / "train.jsonl", ns=(1, 1))
    other = own_task(["text"], labels=["pos", "neg"])

    def name(tokenizer=tokenizer, **settings):
        return make(tmp_path / "cache", root, tokenizer, **settings).name

    same = {name(), name(), make(tmp_path / "elsewhere", root, tokenizer).name}
    others = [name(task=other), name(tokenizer=train_tokenizer("bpe", documents, 400)), name(empty_texts="keep")]
    os.utime(root / "train.jsonl", ns=(1, 2))
    others.append(name())
    assert len(same) == 1 and len({*same, *others}) == 1 + len(others)


@pytest.mark.parametrize("name", ["ids", "labels", "offsets", "hashes"])
def test_damaged_files_are_not_read(tmp_path, root, tokenizer, name):
    folder = make(tmp_path, root, tokenizer)
    with open(folder / f"{name}.bin", "ab") as file:
        file.truncate(10)
    with pytest.raises(
        ValueError, match=rf"{name}.bin is damaged: it should hold [\d,]+ (tokens|numbers); delete the folder .*texts-"
    ):
        RowFiles(folder, CLASSES)


def test_an_error_leaves_no_files(tmp_path, tokenizer):
    write_json(tmp_path / "source" / "train.jsonl", [{"text": "fine", "label": 1}, {"text": "fine", "label": 7}])
    with pytest.raises(ValueError, match=r"train.jsonl, line 2: label is 7; allowed: "):
        make(tmp_path / "cache", tmp_path / "source", tokenizer)
    assert not list((tmp_path / "cache").glob("texts-*[!k]"))


def test_skipped_lines_are_announced(tmp_path, tokenizer):
    lines = "id\tquestion1\tquestion2\tis_duplicate\n1\tWhy?\tHow?\t0\n2\tcut\n3\tshort\n"
    (tmp_path / "train.tsv").write_text(lines)
    with pytest.warns(UserWarning, match=r": 2 lines of the train split have too few fields: skipped$"):
        folder = make(tmp_path / "cache", tmp_path, tokenizer, find_task("QQP"))
    assert RowFiles(folder, CLASSES).rows == 1
