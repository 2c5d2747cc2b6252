"""`convert` as a user runs it: what it writes, how other commands use that, and what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from lit_linformer.convert import new_run
from lit_linformer.convert.command import _change_attention
from lit_linformer.model import MaskedLanguageModel
from lit_linformer.runs.record import RunRecord
from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.tasks.evaluation import masked_batches, open_text
from tests.convert.commands import convert, refused
from tests.helpers import inside, output, slow, small_disk


@pytest.mark.slow
def test_the_run_predicts_validates_exports_and_trains_on(roberta, tmp_path, corpus, cache):
    convert(roberta, tmp_path)
    config = ["--config", "runs/new/config.yaml"]
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--data.validation_fraction", "0.1"]
    assert "mask" in output(["predict", *config, "--data.text", "a <mask> b"], tmp_path)
    output(["validate", *config, *data], tmp_path)
    before = json.loads((tmp_path / "runs/new/validate.json").read_text())["metrics"]["val/perplexity"]
    output(["export", "--ckpt_path", "runs/new", "--format", "safetensors", "--output", "out"], tmp_path)
    words = ["--name", "more", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    shown = output(["fit", *config, *words, *data, "--model.warmup_steps", "0"], tmp_path)
    assert f"step 0  validation perplexity {before:.2f}  (before training)" in shown
    resumed = ["fit", *config, *words, "--trainer.max_steps", "4", *data, "--ckpt_path", "last"]
    shutil.rmtree(tmp_path / "runs/new/checkpoints")  # the run's own checkpoint holds everything
    assert "resuming at step 2" in output(resumed, tmp_path)


def test_a_run_that_has_trained_nothing_is_not_resumed(roberta, tmp_path, corpus, cache):
    convert(roberta, tmp_path)
    words = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--data.validation_fraction", "0.1"]
    words += ["--trainer.max_steps", "2"]
    argv = ["fit", "--config", "runs/new/config.yaml", *words]
    refused([*argv, "--ckpt_path", "last"], tmp_path, "a model that has trained nothing yet; allowed: .* model.pretrained")
    # It would delete the model that it starts from.
    refused(
        [*argv, "--overwrite", "true"], tmp_path, "model.pretrained is runs/new, which --overwrite true would delete; allowed"
    )


def test_a_full_disk_is_one_line(pretrained, tmp_path):
    with small_disk(tmp_path / "runs", "40k") as runs:
        argv = ["convert", "--from", str(pretrained), "--name", "new"]
        refused(argv, tmp_path, "name: cannot write .*/runs/new: No space left on device")
        assert not list(runs.iterdir())


def test_a_transformer_becomes_a_linformer_and_longer_in_one_command(pretrained, tmp_path, corpus, cache):
    full = tmp_path / "full.yaml"
    full.write_text((pretrained / "config.yaml").read_text())
    argv = ["fit", "--config", str(full), "--name", "full", "--model.encoder.attention", "full", "--trainer.max_steps", "4"]
    argv += ["--data.global_batch_size", "12"]
    output([*argv, "--trainer.callbacks", "[]"], tmp_path)
    words = ["--attention", "linformer", "--projection_dim", "16", "--max_length", "64", "--source", "validation"]
    shown = convert("runs/full", tmp_path, *words, "--num_rows", "4")
    found = re.findall(r"perplexity (.*), n = (\d+) +(\S+)\n", shown)
    steps = [("as it was", "32"), ("as a Linformer, k = 16, strided", "32"), ("made longer", "32"), ("made longer", "64")]
    assert [(what, n) for what, n, _ in found] == steps
    content = json.loads((tmp_path / "runs/new/conversion.json").read_text())
    assert [f"{row['perplexity']:.2f}" for row in content["perplexity"]] == [value for _, _, value in found]
    model = open_checkpoint(tmp_path / "runs/new")
    assert model.encoder.projection_dim == 32 and model.max_length == model.encoder.max_length == 64
    assert model.facts["converted_from"] == "full"
    assert RunRecord(tmp_path / "runs/new").model() == "MLM, from full"
    assert (model.data["batch_size"], model.data["global_batch_size"]) == (2, 6)
    convert("runs/full", tmp_path, "--max_length", "160", name="longest")  # less than a row is left of a micro-batch of 4
    data = open_checkpoint(tmp_path / "runs/longest").data
    assert (data["batch_size"], data["global_batch_size"]) == (1, 2)
    # Rows shorter than the model's n: a step keeps their tokens. A text beside runs/ is found from another folder, too.
    shutil.copy(corpus, tmp_path / "text.txt")
    words = ["--name", "short", "--data.max_length", "16", "--data.source", "text.txt"]
    output([*argv, "--trainer.callbacks", "[]", *words], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with inside(tmp_path / "elsewhere"):
        convert("../runs/short", tmp_path, "--max_length", "64", "--source", "validation", "--num_rows", "4")
        data = open_checkpoint(Path("runs/new")).data
    assert (data["batch_size"], data["global_batch_size"]) == (1, 3)
    # The perplexities equal those of validate.
    output(
        ["validate", "--config", "runs/full/config.yaml", "--data.batch_size", "4", "--trainer.limit_val_batches", "1"],
        tmp_path,
    )
    metrics = json.loads((tmp_path / "runs/full/validate.json").read_text())["metrics"]
    assert f"{metrics['val/perplexity']:.2f}" == found[0][2]


SLOW = list(map(slow, ("split", "strided", "normal", "xavier")))


@pytest.mark.parametrize("start", ["block_mean", "svd", *SLOW])
def test_every_start(start, roberta, tmp_path, corpus, cache):
    text = ["--source", str(corpus), "--num_rows", "8"]
    shown = convert(roberta, tmp_path, "--attention", "linformer", "--projection_init", start, *text)
    assert f"perplexity as a Linformer, k = 8, {start}, n = 32 " in shown
    assert open_checkpoint(tmp_path / "runs/new").encoder.sharing == "none"


WORDS = {
    "--projection_dim 8": r"projection_dim is 8 without attention; allowed: with --attention linformer, coarse",
    "--attention linformer --projection_dim 33": r"projection_dim \(k\) is 33; allowed: 1 to max_length = 32",
    "--attention linformer --projection_dim [8,x]": r"projection_dim is 'x'; allowed: a whole number, 1 or more",
    "--attention linformer --projection_dim [8,4,2]": r"projection_dim lists 3 numbers; allowed: one, or num_layers = 2",
    "--attention linformer --projection conv --projection_dim 5": r"projection_dim \(k\) is 5, but projection='conv' works on",
    "--attention linformer --projection_init svd": r"projection_init is 'svd' without source; allowed",
    "--attention linformer --projection_init best": r"projection_init is 'best'; allowed: block_mean, split",
    '--attention_options {"window":4}': r"attention_options is \{'window': 4\} without attention; allowed: with --attention",
    "--attention lookup --attention_options window": r"attention_options is 'window'; allowed: settings by name, as",
    '--attention lookup --attention_options {"width":4}': r"attention_options names 'width'; allowed with attention=lookup: ",
    "--attention linformr": r"attention is 'linformr'; did you mean 'linformer'\?; allowed",
    "--max_length 16": r"max_length is 16; allowed: more than the model's 32",
    "--max_length 40": r"max_length is 40; allowed where something is repeated: a multiple of the model's 32",
    "--positions repeat": r"positions is 'repeat' without max_length; allowed: with --max_length",
    "--source validation": r"source is 'validation', but .* names no text of its own; allowed: a text",
    "--source nowhere.txt": r"nowhere.txt",
    "--maximum 3": r"unknown setting '--maximum' of convert; allowed: --from",
}


@pytest.mark.parametrize("words", WORDS)
def test_settings_that_do_not_go(words, roberta, tmp_path):
    refused(["convert", "--from", str(roberta), "--name", "new", *words.split()], tmp_path, WORDS[words])
    assert not (tmp_path / "runs/new").exists()


def test_a_run_made_of_a_folder_names_no_text_of_its_own(roberta, tmp_path):
    """PretrainingData's default, Python's documentation, is not what RoBERTa learnt."""
    convert(roberta, tmp_path)
    argv = ["convert", "--from", "runs/new", "--name", "more", "--attention", "linformer", "--source", "validation"]
    refused(argv, tmp_path, "source is 'validation', but runs/new names no text of its own; allowed: a text")
    refused(["spectrum", "--run", "runs/new"], tmp_path, "allowed for runs/new, which pretrains on no text: a text")
    argv = ["export", "--ckpt_path", "runs/new", "--format", "onnx", "--quantize", "int8", "--output", "out"]
    pytest.importorskip("onnxruntime")
    refused(argv, tmp_path, "quantize is 'int8'; allowed: for a run whose data is PretrainingData, or with --source, a text")


@pytest.mark.parametrize(("rows", "length"), [(6, 32), (3, 64), (1, 32)])
def test_as_many_rows_are_measured_as_are_asked_for(rows, length, pretrained, tmp_path, corpus):
    """Of rows several times as long, 4 instead of 1 were another text."""
    data, split = open_text({"cache_dir": str(tmp_path)}, str(corpus), pretrained / "tokenizer.json", 32)
    batches = masked_batches(data, split, length, rows)
    assert sum(len(batch["input_ids"]) for batch in batches) == rows
    whole = torch.cat([batch["input_ids"] for batch in masked_batches(data, split, length, 8)])
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), whole[:rows])  # the same masks, too


def test_singular_vectors_need_a_full_row(pretrained):
    """Of a text with none they were those of a matrix of zeros."""
    model = open_checkpoint(pretrained)
    model.net = MaskedLanguageModel(replace(model.encoder, attention="full"))
    blocks = SimpleNamespace(full=0, length=32, full_rows=lambda most: np.zeros((0, 32), np.int64))
    given = {"from": "run", "attention": "linformer", "projection_init": "svd", "source": "validation"}
    with pytest.raises(ValueError, match="source is 'validation', which has no full row of 32 tokens; allowed"):
        _change_attention(model, given, blocks)


def test_options_of_the_attention(roberta, tmp_path):
    convert(roberta, tmp_path, "--attention", "lookup", "--projection_dim", "8", "--attention_options", "{window: 4, every: 1}")
    model = open_checkpoint(tmp_path / "runs/new")
    assert (model.encoder.attention, model.encoder.attention_options) == ("lookup", {"window": 4, "every": 1})
    assert [layer.attention.looks_up for layer in model.net.encoder.layers] == [True, True]
    assert {layer.attention.window for layer in model.net.encoder.layers} == {4}


def test_options_of_a_projection_that_a_transformer_never_had(tiny, tmp_path):
    """Its config may be a Linformer's, with the attention replaced."""
    words = ["--model.encoder.attention", "full", "--model.encoder.projection", "gated", "--trainer.max_steps", "1"]
    output(["fit", *tiny, "--name", "full", *words, "--model.encoder.projection_options", "{overlap: 2}"], tmp_path)
    for projection, options in (("linear", None), ("mean", None), ("gated", {"overlap": 2})):
        words = ["--attention", "lookup", "--projection_dim", "4", "--projection", projection]
        convert("runs/full", tmp_path, *words, "--overwrite", "true")
        assert open_checkpoint(tmp_path / "runs/new").encoder.projection_options == options


def test_what_stands_there_is_kept(roberta, pretrained, finetuned, tmp_path):
    convert(roberta, tmp_path)
    argv = ["convert", "--from", str(roberta), "--name", "new"]
    refused(argv, tmp_path, r"name: runs/new already holds something; allowed: another --name, or --overwrite true")
    convert(roberta, tmp_path, "--overwrite", "true")
    (tmp_path / "runs/new/notes.txt").touch()
    refused([*argv, "--overwrite", "true"], tmp_path, r"name: runs/new holds notes.txt, and no conversion wrote that; allowed")
    (tmp_path / "runs/new/conversion.json").unlink()
    refused([*argv, "--overwrite", "true"], tmp_path, r"name: runs/new holds no conversion; allowed with overwrite")
    argv = ["convert", "--name", "other", "--from"]
    refused([*argv, str(finetuned)], tmp_path, r"from is .*, a classifier; allowed: a masked language model")
    refused([*argv, str(pretrained), "--attention", "full"], tmp_path, r"attention is 'full', but .* is a Linformer; allowed")
    refused([*argv, str(pretrained), "--tokenizer", "x"], tmp_path, r"tokenizer is 'x'; allowed: with a Hugging Face folder")
    words = ["--attention", "linformer", "--projection_dim", "4"]
    refused(
        [*argv, str(pretrained), *words], tmp_path, r"attention is 'linformer', and .* is one already; allowed: a Transformer"
    )


def test_training_goes_on_at_a_longer_n(put, tiny, tmp_path):
    """The commands of docs/training.md: short rows first, then longer ones."""
    put("short")
    output(["convert", "--from", "runs/short", "--name", "longer", "--max_length", "64"], tmp_path)
    longer = ["--config", "runs/longer/config.yaml", "--name", "long", "--data.batch_size", "2", "--trainer.max_steps", "2"]
    shown = output(["fit", *longer, "--model.warmup_steps", "1"], tmp_path)
    assert "n = 64" in shown and "rows of 64" in shown and "step 2  validation perplexity" in shown


def test_slots_stay_as_many_where_tokens_share_their_softmax(put, tiny, tmp_path):
    """With lookup and window more slots would take weight from the tokens; slots alone are repeated (docs/LOG.md)."""
    for attention, default in (("lookup", 8), ("window", 8), ("linformer", 16), ("full", 8)):
        words = ["--model.encoder.attention", attention, "--name", attention, "--trainer.max_steps", "1"]
        output(["fit", *tiny, *words], tmp_path) if attention != "linformer" else put(attention)
        for how, k in ((None, default), ("interpolate", 8), ("repeat", 8 if attention == "full" else 16)):
            asked = [] if how is None else ["--projections", how]
            convert(f"runs/{attention}", tmp_path, "--max_length", "64", *asked, "--overwrite", "true")
            assert open_checkpoint(tmp_path / "runs/new").encoder.projection_dim == k, (attention, how)


def test_settings_of_other_data_are_left_behind(pretrained, tmp_path):
    model = open_checkpoint(pretrained)
    model.data = {"class_path": "examples.database_texts.DatabaseTexts", "database": "reviews.db"}
    (tmp_path / "new").mkdir()
    new_run.write(model, tmp_path / "new", tmp_path / "new", {})
    data = yaml.safe_load((tmp_path / "new/config.yaml").read_text())["data"]
    assert data["class_path"].endswith(".PretrainingData") and data["init_args"].keys() == {"tokenizer", "max_length"}
