"""`validate`, `test` and `predict` of what --model.pretrained names: an exported folder, or a run, without its config."""

import json
import re

import pytest

from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.runs.trained_model import open_checkpoint
from tests.cli.test_errors import complaint
from tests.helpers import output
from tests.sst2 import CONFIG


@pytest.fixture(scope="module")
def folders(pretrained, finetuned, tmp_path_factory):
    """Both runs as safetensors."""
    from lit_linformer.export import safetensors_folder

    made = {"mlm": tmp_path_factory.mktemp("mlm"), "task": tmp_path_factory.mktemp("task")}
    for folder, run in zip(made.values(), (pretrained, finetuned), strict=True):
        safetensors_folder.write(open_checkpoint(run), folder)
    return made


def records(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_folder_answers_as_its_run_does(folders, pretrained, finetuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, found = ["--data.text", "one <mask> here"], []
    for source in (folders["mlm"], pretrained, find_checkpoint(pretrained, "best")):
        output(["predict", "--model.pretrained", str(source), *text], tmp_path)
        found.append(records(tmp_path / f"runs/pretrained-{source.stem}"))
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    # In the place of a run, whose own checkpoint is not asked for.
    monkeypatch.chdir(finetuned.parents[1])
    argv = ["--config", str(pretrained / "config.yaml"), "--name", "task", "--model.pretrained", str(folders["mlm"])]
    output(["predict", *argv, *text], tmp_path)
    assert records(finetuned) == found[0]


def test_perplexity_of_a_folder_is_its_runs(folders, pretrained, corpus, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--data.validation_fraction", "0.1"]
    output(["validate", "--model.pretrained", str(folders["mlm"]), *data, "--name", "measured"], tmp_path)
    output(["validate", "--model.pretrained", str(pretrained), *data, "--name", "run"], tmp_path)
    measured, of_run = (json.loads((tmp_path / "runs" / name / "validate.json").read_text()) for name in ("measured", "run"))
    assert measured["metrics"] == of_run["metrics"] and measured["metrics"]["val/perplexity"] > 1
    assert measured["command"].startswith("python run.py validate --model.pretrained")


def test_a_classifiers_folder_keeps_its_head(folders, finetuned, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuned.parents[1])
    text = ["--data.text", json.dumps(["a good film", "an awful plot"])]
    output(["predict", "--config", "runs/task/config.yaml", *text], tmp_path)
    expected = records(finetuned)
    argv = ["--config", "runs/task/config.yaml", "--model.pretrained", str(folders["task"]), "--name", "folder", *text]
    output(["predict", *argv], tmp_path)
    assert records(finetuned.parent / "folder") == expected


def test_another_kind_of_model_is_one_line(folders, finetuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = complaint(["predict", "--model.pretrained", str(folders["task"]), "--data.text", "a <mask>"], tmp_path)
    assert "which has no masked-language-model head" in line
    (tmp_path / "task.yaml").write_text(
        re.sub(r"    encoder:\n(      .*\n)+|    tokenizer: .*\n|    vocab_size: .*\n", "", CONFIG)
    )
    argv = ["--config", "task.yaml", "--model.pretrained", str(folders["mlm"]), "--data.text", "a"]
    line = complaint(["predict", *argv], tmp_path)
    assert "a masked language model whose weights are not those of SequenceClassification as it is set up here" in line
