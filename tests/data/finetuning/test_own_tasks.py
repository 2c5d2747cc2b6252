"""Tasks with two texts, with numbers, with two dev sets, with a user's own columns; rows and settings that are refused."""

import csv
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers import in_one_process, output
from tests.sst2 import scores, sentence, written


@pytest.mark.slow
def test_pairs_regression_and_two_dev_sets(task, tmp_path):
    draw = random.Random(0)
    folder = tmp_path / "glue/MNLI"
    folder.mkdir()
    names = ("entailment", "neutral", "contradiction")
    for name, rows in (("train", 40), ("dev_matched", 13), ("dev_mismatched", 9), ("test_matched", 5), ("test_mismatched", 7)):
        head = ["index", "sentence1", "sentence2", *([] if name.startswith("test") else ["gold_label"])]
        lines = [[str(i), sentence(draw, 1), sentence(draw, 0), names[i % 3]][: len(head)] for i in range(rows)]
        (folder / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in [head, *lines]))
    mnli = ["--data.task", "mnli", "--name", "mnli", "--trainer.max_epochs", "1"]
    output(["fit", *task, *mnli], tmp_path)
    (row,) = scores(tmp_path / "runs/mnli/scores.csv")
    assert {"val/accuracy", "val/score", "val/mismatched/accuracy", "val/mismatched/score"} <= row.keys()
    output(["test", *task, *mnli], tmp_path)
    for name, rows in (("MNLI-m", 5), ("MNLI-mm", 7)):
        lines = (tmp_path / f"runs/mnli/submission/{name}.tsv").read_text().splitlines()[1:]
        assert len(lines) == rows and all(line.split("\t")[1] in names for line in lines)

    folder = tmp_path / "glue/STS-B"
    folder.mkdir()
    for name, rows in (("train", 40), ("dev", 11), ("test", 5)):
        head = ["index", "sentence1", "sentence2", *([] if name == "test" else ["score"])]
        lines = [[str(i), sentence(draw, 1), sentence(draw, 0), f"{draw.uniform(0, 5):.3f}"][: len(head)] for i in range(rows)]
        (folder / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in [head, *lines]))
    stsb = ["--data.task", "STS-B", "--name", "stsb", "--trainer.max_epochs", "1"]
    output(["fit", *task, *stsb], tmp_path)
    (row,) = scores(tmp_path / "runs/stsb/scores.csv")
    assert float(row["val/score"]) == pytest.approx((float(row["val/pearson"]) + float(row["val/spearman"])) / 2)
    pair = ["--data.text", "we saw good", "--data.text_pair", "very fine"]
    assert "value" in output(["predict", *task, *stsb, *pair], tmp_path)
    (record,) = map(json.loads, (tmp_path / "runs/stsb/predictions.jsonl").read_text().splitlines())
    assert record["text"] == ["we saw good", "very fine"] and isinstance(record["value"], float)


@pytest.mark.slow
def test_any_other_task_by_naming_columns(task, tmp_path):
    draw = random.Random(0)
    (tmp_path / "reviews").mkdir()
    rows = [{"body": sentence(draw, i % 2), "stars": ["bad", "good"][i % 2], "n": i} for i in range(80)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "reviews/train.jsonl").write_text("".join(lines[:60]))
    (tmp_path / "reviews/test.jsonl").write_text("".join(lines[60:]))
    own = ["--data.task", "null", "--data.source", "reviews", "--data.columns", "[body]", "--data.label_column", "stars"]
    own += ["--data.labels", "[bad, good]", "--data.metrics", "[accuracy, f1]", "--data.validation_fraction", "0.2"]
    shown = output(["fit", *task, *own, "--trainer.max_epochs", "1"], tmp_path)
    (row,) = scores(tmp_path / "runs/task/scores.csv")
    assert {"val/accuracy", "val/f1"} <= row.keys()
    data = json.loads((tmp_path / "runs/task/result.json").read_text())["data"]
    assert data["train"]["rows"] == 48 and sum(data["validation"]["labels"].values()) == 12
    assert shown.count("48 rows") == 1 and f"bad: {data['train']['labels']['bad']}, good: " in shown
    output(["test", *task, *own], tmp_path)
    assert {"test/accuracy", "test/f1"} <= json.loads((tmp_path / "runs/task/test.json").read_text())["metrics"].keys()
    with open(tmp_path / "reviews.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["body", "stars", "n"])
        writer.writeheader()
        writer.writerows(rows[:60])
    jsonl = json.loads((tmp_path / "runs/task/result.json").read_text())
    output(["fit", *task, *own, "--data.source", "reviews.csv", "--name", "csv", "--trainer.max_epochs", "1"], tmp_path)
    assert json.loads((tmp_path / "runs/csv/result.json").read_text())["metrics"] == jsonl["metrics"]
    output(["test", *task, *own, "--data.source", "reviews.csv"], tmp_path)
    assert [(row["text"], row["label"]) for row in written(tmp_path)] == [(row["body"], row["stars"]) for row in rows[:60]]


OWN = ["--data.task", "null", "--data.source", "glue/SST-2", "--data.columns"]


BAD_SETTINGS = [
    (["--data.task", "SST2B"], ["data.task is 'SST2B'; allowed: CoLA", "did you mean 'SST-2'?"]),
    (["--data.max_length", "64"], ["data.max_length is 64; allowed: up to model.encoder.max_length = 32", "max_windows"]),
    (["--data.tokenizer", "null"], ["data.tokenizer is not given", "model.pretrained"]),
    (["--data.source", "nowhere"], ["nowhere"]),
    (["--model.encoder.num_layrs", "3"], ["did you mean 'model.encoder.num_layers'?"]),
    (["--model.pooling", "max"], ["pooling is 'max'; allowed: first, mean"]),
    (["--model.trained_layers", "3"], ["model.trained_layers is 3; allowed: 0 to 2, or null: everything learns"]),
    (["--model.layer_lr_decay", "1.5"], ["model.layer_lr_decay is 1.5; allowed: more than 0, up to 1"]),
    (["--model.pretrained", "nowhere"], ["model.pretrained is nowhere, which does not exist"]),
    (["--data.task", "RTE"], ["RTE"]),
    (["--data.batch_size", "0"], ["data.batch_size"]),
    (["--data.metrics", "[acuracy]", "--data.task", "null", "--data.columns", "[sentence]"], ["acuracy"]),
    ([*OWN, "[text]", "--data.labels", "[a, b]"], ["train.tsv", "text", "sentence"]),
    ([*OWN, "[sentence]", "--data.labels", "[a]"], ["data.labels"]),
    ([*OWN, "[label]", "--data.label_column", "sentence"], ["train.tsv", "allowed: a finite number", "data.labels"]),
]
BAD_ROWS = [
    ("train", "sentence\tlabel\nso good\t1\nso bad\t7\n", ["train.tsv", "7"]),
    ("train", "sentence\tlabel\nso good\tgood\n", ["train.tsv", "good", "positive"]),
    ("train", "sentence\tlabel\nso good\t1\n\t0\n", ["train.tsv", "empty"]),
    ("train", "text\tlabel\nso good\t1\n", ["train.tsv", "sentence", "text"]),
    ("train", "sentence\tlabel\nso good\t1\textra\n", ["train.tsv"]),
    ("dev", "sentence\nso good\n", ["dev.tsv", "label"]),
]


@pytest.mark.slow
def test_bad_settings_and_bad_rows_are_one_line(task, tmp_path):
    lines = [["fit", *task, *extra] for extra, _ in BAD_SETTINGS]
    for number, (file, content, _) in enumerate(BAD_ROWS):
        folder = shutil.copytree("glue", f"glue{number}")
        (Path(folder) / f"SST-2/{file}.tsv").write_text(content)
        lines.append(["fit", *task, "--data.source", folder])
    found = in_one_process(lines, tmp_path / "printed")
    for line, (status, shown), (*_, expected) in zip(lines, found, [*BAD_SETTINGS, *BAD_ROWS], strict=True):
        errors = [one for one in shown.splitlines() if one.startswith("error: ")]
        assert status == 2 and len(errors) == 1 and "Traceback" not in shown, (line, shown)
        assert all(part in errors[0] for part in expected), (line, errors)
    assert not list(tmp_path.rglob("*.ckpt"))
