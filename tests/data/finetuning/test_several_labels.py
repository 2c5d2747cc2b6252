"""Rows with any number of labels: read from every layout, stored, scored, predicted and exported."""

import csv
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from sklearn import metrics as sk
from torch.nn import functional

from lit_linformer.data.finetuning.encoded_texts import EncodedTexts
from lit_linformer.data.finetuning.labelled_rows import LabelledRow, LabelledSource
from lit_linformer.data.finetuning.text_tasks import label_of, own_task
from lit_linformer.data.loader import FILLER
from lit_linformer.data.row_files import RowFiles, several_labels
from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.utils.files import read_rows
from tests.cli.test_errors import complaint
from tests.data.finetuning.test_encoded_texts import layout_of, make
from tests.data.finetuning.test_labelled_rows import write_json
from tests.data.finetuning.test_split_files import CARD
from tests.helpers import output

LABELS = ["sport", "law", "money"]
SEVERAL = own_task(["text"], labels=LABELS, label_separator="|")
GIVEN = [("a match", ["sport"]), ("a fine", ["money", "law"]), ("nothing", []), ("all", ["sport", "law", "money"])]
ROWS = [LabelledRow((text,), tuple(int(name in names) for name in LABELS)) for text, names in GIVEN]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, " | ".join(names)) for text, names in rows)])


def write(kind, path):
    rows = [{"text": text, "label": names} for text, names in GIVEN]
    numbers = [row | {"label": [LABELS.index(name) for name in row["label"]]} for row in rows]
    if kind == "csv":
        write_csv(path, GIVEN)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_json(path, numbers if kind == "numbers" else rows)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "numbers", "parquet"])
def test_every_table_gives_the_same_rows(kind, tmp_path):
    path = tmp_path / f"table.{'jsonl' if kind == 'numbers' else kind}"
    write(kind, path)
    assert list(LabelledSource(str(path), SEVERAL).rows("train")) == ROWS


def test_a_0_or_1_for_each_class_is_refused():
    """[1, 0, 1] was read as the labels of classes 0 and 1, and all of its rows had the same two."""
    with pytest.raises(ValueError, match=r"^label is \[1, 0, 1\]; allowed: each label once: .* not a 0 or 1 for each class$"):
        label_of([1, 0, 1], SEVERAL)
    assert label_of([0, 2], SEVERAL) == (1, 0, 1) and label_of("law|law", SEVERAL) == (0, 1, 0)


def test_a_hub_data_set_counts_by_name(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    root, backwards = tmp_path / "hub", LABELS[::-1]
    rows = [{"text": text, "label": [backwards.index(name) for name in names]} for text, names in GIVEN]
    for split in ("train", "test"):
        write_json(root / f"{split}.jsonl", rows)
    names = "".join(f"            '{number}': {name}\n" for number, name in enumerate(backwards))
    card = (
        CARD.partition("  - name: label\n")[0] + f"  - name: label\n    list:\n      class_label:\n        names:\n{names}---\n"
    )
    (root / "README.md").write_text(card)
    assert list(LabelledSource(f"hub:{root}", SEVERAL).rows("train")) == ROWS


def test_stored_and_in_batches(tmp_path, tokenizer):
    write("csv", tmp_path / "train.csv")
    write_json(tmp_path / "test.jsonl", [{"text": "unknown"}])
    files = RowFiles(make(tmp_path, tmp_path, tokenizer, SEVERAL), several_labels(3))
    assert files.labelled and files.labels.tolist() == [list(row.label) for row in ROWS]
    batch = EncodedTexts(files, layout_of(tokenizer))[[(0, 1), (0, FILLER)]]
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [[0, 1, 1], [-100] * 3]
    unlabelled = RowFiles(make(tmp_path, tmp_path, tokenizer, SEVERAL, "test"), several_labels(3))
    assert not unlabelled.labelled and "labels" not in EncodedTexts(unlabelled, layout_of(tokenizer))[[(0, 0)]]
    other = own_task(["text"], labels=LABELS, label_separator=" | ")
    assert make(tmp_path, tmp_path, tokenizer, other) != files.folder


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sport|lax", r"^label is 'lax'; allowed: 'sport', 'law', 'money', or their numbers 0 to 2"),
        (["sport", 3], r"^label is 3; allowed: "),
        ("sport, law", r"^label is 'sport, law'; allowed: "),
    ],
)
def test_labels_that_the_task_does_not_have(value, message):
    with pytest.raises(ValueError, match=message):
        label_of(value, SEVERAL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": None}, r"data.label_separator is '\|'; allowed: none without data.labels, which makes it a regression"),
        ({"labels": ["a|b", "c"]}, r"data.label_separator is '\|', which the label 'a\|b' holds; allowed: characters that no"),
        ({"label_separator": ""}, r"data.label_separator is ''.*; allowed: characters that no label has, such as '\|'"),
        ({"metrics": ["f1"]}, r"has 'f1', which is not for several labels a row \(data.label_separator\); allowed: micro_f1, "),
        (
            {"label_separator": None, "metrics": ["micro_f1"]},
            r"has 'micro_f1', which is not for a classification; allowed: acc",
        ),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        own_task(**({"columns": ["text"], "labels": LABELS, "label_separator": "|"} | settings))


def news(count, seed=0):
    """Texts with a word of each of their labels."""
    draw, words = random.Random(seed), {"sport": ("match", "team"), "law": ("court", "judge"), "money": ("bank", "price")}
    rows = []
    for _ in range(count):
        names = [name for name in LABELS if draw.random() < 0.4]
        text = draw.choices(("the", "of", "and", "was", "on"), k=6) + [draw.choice(words[name]) for name in names]
        rows.append((" ".join(draw.sample(text, len(text))), names))
    return rows


def written(folder):
    return [json.loads(line) for line in (folder / "runs/news/predictions.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_from_a_table_to_an_export(task, tmp_path):
    import transformers

    import lit_linformer.export.huggingface  # noqa: F401

    rows = news(240)
    write_csv(tmp_path / "news.csv", rows)
    write_csv(tmp_path / "later.csv", later := news(50, seed=1))
    own = ["--name", "news", "--data.task", "null", "--data.source", "news.csv", "--data.columns", "[text]"]
    several = ["--data.labels", "[sport, law, money]", "--data.label_separator", "|", "--data.validation_fraction", "0.2"]
    metrics = ["--data.metrics", "[micro_f1, macro_f1, accuracy]", "--trainer.max_epochs", "25"]
    shown = output(["fit", *task, *own, *several, *metrics], tmp_path)
    assert "192 rows" in shown and "sport: " in shown
    scores = read_rows(tmp_path / "runs/news/scores.csv")
    assert scores[-1]["val/micro_f1"] > 0.9 and {"val/accuracy", "val/macro_f1", "val/loss"} <= scores[-1].keys()

    config = ["--config", "runs/news/config.yaml"]
    output(["validate", *config], tmp_path)
    found, best = written(tmp_path), json.loads((tmp_path / "runs/news/validate.json").read_text())["metrics"]
    given = dict(rows)
    assert len(found) == 48 and all(row["label"] == [name for name in LABELS if name in given[row["text"]]] for row in found)
    for row in found:
        assert row["prediction"] == [name for name in LABELS if row["probabilities"][name] > 0.5]
    gold, told = ([[name in row[key] for name in LABELS] for row in found] for key in ("label", "prediction"))
    expected = {f"{kind}_f1": sk.f1_score(gold, told, average=kind, zero_division=0) for kind in ("micro", "macro")}
    for name, value in (expected | {"accuracy": sk.accuracy_score(gold, told)}).items():
        assert best[f"val/{name}"] == pytest.approx(value, abs=1e-6), name
    chances = torch.tensor([[row["probabilities"][name] for name in LABELS] for row in found])
    loss = functional.binary_cross_entropy(chances, torch.tensor(gold).float())
    assert best["val/loss"] == pytest.approx(loss.item(), rel=1e-4)

    output(["test", *config, "--data.source", "later.csv"], tmp_path)
    lines = (tmp_path / "runs/news/submission/predictions.tsv").read_text().splitlines()[1:]
    assert lines == [f"{number}\t{'|'.join(row['prediction'])}" for number, row in enumerate(written(tmp_path))]
    shown = output(["predict", *config, "--data.file", "later.csv"], tmp_path)
    assert "sport, " in shown and [row["label"] for row in written(tmp_path)] == [names for _, names in later]

    output(["export", "--ckpt_path", "runs/news", "--format", "huggingface", "--output", "exported"], tmp_path)
    answers = transformers.pipeline("text-classification", str(tmp_path / "exported"), top_k=None)([later[0][0]])[0]
    of_predict = written(tmp_path)[0]["probabilities"]
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(of_predict, abs=1e-5)
    output(["export", "--ckpt_path", "runs/news", "--format", "safetensors", "--output", "plain"], tmp_path)
    for folder in ("exported", "plain"):
        assert open_checkpoint(tmp_path / folder).several_labels
        assert "any number of them a text" in (tmp_path / folder / "README.md").read_text()

    one = complaint(["validate", *config, "--data.label_separator", "null", "--data.metrics", "[accuracy]"], tmp_path)
    checkpoint = "runs/news/checkpoints/best-"
    assert one.startswith(f"error: data.label_separator is null; allowed: what separates several labels, as {checkpoint}")
    alone = ["--data.label_separator", "null", "--data.metrics", "null", "--data.source", "later.csv"]
    assert "later.csv, line " in complaint(["fit", *task, *own, *several, *alone, "--name", "one"], tmp_path)
    assert not Path("runs/one").exists()
