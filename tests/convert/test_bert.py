"""Reading a BERT's folder: hidden states and logits equal BERT's; layouts of weights; what is refused."""

import importlib.util
import json
import re
import shutil

import pytest
import torch

from lit_linformer.runs.trained_model import open_checkpoint
from tests.convert.commands import convert, refused
from tests.convert.conftest import FAMILIES

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("settings", [{"return_dict": False}, {"chunk_size_feed_forward": 5}], ids=list)
def test_how_transformers_would_run_the_model_does_not_matter(settings, copied, tmp_path):
    change(copied, **settings)
    assert "largest difference from transformers" in convert(copied, tmp_path)


@pytest.mark.parametrize("pad", [None, -1])
def test_a_model_without_a_padding_token(pad, made, tmp_path):
    shown = convert(made("bert", pad_token_id=pad), tmp_path)
    (difference,) = re.findall(r"largest difference from transformers, .*: (\S+)\n", shown)
    assert float(difference) < 1e-5


@pytest.mark.parametrize("form", ["bin", "shards", "shards of bin", "base", "old names", "untied, but equal"])
def test_every_layout_of_weights_gives_the_same(form, roberta, copied, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    if form == "old names":  # from TensorFlow
        weights = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in weights.items()
        }
    if form == "untied, but equal":
        weights["lm_head.decoder.weight"] = weights["roberta.embeddings.word_embeddings.weight"].clone()
        weights["lm_head.decoder.bias"] = weights["lm_head.bias"].clone()
        weights["lm_head.bias"] = torch.zeros(300)  # not used unless it is tied to the decoder's
        change(copied, tie_word_embeddings=False)
    if form == "base":  # what RobertaModel saves, including a pooler
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


def convert_alone(folder, tmp_path):
    """Converts as if transformers were not installed; it reads fewer layouts than we do."""
    found = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else found(name, *more))
        shown = convert(folder, tmp_path)
    assert "not held against transformers, which is not installed" in shown
    return shown


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", 3])
def test_an_index_that_leads_out_of_its_folder_is_refused(shard, copied, tmp_path):
    (copied / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    argv = ["convert", "--from", str(copied), "--name", "new"]
    refused(argv, tmp_path, rf"model.safetensors.index.json names '?{shard}'?; allowed: files of that folder")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_of_the_hub_is_found_where_it_was_downloaded(weights, copied, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    if weights.endswith(".bin"):
        torch.save(load_file(copied / "model.safetensors"), copied / weights)
        (copied / "model.safetensors").unlink()
    cache = tmp_path / "hub/models--someone--small"  # the layout of the hub's cache
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
    "fewer": ({"num_hidden_layers": 1}, r"which holds encoder.layers.1.*: nothing that a model of its config.json has"),
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
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}  # not mapped to the file, which is overwritten
    save_file(weights | {"lm_head.decoder.weight": torch.zeros(300, 24)}, file)
    damaged(r"whose output matrix is not its token embedding \(tie_word_embeddings is true, but they differ\); allowed: tied")
    save_file(weights | {"roberta.encoder.layer.0.crossattention.self.query.weight": torch.zeros(24, 24)}, file)
    damaged(r"which holds encoder.layer.0.crossattention.self.query.weight: nothing that a roberta has; allowed: a plain model")
    file.write_bytes(file.read_bytes()[:1000])
    damaged(r"whose model.safetensors cannot be read")
    file.unlink()
    torch.save({"weights": weights, "code": shutil.copy}, copied / "pytorch_model.bin")
    damaged(r"pytorch_model.bin holds other objects than weights and plain values: they are not loaded")
    (copied / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    damaged(r"whose pytorch_model.bin only points to the weights; allowed: what `git lfs pull` makes of it")
    torch.save([1, 2], copied / "pytorch_model.bin")
    damaged(r"pytorch_model.bin is no state dict; allowed: names and tensors alone")
