"""Models whose tokens are not pieces of text: ids of other things, and vectors of numbers."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from lit_linformer.convert.command import convert
from lit_linformer.export import card, load
from lit_linformer.export.command import MODULES
from lit_linformer.export.verify import largest_difference
from lit_linformer.runs.exported import write_sums
from lit_linformer.runs.trained_model import open_checkpoint
from tests.cli.test_errors import complaint
from tests.export.models import NEEDED, export, model_of
from tests.helpers import output, slow

FORMS = ["safetensors", "huggingface", "torch", slow("onnx")]
LISTOPS = "--data.rows 24 --data.held_out_rows 8 --data.cut true --data.batch_size 4 --trainer.max_steps 2".split()
LISTOPS += "--trainer.accelerator cpu --trainer.val_check_interval 2 --last.every_n_steps 2".split()
SMALL = "--model.encoder.max_length 32 --model.encoder.hidden_size 8 --model.encoder.num_layers 1".split()
SMALL += "--model.encoder.intermediate_size 16 --model.encoder.projection_dim 8 --model.warmup_steps 0".split()
TAKEN = "--model.pretrained runs/masked --model.encoder null --data.max_length 32".split()
CONF = Path(__file__).parents[2] / "conf/lra"


@pytest.fixture(scope="module")
def listops(tmp_path_factory, cache):
    """A folder with runs/masked, and runs/classes, which starts from it."""
    folder = tmp_path_factory.mktemp("listops")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = [*LISTOPS, "--data.cache_dir", str(cache)]
        output(["fit", "--config", f"{CONF}/pretrain.yaml", *words, *SMALL, "--name", "masked"], folder)
        output(["fit", "--config", f"{CONF}/listops.yaml", *words, *TAKEN, "--name", "classes"], folder)
    return folder


def shown_code(folder):
    """The logits computed by the code on the card."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)
    return torch.as_tensor(names["logits"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numbers", [0, 3])
def test_every_format_and_its_card(form, numbers, tmp_path):
    """Compared with the module at every length; the code on the card computes the same."""
    pytest.importorskip(NEEDED[form])
    model = model_of({"input_size": numbers}, classes=3)
    model.facts = {"version": "0", "step": 1, "data": "my_sensors.Sensors"}
    module = importlib.import_module(f"lit_linformer.export.{MODULES[form]}")
    module.write(model, tmp_path)
    assert largest_difference(model, module.logits(model, tmp_path)) < 1e-5
    card.write(model, tmp_path, form, [])
    write_sums(tmp_path)
    text = (tmp_path / "README.md").read_text()
    tokens = torch.zeros(1, 5, numbers) if numbers else torch.zeros(1, 5, dtype=torch.int64)
    assert torch.allclose(shown_code(tmp_path), model.net(tokens), atol=1e-5)
    assert f"Tokens are {'3 numbers each' if numbers else 'ids from 0 to 49'}, as my_sensors.Sensors gives them" in text
    assert not (tmp_path / "tokenizer.json").exists() and "pipeline_tag" not in text and "tokenizer" not in text


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
@pytest.mark.parametrize("run", ["masked", "classes"])
def test_a_run_of_long_range_arena_is_exported_and_trained_on(form, run, listops, tmp_path, monkeypatch, cache):
    monkeypatch.chdir(listops)
    export(f"runs/{run}", form, tmp_path / "out", tmp_path)
    net, tokenizer = load(tmp_path / "out")
    assert tokenizer is None
    model, again = (open_checkpoint(path, reads_text=False) for path in (f"runs/{run}", tmp_path / "out"))
    ids = torch.randint(19, (2, 20))
    assert torch.equal(net(ids), model.net(ids)) and again.facts.items() >= model.facts.items()
    assert again.labels == (tuple("0123456789") if run == "classes" else None) and model.facts["task"] == "listops"
    card = (tmp_path / "out/README.md").read_text()
    assert "as lit_linformer.data.LongRangeData gives them" in card and "| task | listops |" in card
    if run == "masked":
        monkeypatch.chdir(tmp_path)
        argv = ["fit", "--config", f"{CONF}/listops.yaml", *LISTOPS, "--data.cache_dir", str(cache), *TAKEN]
        output([*argv, "--model.pretrained", "out"], tmp_path)


@pytest.mark.parametrize(("data", "masks"), [("lit_linformer.data.LongRangeData", ", at 15 % masking"), ("my_rows.Rows", "")])
def test_masks_are_told_where_they_are_known(data, masks):
    model = model_of({})
    model.facts, model.curve = {"version": "0", "step": 1, "data": data}, [(1, 64, 20.0)]
    assert f"\nPerplexity on held-out rows{masks}:\n" in card.card(model, "safetensors", [], pictured=False)


def test_data_of_ones_own_may_have_no_batch_size(tmp_path):
    model = model_of({})
    model.data = {"class_path": "my_rows.Rows", "batch_size": None, "global_batch_size": "large"}
    assert convert(model, {"from": "runs/own", "max_length": 32}, tmp_path, "cpu") == []
    assert model.encoder.max_length == 32 and model.data["batch_size"] is None


def test_a_masked_model_gets_longer_and_trains_on(listops, tmp_path, monkeypatch):
    monkeypatch.chdir(listops)
    assert "n = 64" in output(["convert", "--from", "runs/masked", "--name", "longer", "--max_length", "64"], tmp_path)
    argv = ["fit", "--config", "runs/longer/config.yaml", "--name", "more", "--trainer.max_steps", "1"]
    output([*argv, "--model.warmup_steps", "0"], tmp_path)
    stored = open_checkpoint("runs/more", reads_text=False)
    assert stored.encoder.max_length == stored.data["max_length"] == 64 and stored.data["batch_size"] == 2
    assert not list(Path("runs/longer").glob("tokenizer.json"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            "export --ckpt_path runs/classes --format onnx --quantize int8 --output new",
            "quantize is 'int8', but classes has no",
        ),
        ("convert --from runs/masked --name new --source a.txt", "source is 'a.txt', but runs/masked has no tokenizer"),
        ("convert --from out --name new --max_length 64", "from is out, which says nothing of its data; allowed: the run"),
        (
            "draw --ckpt_path runs/masked --text a --output a.png",
            "which carries no tokenizer; allowed: a checkpoint that has one",
        ),
        ("predict --model.pretrained out --data.text a", "model.pretrained is out, which has no tokenizer; allowed: a model"),
        ("fit --model.pretrained runs/masked --data.max_length 32", "allowed: a model of texts, data.tokenizer with the"),
        ("embed --ckpt_path runs/masked --text a --output a.npy", "which carries no tokenizer; allowed: a checkpoint that has"),
    ],
)
def test_what_needs_texts_says_so(argv, expected, listops, tmp_path, monkeypatch):
    monkeypatch.chdir(listops)
    if not Path("out").exists():
        export("runs/masked", "safetensors", "out", tmp_path)
    if "onnx" in argv:
        pytest.importorskip("onnxruntime")
    assert expected in complaint(argv.split(), tmp_path)
