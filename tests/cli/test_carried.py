"""Settings that a checkpoint determines for the command that resumes or evaluates it: tokenizer, pooling, classes.

At the end: `validate`, `test` and `predict` on what --model.pretrained names, an exported folder or a run, without its config.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from lit_linformer.cli.carried import carry_over
from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.runs.trained_model import open_checkpoint
from tests.cli.test_errors import complaint
from tests.helpers import load, output, run_forked, slow, write_corpus
from tests.sst2 import CONFIG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def grown(put, tmp_path, cache, monkeypatch):
    """A copy of a run whose text has grown since; returns arguments that read the new text."""
    monkeypatch.chdir(tmp_path)
    put("tiny")
    text = write_corpus(tmp_path / "text.txt")
    text.write_text(text.read_text() + "\n" + "quite other words than before them are here\n\n" * 60)
    return ["--config", "runs/tiny/config.yaml", "--data.source", str(text), "--data.cache_dir", str(cache)]


def tokenizer_of(run):
    return json.loads(load(run / "checkpoints/last.ckpt")["tokenizer"])


@pytest.mark.parametrize("command", ["validate", slow("test")])
def test_a_text_that_has_grown_is_read_with_the_runs_tokenizer(command, grown, tmp_path):
    """A newly trained one would give tokens other ids than the weights know."""
    run = tmp_path / "runs/tiny"
    output([command, *grown], tmp_path)
    measured = json.loads((run / f"{command}.json").read_text())["metrics"]
    output([command, *grown, "--data.tokenizer", str(run / "tokenizer.json")], tmp_path)
    named = json.loads((run / f"{command}.json").read_text())["metrics"]
    assert measured == named
    # The same with the checkpoint alone.
    shutil.copy(find_checkpoint(run, "best"), tmp_path / "alone.ckpt")
    output([command, *grown, "--ckpt_path", "alone.ckpt", "--name", "alone"], tmp_path)
    assert json.loads((run.with_name("alone") / f"{command}.json").read_text())["metrics"] == measured


def test_a_run_continues_with_its_tokenizer(grown, tmp_path):
    run = tmp_path / "runs/tiny"
    before = tokenizer_of(run)
    assert run_forked(["fit", *grown, "--ckpt_path", "last", "--trainer.max_steps", "14"], tmp_path / "log.txt") == 0
    assert tokenizer_of(run) == before == json.loads((run / "tokenizer.json").read_text())
    assert load(run / "checkpoints/last.ckpt")["global_step"] == 14
    assert "tokenizer: bpe" in (run / "config.yaml").read_text()
    assert "the checkpoint saw other data" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_another_tokenizer_is_refused(command, grown, tmp_path):
    """It would not be trained, and the weights work with their own tokenizer only."""
    argv = [command, *grown, "--ckpt_path", "last"]
    line = complaint([*argv, "--data.vocab_size", "200"], tmp_path)
    assert "data.vocab_size is 200; allowed: 300, as runs/tiny/checkpoints/last.ckpt was trained; or a run of another" in line
    assert "data.tokenizer is 'wordpiece'; allowed: bpe, as " in complaint([*argv, "--data.tokenizer", "wordpiece"], tmp_path)
    other = tokenizer_of(tmp_path / "runs/tiny")
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    line = complaint([*argv, "--data.tokenizer", "other.json"], tmp_path)
    assert "data.tokenizer is 'other.json'; allowed: the one that " in line


def test_a_tokenizer_to_train_is_refused_with_pretrained_weights(grown):
    """It was ignored: training went on with the pretrained model's own."""
    model = Namespace(class_path="lit_linformer.tasks.MLM", init_args=Namespace(pretrained="runs/tiny"))
    settings = Namespace(tokenizer="wordpiece", max_length=None)
    data = Namespace(class_path="lit_linformer.data.PretrainingData", init_args=settings)
    config = Namespace(ckpt_path=None, model=model, data=data)
    with pytest.raises(ValueError, match=r"^data.tokenizer is 'wordpiece'; allowed: the one that runs/tiny\S* was trained"):
        carry_over("fit", ["fit", "--data.tokenizer", "wordpiece"], config)
    carry_over("fit", ["fit"], config)  # a config's, such as conf/pretrain/small.yaml's, gives way
    assert data.init_args.tokenizer.startswith("runs/tiny/checkpoints/best-")


@pytest.mark.parametrize("theirs", ["gpt2", None])
def test_a_tokenizer_of_ones_own_data_means_what_it_means(theirs, grown, tmp_path):
    model = Namespace(class_path="lit_linformer.tasks.MLM", init_args=Namespace())
    data = Namespace(class_path="mine.Data", init_args=Namespace(tokenizer=theirs))
    carry_over("fit", [], Namespace(ckpt_path="runs/tiny/checkpoints/last.ckpt", model=model, data=data))
    assert data.init_args.tokenizer == theirs


def test_a_module_of_ones_own_starts_from_a_model_without_an_encoder_setting(grown):
    model = Namespace(class_path="mine.Module", init_args=Namespace(pretrained="runs/tiny"))
    data = Namespace(class_path="lit_linformer.data.PretrainingData", init_args=Namespace(tokenizer="bpe", max_length=None))
    carry_over("fit", [], Namespace(ckpt_path=None, model=model, data=data))
    assert data.init_args.max_length == 32 and data.init_args.tokenizer.startswith("runs/tiny/checkpoints/best-")
    model.init_args.pretrained = True  # a flag in the user's own class
    carry_over("fit", [], Namespace(ckpt_path=None, model=model, data=data))


def test_a_checkpoint_of_another_name_has_its_tokenizer(grown, tmp_path):
    shutil.copy(tmp_path / "runs/tiny/checkpoints/last.ckpt", tmp_path / "model.pt")
    output(["validate", *grown, "--ckpt_path", "model.pt", "--name", "alone"], tmp_path)
    output(["validate", *grown, "--ckpt_path", "last"], tmp_path)
    alone, last = (json.loads((tmp_path / f"runs/{name}/validate.json").read_text())["metrics"] for name in ("alone", "tiny"))
    assert alone == last


def test_a_checkpoint_without_tokenizer_has_the_one_beside_it(grown, tmp_path):
    run = tmp_path / "runs/tiny"
    output(["validate", *grown], tmp_path)
    measured = json.loads((run / "validate.json").read_text())["metrics"]
    for path in (run / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["tokenizer"]
        torch.save(checkpoint, path)
    output(["validate", *grown], tmp_path)
    assert json.loads((run / "validate.json").read_text())["metrics"] == measured


def test_predict_asks_the_checkpoints_tokenizer_not_the_folders(grown, tmp_path):
    run = tmp_path / "runs/tiny"
    argv = ["predict", *grown, "--data.text", "a <mask> b", "--name", "other", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt"]
    output(argv, tmp_path)
    expected = (tmp_path / "runs/other/predictions.jsonl").read_text()
    (tmp_path / "runs/other/tokenizer.json").write_text("{}")
    (run / "tokenizer.json").unlink()
    output(argv, tmp_path)
    assert (tmp_path / "runs/other/predictions.jsonl").read_text() == expected
    assert "bad.json" in complaint([*argv, "--data.tokenizer", "bad.json"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "predict"])
def test_a_classifier_is_used_as_it_was_trained(command, finetuned, pretrained, cache, tmp_path, monkeypatch):
    shutil.copytree(finetuned.parents[1], tmp_path / "copy")  # as validate.json is written to the run folder
    monkeypatch.chdir(tmp_path / "copy")
    text = ["--data.text", "a good film"] if command == "predict" else []
    argv = [command, "--config", "runs/task/config.yaml", "--data.cache_dir", str(cache), *text]
    line = complaint([*argv, "--model.pooling", "first"], tmp_path)
    assert "model.pooling is 'first'; allowed: mean, as " in line and line.endswith(".ckpt was trained")
    own = ["--data.source", "glue/SST-2", "--data.task", "null", "--data.columns", "[sentence]", "--data.labels"]
    line = complaint([*argv, *own, "[positive, negative]"], tmp_path)
    assert "data.labels is ['positive', 'negative']; allowed: ['negative', 'positive'], the classes of " in line
    output([*argv, *own, "[negative, positive]"], tmp_path)
    shown = output([*argv, *own, "[neg, pos]"], tmp_path)  # another task with the same meaning
    assert "was trained with the classes ['negative', 'positive']; here they stand for ['neg', 'pos']" in shown
    assert "data.labels is ['a', 'b', 'c']; allowed: ['neg" in complaint([*argv, *own, "[a, b, c]"], tmp_path)
    if command == "validate":
        words = ["validate", "--config", str(ROOT / "conf/pretrain/small.yaml"), "--ckpt_path", "runs/task"]
        assert "which is a classifier; allowed: one of MLM (a classifier" in complaint(words, tmp_path)
        words = ["validate", "--config", "runs/task/config.yaml", "--ckpt_path", str(pretrained)]
        assert "which is no classifier; allowed: one of SequenceClassification (fit with" in complaint(words, tmp_path)
    # A new classifier that starts from it is free in both.
    words = ["--model.pooling", "first", "--trainer.max_steps", "1", "--model.pretrained", "runs/task"]
    assert (
        run_forked(
            ["fit", *argv[1:5], *own, "[positive, negative]", *words, "--data.tokenizer", "null", "--name", f"of-{command}"]
        )
        == 0
    )


@pytest.fixture(scope="module")
def folders(pretrained, finetuned, tmp_path_factory):
    """Both runs, exported as safetensors."""
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
    shutil.copytree(folders["mlm"], "my model-0.5")  # not a valid name for a run
    output(["predict", "--model.pretrained", "my model-0.5", *text], tmp_path)
    assert records(tmp_path / "runs/pretrained-my-model-0.5") == found[0]
    # With another run's config: that run keeps its own results.
    shutil.copytree(finetuned, "runs/task")
    output(["predict", "--config", "runs/task/config.yaml", "--model.pretrained", str(folders["task"]), *text], tmp_path)
    assert (Path("runs") / f"pretrained-{folders['task'].stem}/predictions.jsonl").is_file()
    assert not Path("runs/task/predictions.jsonl").exists()
    # In a run's folder, with its name: the run's own checkpoint is not used.
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
