"""`convert` as a user runs it: what it reads, what it writes, what other commands make of it, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_linformer.runs.trained_model import open_checkpoint
from tests.cli.test_errors import complaint
from tests.helpers import output, small_disk

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
FAMILIES = {
    "roberta": ("Roberta", SIZES | {"max_position_embeddings": 34, "type_vocab_size": 1, "pad_token_id": 1}),
    "bert": ("Bert", SIZES | {"max_position_embeddings": 32}),
    "distilbert": ("DistilBert", DISTIL | {"max_position_embeddings": 32}),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def made(tmp_path_factory, pretrained):
    """A function that makes a Hugging Face folder of random weights, with the tokenizer of the tiny run (300 tokens)."""

    def make(family, kind="ForMaskedLM", vocab_size=300, **settings):
        folder = tmp_path_factory.mktemp(family) / family
        name, sizes = FAMILIES[family]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=vocab_size, **sizes | settings)
        model = getattr(transformers, f"{name}{kind}")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        shutil.copy(pretrained / "tokenizer.json", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def roberta(made):
    return made("roberta")


@pytest.fixture
def copied(roberta, tmp_path):
    """The RoBERTa's folder, to be damaged."""
    return shutil.copytree(roberta, tmp_path / "model")


def convert(source, tmp_path, *extra, name="new", status=0):
    return output(["convert", "--from", str(source), "--name", name, *extra], tmp_path, status)


def refused(argv, tmp_path, pattern):
    """The command ends with one line that matches, and has written nothing."""
    line = complaint(argv, tmp_path)
    assert re.search(pattern, line), line


def change(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def padded(vocab_size=300, length=32, pad=1):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (4, length), generator=draw)
    mask = torch.arange(length) < torch.tensor([[length], [20], [3], [1]])
    return ids.masked_fill(~mask, pad), mask


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_are_those_of_transformers_with_padding(family, made, tmp_path):
    folder = made(family)
    shown = convert(folder, tmp_path)
    (difference,) = re.findall(r"largest difference from transformers, .*: (\S+)\n", shown)
    assert float(difference) < 1e-5
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids, mask = padded(pad=theirs.config.pad_token_id)
    mine = open_checkpoint(tmp_path / "runs/new").net
    with torch.inference_mode():
        expected = theirs(ids, mask, output_hidden_states=True)
        hidden, logits = mine.encoder(ids, mask), mine(ids, mask)
    assert torch.allclose(hidden[mask], expected.hidden_states[-1][mask], atol=1e-5, rtol=0)
    assert torch.allclose(logits[mask], expected.logits[mask], atol=1e-5, rtol=0)
    assert expected.logits[mask].std() > 0.1


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
    shutil.rmtree(tmp_path / "runs/new/checkpoints")  # a run's own checkpoint holds all of it
    assert "resuming at step 2" in output(resumed, tmp_path)


def test_a_run_that_has_trained_nothing_is_not_resumed(roberta, tmp_path, corpus, cache):
    convert(roberta, tmp_path)
    words = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--data.validation_fraction", "0.1"]
    words += ["--trainer.max_steps", "2"]
    argv = ["fit", "--config", "runs/new/config.yaml", *words]
    refused([*argv, "--ckpt_path", "last"], tmp_path, "a model that has trained nothing yet; allowed: .* model.pretrained")
    # It would delete what it starts from.
    refused(
        [*argv, "--overwrite", "true"], tmp_path, "model.pretrained is runs/new, which --overwrite true would delete; allowed"
    )


@pytest.mark.parametrize("form", ["bin", "shards", "shards of bin", "base", "old names", "untied, but equal"])
def test_every_layout_of_weights_gives_the_same(form, roberta, copied, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    if form == "old names":  # TensorFlow's
        weights = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in weights.items()
        }
    if form == "untied, but equal":
        weights["lm_head.decoder.weight"] = weights["roberta.embeddings.word_embeddings.weight"].clone()
        weights["lm_head.decoder.bias"] = weights["lm_head.bias"].clone()
        weights["lm_head.bias"] = torch.zeros(300)  # of no use where it is not tied to the decoder's
        change(copied, tie_word_embeddings=False)
    if form == "base":  # what RobertaModel saves, with a pooler beside it
        weights = {name.removeprefix("roberta."): tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
        weights["pooler.dense.weight"] = torch.zeros(24, 24)
    if form.startswith("shards"):
        save, end = (torch.save, "bin") if "bin" in form else (save_file, "safetensors")
        parts = [dict(list(weights.items())[start::2]) for start in (0, 1)]
        index = {}
        for number, part in enumerate(parts):
            save(part, copied / f"part{number}.{end}")
            index |= dict.fromkeys(part, f"part{number}.{end}")
        stem = "pytorch_model.bin" if "bin" in form else "model.safetensors"
        (copied / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    elif form == "bin":
        torch.save(weights, copied / "pytorch_model.bin")
    else:
        save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    shown = convert(copied, tmp_path) if form not in ("shards of bin", "old names") else convert_alone(copied, tmp_path)
    convert(roberta, tmp_path, name="plain")
    found, plain = (open_checkpoint(tmp_path / f"runs/{name}").net.state_dict() for name in ("new", "plain"))
    compared = [name for name in plain if form != "base" or not name.startswith("head.")]
    assert all(torch.equal(found[name], plain[name]) for name in compared)
    assert ("no masked-language-model head there" in shown) is ("not taken: pooler.dense" in shown) is (form == "base")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", 3])
def test_an_index_that_leads_out_of_its_folder_is_refused(shard, copied, tmp_path):
    (copied / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    argv = ["convert", "--from", str(copied), "--name", "new"]
    refused(argv, tmp_path, rf"model.safetensors.index.json names '?{shard}'?; allowed: files of that folder")
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_one_line(pretrained, tmp_path):
    with small_disk(tmp_path / "runs", "40k") as runs:
        argv = ["convert", "--from", str(pretrained), "--name", "new"]
        refused(argv, tmp_path, "name: cannot write .*/runs/new: No space left on device")
        assert not list(runs.iterdir())


def convert_alone(folder, tmp_path):
    """As where transformers is not installed; it does not read every layout that is read here."""
    hidden = tmp_path / "without/transformers"
    hidden.mkdir(parents=True)
    (tmp_path / "without/sitecustomize.py").write_text(
        "import importlib.util\nfound = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'transformers' else found(name, *more)\n"
    )
    run = Path(__file__).parents[2] / "run.py"
    argv = [sys.executable, str(run), "convert", "--from", str(folder), "--name", "new"]
    where = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not held against transformers, which is not installed" in done.stdout
    return done.stdout


def test_a_transformer_becomes_a_linformer_and_longer_in_one_command(pretrained, tmp_path, corpus, cache):
    full = tmp_path / "full.yaml"
    full.write_text((pretrained / "config.yaml").read_text())
    argv = ["fit", "--config", str(full), "--name", "full", "--model.encoder.attention", "full", "--trainer.max_steps", "4"]
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
    assert model.facts["converted_from"] == "full" and model.data["batch_size"] == 2
    # The perplexities are those of validate.
    output(
        ["validate", "--config", "runs/full/config.yaml", "--data.batch_size", "4", "--trainer.limit_val_batches", "1"],
        tmp_path,
    )
    metrics = json.loads((tmp_path / "runs/full/validate.json").read_text())["metrics"]
    assert f"{metrics['val/perplexity']:.2f}" == found[0][2]


SLOW = [pytest.param(start, marks=pytest.mark.slow) for start in ("split", "strided", "normal", "xavier")]


@pytest.mark.parametrize("start", ["block_mean", "svd", *SLOW])
def test_every_start(start, roberta, tmp_path, corpus, cache):
    text = ["--source", str(corpus), "--num_rows", "8"]
    shown = convert(roberta, tmp_path, "--attention", "linformer", "--projection_init", start, *text)
    assert f"perplexity as a Linformer, k = 8, {start}, n = 32 " in shown
    assert open_checkpoint(tmp_path / "runs/new").encoder.sharing == "none"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_of_the_hub_is_found_where_it_was_downloaded(weights, copied, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    if weights.endswith(".bin"):
        torch.save(load_file(copied / "model.safetensors"), copied / weights)
        (copied / "model.safetensors").unlink()
    cache = tmp_path / "hub/models--someone--small"  # the hub's own layout
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    copied.rename(cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    convert("hub:someone/small", tmp_path)
    assert open_checkpoint(tmp_path / "runs/new").encoder.hidden_size == 24
    for name, message in {
        "someone/other": r"from is hub:someone/other, which is not here, and the hub cannot be reached; allowed: a folder",
        "a/b/c": r"from is hub:a/b/c, which cannot be read \(.*\); allowed: hub:OWNER/NAME",
    }.items():
        refused(["convert", "--from", f"hub:{name}", "--name", "other"], tmp_path, message)


REFUSED = {
    "no folder": ([], r"from is nowhere, which does not exist; allowed"),
    "no config": (["config.json"], r"from is .*model, which is no model; allowed: a Hugging Face folder with config.json"),
    "no weights": (["model.safetensors"], r"from is .*model, which holds no weights; allowed: a folder with one of"),
    "no tokenizer": (["tokenizer.json"], r"data.tokenizer is .*; allowed: a folder with tokenizer.json, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_model(case, copied, tmp_path):
    missing, message = REFUSED[case]
    for name in missing:
        (copied / name).unlink()
    refused(["convert", "--from", str(copied) if missing else "nowhere", "--name", "new"], tmp_path, message)
    assert not (tmp_path / "runs/new").exists()


SETTINGS = {
    "gpt2": ({"model_type": "gpt2"}, r"whose architecture is 'gpt2'; allowed: roberta, bert, distilbert"),
    "decoder": ({"is_decoder": True}, r"whose is_decoder is true: no encoder; allowed: .*bidirectional"),
    "cross": ({"add_cross_attention": True}, r"whose add_cross_attention is true"),
    "activation": ({"hidden_act": "relu"}, r"whose hidden_act is 'relu'; allowed: gelu"),
    "positions": (
        {"position_embedding_type": "relative_key"},
        r"whose position_embedding_type is 'relative_key'; allowed: absolute",
    ),
    "heads": ({"num_attention_heads": 5}, r"makes no encoder: hidden_size is 24; allowed: a multiple of num_heads = 5"),
    "width": ({"hidden_size": 48}, r"is \[300, 24\], by its config.json \[300, 48\]; allowed: weights and settings that fit"),
    "layers": ({"num_hidden_layers": 3}, r"which lacks encoder.layers.2.* of this project's Transformer; allowed: a whole"),
    "nothing": ({"vocab_size": None}, r"config.json makes no encoder"),
    "untied": ({"tie_word_embeddings": False}, r"head is untied by its config.json, but lm_head.decoder.weight is not there"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_an_architecture_that_is_another(case, copied, tmp_path):
    settings, message = SETTINGS[case]
    change(copied, **settings)
    refused(["convert", "--from", str(copied), "--name", "new"], tmp_path, message)


def test_weights_that_are_others(copied, tmp_path):
    from safetensors.torch import load_file, save_file

    def damaged(message):
        refused(["convert", "--from", str(copied), "--name", "new"], tmp_path, message)

    file = copied / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.decoder.weight": torch.zeros(300, 24)}, file)
    damaged(r"whose output matrix is not its token embedding \(tie_word_embeddings is true, but they differ\); allowed: tied")
    save_file(weights | {"roberta.encoder.layer.0.crossattention.self.query.weight": torch.zeros(24, 24)}, file)
    damaged(r"which holds encoder.layer.0.crossattention.self.query.weight: nothing that a roberta has; allowed: a plain model")
    file.write_bytes(file.read_bytes()[:1000])
    damaged(r"whose model.safetensors cannot be read")
    file.unlink()
    torch.save({"weights": weights, "code": shutil.copy}, copied / "pytorch_model.bin")
    damaged(r"pytorch_model.bin holds other objects than weights and plain values: they are not loaded")
    torch.save([1, 2], copied / "pytorch_model.bin")
    damaged(r"pytorch_model.bin is no state dict; allowed: names and tensors alone")


WORDS = {
    "--projection_dim 8": r"projection_dim is 8 without attention; allowed: with --attention linformer",
    "--attention linformer --projection_dim 33": r"projection_dim \(k\) is 33; allowed: 1 to max_length = 32",
    "--attention linformer --projection_dim [8,x]": r"projection_dim is 'x'; allowed: a whole number, 1 or more",
    "--attention linformer --projection_dim [8,4,2]": r"projection_dim lists 3 numbers; allowed: one, or num_layers = 2",
    "--attention linformer --projection conv --projection_dim 5": r"projection_dim \(k\) is 5, but projection='conv' works on",
    "--attention linformer --projection_init svd": r"projection_init is 'svd' without source; allowed",
    "--attention linformer --projection_init best": r"projection_init is 'best'; allowed: block_mean, split",
    "--attention linformr": r"attention is 'linformr'; did you mean 'linformer'\?; allowed",
    "--max_length 16": r"max_length is 16; allowed: more than the model's 32",
    "--max_length 40": r"max_length is 40; allowed where something is repeated: a multiple of the model's 32",
    "--positions repeat": r"positions is 'repeat' without max_length; allowed: with --max_length",
    "--source validation": r"source is 'validation', but .* names no text of its own; allowed: a text",
    "--source nowhere.txt": r"nowhere.txt",
    "--max_length 64 --projections repeat": r"projections is 'repeat', but .* has none; allowed: for a Linformer",
    "--maximum 3": r"unknown setting '--maximum' of convert; allowed: --from",
}


@pytest.mark.parametrize("words", WORDS)
def test_settings_that_do_not_go(words, roberta, tmp_path):
    refused(["convert", "--from", str(roberta), "--name", "new", *words.split()], tmp_path, WORDS[words])
    assert not (tmp_path / "runs/new").exists()


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
