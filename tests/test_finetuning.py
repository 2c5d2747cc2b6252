"""Fine-tuning through the command line: learns, resumes bit for bit, scores alike on two processes, carries over, predicts."""

import csv
import json
import random
import re

import pytest

from tests.helpers import assert_same, load, output, read_log, run_forked
from tests.test_resume import fit

CONFIG = """
seed_everything: 3
name: task
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 3
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks:
    - class_path: lit_linformer.callbacks.TaskScores
model:
  class_path: lit_linformer.tasks.SequenceClassification
  init_args:
    encoder:
      max_length: 32
      hidden_size: 16
      num_layers: 2
      num_heads: 2
      intermediate_size: 32
      projection_dim: 8
      norm: pre
    pooling: mean
    lr: 1.0e-2
data:
  class_path: lit_linformer.data.FineTuningData
  init_args:
    task: SST-2
    source: glue
    tokenizer: bpe
    vocab_size: 300
    batch_size: 8
    seed: ${seed_everything}
last:
  every_n_steps: 5
best:
  monitor: val/score
  mode: max
"""
GOOD, BAD, OTHER = ("good", "fine", "great"), ("bad", "poor", "awful"), ("the", "film", "is", "so", "very", "plot", "we", "saw")


def sentence(draw, label):
    words = draw.choices(OTHER, k=draw.randint(2, 16))
    words.insert(draw.randrange(len(words)), draw.choice(GOOD if label else BAD))
    return " ".join(words)


def write_sst2(folder, rows=120, seed=0):
    """SST-2 as GLUE ships it: train, dev, and a test without labels."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", rows), ("dev", 37)):
        labels = [draw.randrange(2) for _ in range(count)]
        lines = [f"{sentence(draw, label)}\t{label}\n" for label in labels]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    lines = [f"{i}\t{sentence(draw, i % 2)}\n" for i in range(21)]
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(lines))


@pytest.fixture
def task(tmp_path, cache, monkeypatch):
    """Arguments of a command that fine-tunes a tiny encoder from scratch on files in GLUE's layout."""
    monkeypatch.chdir(tmp_path)
    write_sst2(tmp_path / "glue/SST-2")
    (tmp_path / "task.yaml").write_text(CONFIG)
    return ["--config", "task.yaml", "--data.cache_dir", str(cache)]


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]


def scores(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_learns_a_task_and_leaves_what_scripts_and_people_read(task, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = output(["fit", *task, "--trainer.max_epochs", "8"], tmp_path)
    run = tmp_path / "runs/task"
    rows = scores(run / "scores.csv")
    assert [row["step"] for row in rows] == [str(15 * epoch) for epoch in range(1, 9)]
    result = json.loads((run / "result.json").read_text())
    assert result["metrics"]["val/accuracy"] == float(rows[-1]["val/accuracy"]) and result["step"] == 120
    best = max(rows, key=lambda row: float(row["val/score"]))
    assert result["best_metrics"]["val/score"] == float(best["val/score"]) > 0.8
    assert result["best_step"] == int(best["step"])
    (checkpoint,) = (run / "checkpoints").glob("best-*.ckpt")
    assert f"best-{int(best['step']):08d}" in checkpoint.name
    assert "step 15  validation score" in shown and "step 50/120" in shown
    assert '--data.text "…"\n' in shown
    events = EventAccumulator(str(run)).Reload()
    points = [(point.step, point.value) for point in events.Scalars("val/accuracy")]
    assert points == [(int(row["step"]), pytest.approx(float(row["val/accuracy"]))) for row in rows]
    assert "val/confusion_matrix" in events.Tags()["images"]
    (last, *_) = events.Tensors("val/confusion_matrix/text_summary")[::-1]
    counts = [int(n) for n in re.findall(r"\| (\d+)(?= )", last.tensor_proto.string_val[0].decode())]
    assert sum(counts) == 37 and (counts[0] + counts[3]) / 37 == pytest.approx(result["metrics"]["val/accuracy"])


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--data.num_workers", "2", "--trainer.accumulate_grad_batches", "2"],
        ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.batch_size", "4"],
        ["--model.layer_lr_decay", "0.7", "--data.max_length", "10", "--data.max_windows", "3", "--data.window_overlap", "2"],
    ],
    ids=["plain", "workers, accumulate", "two processes", "layer decay, windows"],
)
def test_killed_run_resumes_bit_for_bit(extra, task, tmp_path):
    accumulate = 2 if "--trainer.accumulate_grad_batches" in extra else 1
    assert fit(task, "whole", tmp_path / "whole", *extra) == 0
    # After the checkpoint at step 5, then after that at an epoch's end, in the middle of the next one.
    assert fit(task, "killed", tmp_path / "killed", *extra, kill_at=9 * accumulate - accumulate // 2) == -9
    assert fit(task, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last", kill_at=18 * accumulate) == -9
    assert fit(task, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last") == 0
    for rank in range(2 if "--trainer.devices" in extra else 1):
        assert read_log(tmp_path / f"whole.{rank}") == read_log(tmp_path / f"killed.{rank}")
    whole, killed = (load(tmp_path / f"runs/{name}/checkpoints/last.ckpt") for name in ("whole", "killed"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "seen", "global_step"):
        assert_same(whole[part], killed[part], part)
    assert scores(tmp_path / "runs/whole/scores.csv") == scores(tmp_path / "runs/killed/scores.csv")


def test_two_processes_train_and_score_like_one(task, tmp_path):
    still = ["--model.dropout", "0", "--model.attention_dropout", "0", "--trainer.max_epochs", "2"]
    assert run_forked(["fit", *task, "--name", "one", *still]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.batch_size", "4"]
    shown = output(["fit", *task, "--name", "two", *still, *two], tmp_path)
    assert shown.count("120 rows") == shown.count("37 rows") == 1
    one, two = (scores(tmp_path / f"runs/{name}/scores.csv") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert {key: float(value) for key, value in b.items()} == pytest.approx({k: float(v) for k, v in a.items()}, rel=1e-4)


def test_pretrained_run_is_carried_over_and_its_own_checkpoint_suffices_later(task, tiny, tmp_path):
    assert run_forked(["fit", *tiny, "--trainer.max_steps", "2", "--model.encoder.dropout", "0"]) == 0
    (tmp_path / "sst2.yaml").write_text(
        re.sub(r"    encoder:\n(      .*\n)+|    tokenizer: .*\n|    vocab_size: .*\n", "", CONFIG)
    )
    argv = ["--config", "sst2.yaml", *task[2:], "--trainer.max_epochs", "1"]
    output(["fit", *argv, "--model.pretrained", "runs/tiny"], tmp_path)
    (tmp_path / "runs/tiny").rename(tmp_path / "gone")
    run = tmp_path / "runs/task"
    assert (run / "tokenizer.json").read_text() == (tmp_path / "gone/tokenizer.json").read_text()
    config = (run / "config.yaml").read_text()
    assert "pretrained: runs/tiny" in config
    from_config = ["--config", "runs/task/config.yaml"]
    output(["validate", *from_config], tmp_path)
    validated = json.loads((run / "validate.json").read_text())["metrics"]["val/accuracy"]
    assert validated == pytest.approx(json.loads((run / "result.json").read_text())["best_metrics"]["val/accuracy"])
    shown = output(["fit", *from_config, "--ckpt_path", "last", "--trainer.max_epochs", "2"], tmp_path)
    assert "trainer.max_epochs: 1 → 2" in shown and "pretrained" not in shown.split("resuming")[1].split("step")[1]
    output(["predict", *from_config, "--data.source", "gone-too", "--data.text", "so very good"], tmp_path)


def test_test_writes_glues_submission_and_predict_classifies(task, tmp_path):
    output(["fit", *task, "--trainer.max_epochs", "8"], tmp_path)
    shown = output(["test", *task], tmp_path)
    lines = (tmp_path / "runs/task/submission/SST-2.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 22 and "no labels" in shown
    right = sum(line == f"{i}\t{i % 2}" for i, line in enumerate(lines[1:]))
    assert right >= 15
    assert "21 rows → runs/task/predictions.jsonl" in shown
    tested, texts = written(tmp_path), (tmp_path / "glue/SST-2/test.tsv").read_text().splitlines()[1:]
    assert [f"{i}\t{row['text']}" for i, row in enumerate(tested)] == texts and "label" not in tested[0]
    assert [["negative", "positive"].index(row["prediction"]) for row in tested] == [int(line[-1]) for line in lines[1:]]

    shown = output(["validate", *task], tmp_path)
    validated, rows = written(tmp_path), (tmp_path / "glue/SST-2/dev.tsv").read_text().splitlines()[1:]
    assert [f"{row['text']}\t{int(row['label'] == 'positive')}" for row in validated] == rows
    assert [row["line"] for row in validated] == list(range(2, 39)) and {row["split"] for row in validated} == {"validation"}
    assert all(max(row["probabilities"], key=row["probabilities"].get) == row["prediction"] for row in validated)
    wrong = sum(row["label"] != row["prediction"] for row in validated)
    accuracy = json.loads((tmp_path / "runs/task/validate.json").read_text())["metrics"]["val/accuracy"]
    assert 1 - wrong / 37 == pytest.approx(accuracy) and f"37 rows, {wrong} of them wrong → runs/task/pred" in shown

    shown = output(["predict", *task, "--data.file", "glue/SST-2/dev.tsv"], tmp_path)
    assert "37 texts → runs/task/predictions.jsonl, of which the first 10 are shown" in shown
    for row, other in zip(validated, written(tmp_path), strict=True):
        assert {name: row[name] for name in ("line", "text", "label", "prediction")}.items() <= other.items()
        assert row["probabilities"] == pytest.approx(other["probabilities"], rel=1e-5)
    shown = output(["predict", *task, "--data.text", '["we saw good", "the plot so awful"]'], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == ["we saw good", "the plot so awful"]
    assert [record["top"][0]["label"] for record in records] == ["positive", "negative"]
    assert all(sum(found["probability"] for found in record["top"]) == pytest.approx(1) for record in records)
    assert "2 texts → runs/task/predictions.jsonl" in shown and "positive" in shown
    (tmp_path / "texts.txt").write_text("we saw good\n\nthe plot so awful\n")
    output(["predict", *task, "--data.file", "texts.txt"], tmp_path)
    from_file = [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]
    assert [r["top"][0]["probability"] for r in from_file] == pytest.approx([r["top"][0]["probability"] for r in records])


def test_one_process_and_two_submit_the_same(task, tmp_path):
    output(["fit", *task, "--trainer.max_epochs", "1"], tmp_path)
    output(["test", *task], tmp_path)
    path = tmp_path / "runs/task/submission/SST-2.tsv"
    one, rows = path.read_text(), written(tmp_path)
    path.unlink()
    shown = output(["test", *task, "--trainer.strategy", "ddp_fork", "--trainer.devices", "2"], tmp_path)
    assert path.read_text() == one and shown.count("21 rows → ") == 1
    for row, other in zip(rows, written(tmp_path), strict=True):
        assert row.pop("probabilities") == pytest.approx(other.pop("probabilities")) and row == other


def test_early_stopping_on_the_tasks_own_metric(task, tmp_path):
    stop = ["--trainer.callbacks+", "lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor", "val/score"]
    stop += ["--trainer.callbacks.mode", "max", "--trainer.callbacks.patience", "1", "--trainer.callbacks.min_delta", "2"]
    output(["fit", *task, *stop], tmp_path)
    assert len(scores(tmp_path / "runs/task/scores.csv")) == 2


def test_a_run_may_end_before_its_first_validation(task, tmp_path):
    stop = ["--trainer.callbacks+", "lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor", "val/score"]
    stop += ["--trainer.callbacks.check_on_train_epoch_end", "false", "--trainer.max_steps", "4"]
    output(["fit", *task, *stop, "--last.validation", "false"], tmp_path)
    result = json.loads((tmp_path / "runs/task/result.json").read_text())
    assert result["step"] == 4 and "best_metrics" not in result and not (tmp_path / "runs/task/scores.csv").exists()
    output(["fit", *task, *stop, "--name", "validated"], tmp_path)
    result = json.loads((tmp_path / "runs/validated/result.json").read_text())
    assert result["step"] == result["best_step"] == 4 and len(scores(tmp_path / "runs/validated/scores.csv")) == 1


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


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--data.task", "SST2B"], ["data.task is 'SST2B'; allowed: CoLA", "did you mean 'SST-2'?"]),
        (["--data.max_length", "64"], ["data.max_length is 64; allowed: up to model.encoder.max_length = 32", "max_windows"]),
        (["--data.tokenizer", "null"], ["data.tokenizer is not given", "model.pretrained"]),
        (["--data.source", "nowhere"], ["nowhere"]),
        (["--model.encoder.num_layrs", "3"], ["did you mean 'model.encoder.num_layers'?"]),
        (["--model.pooling", "max"], ["pooling is 'max'; allowed: first, mean"]),
        (["--model.layer_lr_decay", "1.5"], ["model.layer_lr_decay is 1.5; allowed: 0 to 1"]),
        (["--model.pretrained", "nowhere"], ["model.pretrained is nowhere, which does not exist"]),
        (["--data.task", "RTE"], ["RTE"]),
        (["--data.batch_size", "0"], ["data.batch_size"]),
        (["--data.metrics", "[acuracy]", "--data.task", "null", "--data.columns", "[sentence]"], ["acuracy"]),
        ([*OWN, "[text]", "--data.labels", "[a, b]"], ["train.tsv", "text", "sentence"]),
        ([*OWN, "[sentence]", "--data.labels", "[a]"], ["data.labels"]),
        ([*OWN, "[label]", "--data.label_column", "sentence"], ["train.tsv", "allowed: a finite number", "data.labels"]),
    ],
)
def test_bad_settings_are_one_line(extra, expected, task, tmp_path):
    shown = output(["fit", *task, *extra], tmp_path, status=2)
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in shown, shown
    for part in expected:
        assert part in errors[0]
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("train", "sentence\tlabel\nso good\t1\nso bad\t7\n", ["train.tsv", "7"]),
        ("train", "sentence\tlabel\nso good\tgood\n", ["train.tsv", "good", "positive"]),
        ("train", "sentence\tlabel\nso good\t1\n\t0\n", ["train.tsv", "empty"]),
        ("train", "text\tlabel\nso good\t1\n", ["train.tsv", "sentence", "text"]),
        ("train", "sentence\tlabel\nso good\t1\textra\n", ["train.tsv"]),
        ("dev", "sentence\nso good\n", ["dev.tsv", "label"]),
    ],
)
def test_bad_rows_are_one_line(file, content, expected, task, tmp_path):
    (tmp_path / f"glue/SST-2/{file}.tsv").write_text(content)
    shown = output(["fit", *task], tmp_path, status=2)
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in shown, shown
    for part in expected:
        assert part in errors[0]


def test_checkpoint_of_another_number_of_classes_or_tokenizer(task, tiny, tmp_path):
    output(["fit", *task, "--trainer.max_epochs", "1"], tmp_path)
    argv = ["validate", *task, "--data.task", "null", "--data.columns", "[sentence]", "--data.labels", '["0", "1", "2"]']
    shown = output([*argv, "--data.source", "glue/SST-2", "--ckpt_path", "last"], tmp_path, status=2)
    assert "error: the checkpoint does not fit this model: net.head.output" in shown
    wider = ["--ckpt_path", "last", "--model.encoder.hidden_size", "32"]
    assert "error: model.encoder.hidden_size is 32, in the checkpoint" in output(["fit", *task, *wider], tmp_path, status=2)
    assert run_forked(["fit", *tiny, "--trainer.max_steps", "2"]) == 0
    (tmp_path / "sst2.yaml").write_text(re.sub(r"    encoder:\n(      .*\n)+", "", CONFIG))
    argv = ["fit", "--config", "sst2.yaml", *task[2:], "--name", "other", "--model.pretrained", "runs/tiny"]
    shown = output(argv, tmp_path, status=2)  # tokenizer: bpe, trained on the task's own text
    assert "error: data.tokenizer" in shown and "model.pretrained" in shown


def test_a_loss_that_is_nan_ends_the_run(task, tmp_path):
    words = ["--model.lr", "1e4", "--model.weight_decay", "100", "--model.warmup_fraction", "0"]
    line = output(["fit", *task, *words], tmp_path, status=2).splitlines()[-1]
    assert re.match(r"error: the loss is (nan|inf) at step |error: weights, or AdamW's averages", line)
    assert "a lower model.lr (now 10000.0)" in line
    assert not [*(tmp_path / "runs").rglob("*.ckpt")]
