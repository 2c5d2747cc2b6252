"""What `test`, `validate` and `predict` write: GLUE's submission, and a line for each text."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_linformer.callbacks.predictions import FILE, PredictionWriter, _part, _table
from lit_linformer.callbacks.task_scores import submission
from lit_linformer.data.finetuning.text_tasks import find_task, own_task
from tests.helpers import output
from tests.sst2 import written


@pytest.fixture
def learnt(task, learnt, tmp_path):
    """Command-line arguments, in a folder with a copy of the run."""
    shutil.copytree(learnt / "runs", tmp_path / "runs")
    return task


@pytest.mark.slow
def test_test_writes_glues_submission_and_predict_classifies(learnt, tmp_path):
    shown = output(["test", *learnt], tmp_path)
    lines = (tmp_path / "runs/task/submission/SST-2.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 22 and "no labels" in shown
    right = sum(line == f"{i}\t{i % 2}" for i, line in enumerate(lines[1:]))
    assert right >= 15
    assert "21 rows → runs/task/predictions.jsonl" in shown
    tested, texts = written(tmp_path), (tmp_path / "glue/SST-2/test.tsv").read_text().splitlines()[1:]
    assert [f"{i}\t{row['text']}" for i, row in enumerate(tested)] == texts and "label" not in tested[0]
    assert [["negative", "positive"].index(row["prediction"]) for row in tested] == [int(line[-1]) for line in lines[1:]]

    shown = output(["validate", *learnt], tmp_path)
    validated, rows = written(tmp_path), (tmp_path / "glue/SST-2/dev.tsv").read_text().splitlines()[1:]
    assert [f"{row['text']}\t{int(row['label'] == 'positive')}" for row in validated] == rows
    assert [row["line"] for row in validated] == list(range(2, 39)) and {row["split"] for row in validated} == {"validation"}
    assert all(max(row["probabilities"], key=row["probabilities"].get) == row["prediction"] for row in validated)
    wrong = sum(row["label"] != row["prediction"] for row in validated)
    accuracy = json.loads((tmp_path / "runs/task/validate.json").read_text())["metrics"]["val/accuracy"]
    assert 1 - wrong / 37 == pytest.approx(accuracy) and f"37 rows, {wrong} of them wrong → runs/task/pred" in shown

    shown = output(["predict", *learnt, "--data.file", "glue/SST-2/dev.tsv"], tmp_path)
    assert "37 texts → runs/task/predictions.jsonl (which replaces an earlier one), of which the first 10 are shown" in shown
    for row, other in zip(validated, written(tmp_path), strict=True):
        assert {name: row[name] for name in ("line", "text", "label", "prediction")}.items() <= other.items()
        assert row["probabilities"] == pytest.approx(other["probabilities"], rel=1e-5)
    (tmp_path / "runs/task/predictions.jsonl").rename(tmp_path / "earlier.jsonl")
    shown = output(["predict", *learnt, "--data.text", '["we saw good", "the plot so awful"]'], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == ["we saw good", "the plot so awful"]
    assert [record["top"][0]["label"] for record in records] == ["positive", "negative"]
    assert all(sum(found["probability"] for found in record["top"]) == pytest.approx(1) for record in records)
    assert "2 texts → runs/task/predictions.jsonl\n" in shown and "positive" in shown
    shown = output(["predict", *learnt, "--data.text", "we saw good", "--trainer.fast_dev_run", "true"], tmp_path)
    assert "1 text\n" in shown and len((tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()) == 2
    (tmp_path / "texts.txt").write_text("we saw good\n\nthe plot so awful\n")
    shown = output(["predict", *learnt, "--data.file", "texts.txt"], tmp_path)
    assert "2 texts → runs/task/predictions.jsonl (which replaces an earlier one)\n" in shown
    from_file = [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]
    assert [r["top"][0]["probability"] for r in from_file] == pytest.approx([r["top"][0]["probability"] for r in records])


@pytest.mark.slow
def test_one_process_and_two_submit_the_same(learnt, tmp_path):
    output(["test", *learnt], tmp_path)
    path = tmp_path / "runs/task/submission/SST-2.tsv"
    one, rows = path.read_text(), written(tmp_path)
    path.unlink()
    shown = output(["test", *learnt, "--trainer.strategy", "ddp_fork", "--trainer.devices", "2"], tmp_path)
    assert path.read_text() == one and shown.count("21 rows → ") == 1
    for row, other in zip(rows, written(tmp_path), strict=True):
        assert row.pop("probabilities") == pytest.approx(other.pop("probabilities"), rel=1e-5) and row == other
    shown = output(["validate", *learnt, "--trainer.strategy", "ddp_fork", "--trainer.devices", "2"], tmp_path)
    assert "val/score" in shown and "sync_dist" not in shown  # Lightning's warning that each process may have its own value


def test_small_values_of_a_regression_keep_their_digits():
    values = torch.tensor([1.25e-5, 12345.5], dtype=torch.float64)
    assert submission(values, own_task(["text"])) == ["1.25e-05", "12345.5"]
    assert submission(values, find_task("STS-B")) == ["0.000", "5.000"]  # in the format of GLUE's site
    *_, column = _table([{"text": "so", "value": value} for value in values.tolist()]).columns
    assert [str(cell) for cell in column.cells] == ["1.25e-05", "12345.5"]


def test_labels_of_a_regression_are_told_as_the_table_has_them(task, tmp_path):
    """Stored in 32 bits, 0.2 was shown as 0.20000000298023224."""
    ratings = [0.2, 4.4, 2.25, 1e-7, 3.3, 1.1] * 5
    lines = [f"{'so good' if rating > 2 else 'so bad'} {i},{rating}\n" for i, rating in enumerate(ratings)]
    (tmp_path / "rated.csv").write_text("text,label\n" + "".join(lines))
    own = ["--data.task", "null", "--data.source", "rated.csv", "--data.columns", "[text]", "--data.validation_fraction", "0.5"]
    output(["fit", *task, *own, "--trainer.max_steps", "1"], tmp_path)
    output(["validate", *task, *own], tmp_path)
    rows = written(tmp_path)
    assert len(rows) == 15 and [row["label"] for row in rows] == [ratings[row["line"] - 2] for row in rows]
    values = json.loads((tmp_path / "runs/task/result.json").read_text())["data"]["validation"]["values"]
    labels = [row["label"] for row in rows]
    assert (values["least"], values["greatest"]) == (min(labels), max(labels))


def test_of_a_long_text_the_part_around_the_mask_is_shown():
    """All of it was shown: five hundred lines for a text of 2,200 words."""
    text = f"{'far ' * 500}one <mask> here {'between ' * 500}another <mask> there{' after' * 500}"
    records = [{"text": text, "mask": number, "top": [{"token": "a", "probability": 0.5}]} for number in (1, 2)]
    shown = [str(cell) for cell in next(iter(_table(records, "<mask>").columns)).cells]
    assert [len(part) for part in shown] == [302, 302]
    assert "one <mask> here" in shown[0] and "another <mask> there" in shown[1]
    assert _part(text, "<mask>", 0) == f"{text[:300]}…"  # of a classifier
    assert _part("so <mask>", "<mask>", 1) == "so <mask>" and _part(f"<mask>{'.' * 300}", "<mask>", 1).startswith("<mask>.")


@pytest.mark.parametrize(
    ("outputs", "rows"),
    [(torch.ones(2), [1.0, 1.0]), (torch.tensor(2.0), [2.0]), (np.array([3, 4]), [3, 4]), ((torch.tensor(5), 6), [[5, 6]])],
)
def test_what_a_module_of_ones_own_predicts_is_a_row_a_line(outputs, rows):
    writer = PredictionWriter()
    writer.on_predict_batch_end(None, None, outputs, None)
    assert [json.loads(line) for _, line in writer._lines] == [{"prediction": row} for row in rows]


@pytest.mark.parametrize(
    "record",
    [
        {"text": "series 3", "value": torch.ones(2)},
        {"text": "series 3", "value": None},
        {"text": "a", "top": [["x", 0.5]]},
        {"text": "a", "top": [{"token": "x"}]},
        {"text": torch.arange(3), "value": 0.5},
    ],
)
def test_records_of_another_shape_are_written_but_not_printed(record, tmp_path, capsys):
    """A module of your own may give these names to anything; such a file was written, then `predict` ended in a traceback."""
    writer, trainer = PredictionWriter(), SimpleNamespace(is_global_zero=True, fast_dev_run=False, default_root_dir=tmp_path)
    writer.on_predict_batch_end(trainer, None, [record], None)
    writer.on_predict_end(trainer, None)
    assert capsys.readouterr().out.startswith("1 prediction → ")
    assert json.loads((tmp_path / FILE).read_text()).keys() == record.keys()


def test_a_second_predict_writes_its_own_rows_alone(tmp_path):
    loop = SimpleNamespace(return_predictions=True)
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=False, default_root_dir=tmp_path, predict_loop=loop)
    writer = PredictionWriter()
    for value in (1, 2):
        writer.on_predict_start(trainer, None)
        writer.on_predict_batch_end(trainer, None, [value], None)
        writer.on_predict_end(trainer, None)
        assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == [{"prediction": value}]


def test_predictions_of_many_rows_take_little_more_memory_than_their_file():
    """Each record was kept as nested dictionaries, by Lightning as well: 4 KB for a mask's line of 400 bytes."""
    writer, loop = PredictionWriter(), SimpleNamespace(return_predictions=True)
    writer.on_predict_start(SimpleNamespace(predict_loop=loop), None)
    tracemalloc.start()
    for number in reversed(range(1000)):
        top = [{"token": f"t{rank} {number}", "id": rank, "probability": rank / 7} for rank in range(5)]
        writer.on_predict_batch_end(None, None, [{"text": f"text {number}", "top": top}], {"index": torch.tensor([number])})
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert not loop.return_predictions and kept < 2 * sum(len(line) for _, line in writer._lines)
    assert [record["text"] for _, record in writer._shown] == [f"text {number}" for number in range(10)]


def test_a_test_of_one_row(learnt, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/test.tsv").write_text("index\tsentence\n0\tthe film is so good\n")
    assert "1 rows → runs/task/predictions.jsonl" in output(["test", *learnt, "--data.source", "one"], tmp_path)
    assert [row["text"] for row in written(tmp_path)] == ["the film is so good"]
