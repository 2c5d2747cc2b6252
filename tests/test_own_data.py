"""docs/extending.md and docs/finetuning.md: data of numbers instead of ids, a metric and a loss, in a user's own files."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.nn import functional
from torch.utils.data import DataLoader

from lit_linformer.model import EncoderConfig
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks.scores import Scores
from lit_linformer.utils.files import read_rows
from tests.cli.test_errors import complaint
from tests.helpers import output
from tests.test_own_ideas import block

FINETUNING = (Path(__file__).parents[1] / "docs/finetuning.md").read_text(encoding="utf-8")
SENSORS = """
seed_everything: 0
name: sensors
trainer: {accelerator: cpu, devices: 1, max_epochs: 8, log_every_n_steps: 1}
model:
  class_path: SequenceClassification
  init_args:
    pooling: mean
    dropout: 0.0
    lr: 1.0e-2
    encoder: {input_size: 3, max_length: 128, hidden_size: 8, num_layers: 1, num_heads: 2, projection_dim: 4}
data: {class_path: my_sensors.Sensors}
"""


@pytest.mark.slow
def test_tokens_of_numbers(tmp_path, monkeypatch):
    """The page's sensor readings, classified by this project's own module; tokens of another size are refused."""
    monkeypatch.chdir(tmp_path)
    Path("my_sensors.py").write_text(block("my_sensors.py"))
    Path("sensors.yaml").write_text(SENSORS)
    output(["fit", "--config", "sensors.yaml"], tmp_path)
    result = json.loads(Path("runs/sensors/result.json").read_text())
    assert result["best_metrics"]["val/score"] == 1
    assert 8 * 48 * 20 < result["tokens"] < 8 * 48 * 84  # and not three times as many
    assert result["throughput"]["gflops_per_token"] > 0
    first = {"index": 48, "prediction": "even"}
    for command, told in (("predict", {}), ("test", {"split": "test", "label": "even"}), ("validate", {"split": "validation"})):
        output([command, "--config", "runs/sensors/config.yaml"], tmp_path)
        rows = [json.loads(line) for line in Path("runs/sensors/predictions.jsonl").read_text().splitlines()]
        assert rows[0].items() >= (first | told).items() and [row["index"] for row in rows] == list(range(48, 64))
        assert rows[1]["prediction"] == "odd" and rows[1]["probabilities"]["odd"] > 0.5
    assert not Path("runs/sensors/submission").exists()
    assert read_model("runs/sensors").labels == ("even", "odd")  # from its checkpoint
    line = complaint(["fit", "--config", "sensors.yaml", "--model.encoder.input_size", "4", "--name", "four"], tmp_path)
    assert line == "error: model.encoder.input_size is 4; allowed: 3, the numbers in a token of the data"
    Path("my_sensors.py").write_text(
        Path("my_sensors.py").read_text().replace('("even", "odd")', '("even",)').replace('"index": ', '"number": ')
    )
    line = complaint(["fit", "--config", "sensors.yaml", "--name", "one"], tmp_path)
    assert line == "error: Sensors.labels are even; allowed: 2 names, as num_labels"
    Path("my_sensors.py").write_text(Path("my_sensors.py").read_text().replace('("even",)', '("even", "odd")'))
    line = complaint(["fit", "--config", "sensors.yaml", "--name", "none"], tmp_path)
    held = "input_ids, attention_mask, labels, number"
    assert line == f"error: a batch holds {held}; allowed: index, too, the number of each row (B,)"


class Unnamed(LightningDataModule):
    """Rows of numbers with a class, a value or several classes; two validation sets."""

    input_size, evaluation_names = 2, ("", "again")

    def __init__(self, values: bool = False, several_labels: bool = False):
        super().__init__()
        self.num_labels, self.metrics = (1, ("pearson",)) if values else (3, ("accuracy",))
        self.values, self.several_labels = values, several_labels

    def batch(self, numbers):
        labels = torch.tensor(numbers) % 3
        if self.several_labels:  # 0, 1 or 2 of them
            labels = (torch.arange(3) < labels[:, None]).float()
        tokens = labels if labels.dim() == 1 else labels.sum(1)
        return {
            "input_ids": torch.ones(len(numbers), 4, 2) * tokens[:, None, None],
            "labels": labels * 1001.0 if self.values else labels,
            "index": torch.tensor(numbers),
        }

    def loader(self):
        return DataLoader(range(12), batch_size=4, collate_fn=self.batch)

    train_dataloader = loader

    def val_dataloader(self):
        return [self.loader(), self.loader()]

    test_dataloader = val_dataloader


@pytest.mark.parametrize(("values", "first"), [("false", "2"), ("true", 2002.0)])  # bfloat16 only has 2000 and 2008
def test_scores_and_rows_of_classes_without_names_and_of_values_in_bfloat16(values, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sensors.yaml").write_text(
        SENSORS.replace("my_sensors.Sensors", "tests.test_own_data.Unnamed").replace("size: 3", "size: 2")
    )
    words = ["--data.values", values, "--trainer.callbacks+", "TaskScores", "--trainer.max_epochs", "1"]
    words += ["--trainer.precision", "bf16-true"]
    output(["fit", "--config", "sensors.yaml", *words], tmp_path)
    assert len(Path("runs/sensors/scores.csv").read_text().splitlines()) == 2
    output(["test", "--config", "runs/sensors/config.yaml"], tmp_path)
    rows = [json.loads(line) for line in Path("runs/sensors/predictions.jsonl").read_text().splitlines()]
    assert [(row["split"], row["index"]) for row in rows] == [(s, n) for s in ("test", "test_again") for n in range(12)]
    assert rows[2]["label"] == first and ("value" in rows[2]) == (values == "true")
    files = {path.name: path.read_text().splitlines() for path in Path("runs/sensors/submission").iterdir()}
    assert files.keys() == {"predictions.tsv", "again.tsv"} and {len(lines) for lines in files.values()} == {13}


def test_several_labels_of_data_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sensors.yaml").write_text(
        SENSORS.replace("my_sensors.Sensors", "tests.test_own_data.Unnamed").replace("size: 3", "size: 2")
    )
    output(["fit", "--config", "sensors.yaml", "--data.several_labels", "true", "--trainer.callbacks+", "TaskScores"], tmp_path)
    output(["test", "--config", "runs/sensors/config.yaml"], tmp_path)
    rows = [json.loads(line) for line in Path("runs/sensors/predictions.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows[:3]] == [[], ["0"], ["0", "1"]]
    right = sum(row["prediction"] == row["label"] for row in rows[:12])
    metrics = json.loads(Path("runs/sensors/test.json").read_text())["metrics"]
    assert metrics["test/accuracy"] == pytest.approx(right / 12) and right >= 8
    lines = Path("runs/sensors/submission/predictions.tsv").read_text().splitlines()[1:]
    assert lines == [f"{row['index']}\t{'|'.join(row['prediction'])}" for row in rows[:12]]


@pytest.mark.slow
def test_a_metric_of_ones_own_decides_which_checkpoint_is_best(tmp_path, monkeypatch):
    """docs/finetuning.md's mean absolute error is that of all rows in predictions.jsonl."""
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(block("my_task.py", FINETUNING))
    text = SENSORS.replace("my_sensors.Sensors", "tests.test_own_data.Unnamed").replace("size: 3", "size: 2")
    Path("rating.yaml").write_text(text.replace("SequenceClassification", "my_task.Rating"))
    words = ["--data.values", "true", "--trainer.callbacks+", "TaskScores", "--trainer.max_epochs", "3"]
    assert "mean absolute error" in output(["fit", "--config", "rating.yaml", *words], tmp_path)
    scores = read_rows(Path("runs/sensors/scores.csv"))
    best = json.loads(Path("runs/sensors/result.json").read_text())["best_metrics"]
    assert len(scores) == 3 and best["val/mae"] == min(row["val/mae"] for row in scores) and "val/pearson" in best
    output(["validate", "--config", "runs/sensors/config.yaml"], tmp_path)
    rows = [json.loads(line) for line in Path("runs/sensors/predictions.jsonl").read_text().splitlines()]
    errors = [abs(row["value"] - row["label"]) for row in rows if row["split"] == "validation"]
    assert len(errors) == 12 and sum(errors) / 12 == pytest.approx(best["val/mae"], rel=1e-6)
    output(["test", "--config", "runs/sensors/config.yaml"], tmp_path)  # on the same rows
    assert json.loads(Path("runs/sensors/test.json").read_text())["metrics"]["test/mae"] == best["val/mae"]


def test_a_loss_of_ones_own_is_what_training_minimises():
    """docs/finetuning.md's weighted cross-entropy; validation's stays the plain one."""
    names: dict = {}
    exec(block("my_loss.py", FINETUNING), names)
    encoder = EncoderConfig(10, 8, 16, 1, 2, 32, projection_dim=2)
    task = names["Weighted"](weights=[1.0, 5.0], encoder=encoder, num_labels=2, dropout=0.0, attention_dropout=0.0)
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([0, 1]), "index": torch.tensor([0, 1])}
    each = functional.cross_entropy(task(batch), batch["labels"], reduction="none")
    assert torch.allclose(task.training_loss(batch), (each[0] + 5 * each[1]) / 2)
    scores = Scores(["accuracy"], 2)
    scores.update(task(batch), batch["labels"], batch["index"])
    assert scores.results()["scores"]["loss"] == pytest.approx(each.mean().item())
