"""`export` as a user runs it: every format, what it prints and leaves behind, and what it refuses."""

import hashlib
import importlib
import json
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lit_linformer.export import load
from lit_linformer.runs.trained_model import open_checkpoint, read_model
from tests.cli.test_errors import complaint
from tests.export.models import NEEDED, ROUNDING, export
from tests.helpers import output, slow, small_disk

ROOT = Path(__file__).parents[2]
SUMMED = ["model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("form", NEEDED)
@pytest.mark.parametrize("kind", ["pretrained", slow("finetuned")])
def test_every_format_is_written_and_held_against_the_checkpoint(form, kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    shown = export(run, form, tmp_path / "out", tmp_path)
    (difference,) = re.findall(r"largest difference of logits .*: (\S+)\n", shown)
    assert float(difference) <= 1e-4
    assert re.search(rf"→ {tmp_path}/out/: (1_Pooling, )?README.md, SHA256SUMS, config.json, ", shown)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "tokenizer.json"} < files
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".md"))
    assert str(run.parents[1]) not in written and str(ROOT) not in written  # no paths of this machine
    assert not list(tmp_path.glob(".out*"))
    if form in ("safetensors", "huggingface"):
        assert float(difference) <= ROUNDING
    if form in ("onnx", "torch"):
        (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out/README.md").read_text(), re.DOTALL)
        names = {}
        exec(code.replace("path/to/this/folder", str(tmp_path / "out")), names)
        assert names["logits"].shape == ((1, 5, 300) if kind == "pretrained" else (1, 2))
    if form == "onnx":
        assert "on one thread: PyTorch" in shown and "onnxruntime" in shown


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
@pytest.mark.parametrize("kind", ["pretrained", "finetuned"])
def test_folder_comes_back_as_plain_pytorch_and_starts_a_fine_tuning(form, kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    export(run, form, tmp_path / "out", tmp_path)
    model = open_checkpoint(run)
    net, tokenizer = load(tmp_path / "out")
    assert net.state_dict().keys() == model.net.state_dict().keys() and not net.training
    assert all(torch.equal(tensor, model.net.state_dict()[name]) for name, tensor in net.state_dict().items())
    texts = ["a <mask> here", "of  the film"]
    assert list(tokenizer.encode_plain(texts)) == list(model.tokenizer.encode_plain(texts))
    source = read_model(tmp_path / "out")
    assert asdict(source.encoder) == asdict(model.encoder) and source.own_tokenizer.sha256
    assert all(torch.equal(tensor, model.net.encoder.state_dict()[name]) for name, tensor in source.encoder_weights.items())
    again = open_checkpoint(tmp_path / "out")  # as export, convert and draw read it
    assert again.facts.pop("exported").startswith(f"python run.py export --ckpt_path …/{run.name} --format {form}")
    assert again.labels == model.labels and again.facts == model.facts and again.curve == model.curve


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (["predict", "--data.text", "<mask>", "--model.pretrained"], "model.pretrained"),
        (["convert", "--name", "converted", "--from"], "from"),
        (["spectrum", "--run"], "run"),
    ],
)
def test_a_graph_is_no_model_to_go_on_from(command, setting, tmp_path):
    (tmp_path / "config.json").write_text('{"task": "masked-lm", "encoder": {}}')
    (tmp_path / "model.onnx").touch()
    line = complaint([*command, str(tmp_path)], tmp_path)
    assert f"{setting} is {tmp_path}, which has no model.safetensors; allowed: an export of the format safetensors" in line


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_a_folder_knows_its_longest_row_and_whether_a_row_has_two_texts(form, finetuned, tmp_path):
    pytest.importorskip(NEEDED[form])
    model = open_checkpoint(finetuned)
    model.max_length, model.pair = 24, True  # of a model of 32 tokens, trained on pairs of up to 24
    importlib.import_module(f"lit_linformer.export.{form}_folder").write(model, tmp_path)
    again = open_checkpoint(tmp_path)
    assert (again.max_length, again.encoder.max_length, again.pair) == (24, 32, True)
    path = tmp_path / "config.json"
    earlier = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("longest_row", "pair")}
    path.write_text(json.dumps(earlier))  # as written before these keys existed
    again = open_checkpoint(tmp_path)
    assert (again.max_length, again.pair) == (32 if form == "huggingface" else 24, False)


def test_fine_tuning_from_an_exported_folder(pretrained, tmp_path, cache, monkeypatch):
    from tests.sst2 import CONFIG, write_sst2

    monkeypatch.chdir(tmp_path)
    export(pretrained, "safetensors", tmp_path / "out", tmp_path)
    write_sst2(tmp_path / "glue/SST-2")
    text = re.sub(r"    encoder:\n(      .*\n)+|    tokenizer: .*\n|    vocab_size: .*\n", "", CONFIG)
    (tmp_path / "task.yaml").write_text(text)
    argv = ["fit", "--config", "task.yaml", "--data.cache_dir", str(cache), "--trainer.max_steps", "2"]
    output([*argv, "--model.pretrained", "out"], tmp_path)
    assert list((tmp_path / "runs/task/checkpoints").glob("last.ckpt"))


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_weights_of_16_bits_are_the_rounded_ones_and_computed_in_32(form, pretrained, tmp_path):
    from safetensors.torch import load_file

    shown = export(pretrained, form, tmp_path / "out", tmp_path, "--dtype", "bfloat16")
    assert "weights rounded to bfloat16: on the same inputs the logits" in shown
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    net, _ = load(tmp_path / "out")
    whole = open_checkpoint(pretrained).net.state_dict()
    for name, tensor in net.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, whole[name].bfloat16().float())
    if form == "huggingface":
        from transformers import AutoModelForMaskedLM

        import lit_linformer.export.huggingface  # noqa: F401

        auto = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
        assert auto.dtype == torch.float32
        ids = torch.tensor([[0, 9, 8, 2]])
        assert torch.allclose(auto(ids).logits, net(ids), atol=1e-4)


def test_a_damaged_folder_is_one_line(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(pretrained, "safetensors", tmp_path / "out", tmp_path)
    lines = (tmp_path / "out/SHA256SUMS").read_text().splitlines()
    expected = [f"{hashlib.sha256((tmp_path / 'out' / name).read_bytes()).hexdigest()}  {name}" for name in sorted(SUMMED)]
    assert lines == expected
    commands = {
        "ckpt_path": ["draw", "--ckpt_path", "out", "--text", "a", "--output", "a.png"],
        "from": ["convert", "--from", "out", "--name", "n"],
        "model.pretrained": ["predict", "--model.pretrained", "out", "--data.text", "a <mask>"],
    }
    for name, (setting, argv) in zip(SUMMED * 2, commands.items(), strict=False):
        whole = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
        line = complaint(argv, tmp_path)
        assert f"{setting} is out, whose {name} has the SHA-256 " in line and "in SHA256SUMS" in line and "allowed" in line
        (tmp_path / "out" / name).write_bytes(whole)
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(json.loads((tmp_path / "out/tokenizer.json").read_text())))
    (tmp_path / "out/SHA256SUMS").unlink()  # changed on purpose
    assert open_checkpoint(tmp_path / "out").tokenizer.mask_token == "<mask>"


def test_nothing_is_left_where_an_export_differs(pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lit_linformer.export.safetensors_folder.logits",
        lambda model, folder: lambda ids, mask: model.net(ids, mask.bool()) + 1,
    )
    line = complaint(["export", "--ckpt_path", str(pretrained), "--format", "safetensors", "--output", "out"], tmp_path)
    assert "differs from the checkpoint by 1" in line
    assert not list(Path().glob("*out*")) and not list(Path().glob(".out*"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ckpt_path": "nowhere"}, "ckpt_path is nowhere, which does not exist; allowed: a run directory"),
        ({"ckpt_path": "."}, "ckpt_path is ., a folder without checkpoints/; allowed: a run"),
        ({"ckpt_path": "text.ckpt"}, "ckpt_path is text.ckpt, which is truncated or no checkpoint: it is no whole zip file"),
        ({"ckpt_path": "pickled.ckpt"}, "ckpt_path is pickled.ckpt, which holds other objects than weights"),
        ({"ckpt_path": "other.ckpt"}, "ckpt_path is other.ckpt, which holds no training state; allowed"),
        ({"ckpt_path": "strange.ckpt"}, "ckpt_path is strange.ckpt, whose weights are of another model (it lacks head."),
        ({"format": "tensorflow"}, "format is 'tensorflow'; allowed: safetensors, huggingface, onnx, torch"),
        ({"format": "onx"}, "format is 'onx'; did you mean 'onnx'?"),
        ({"format": None}, "format is not given; allowed: safetensors|huggingface"),
        ({"output": "full"}, "output is full, which is not empty; allowed: a new folder, or --overwrite true"),
        ({"output": "full", "overwrite": "true"}, "output is full, which holds no export; allowed with overwrite"),
        ({"output": "text.ckpt"}, "output is text.ckpt, which is a file; allowed: a folder"),
        ({"overwrite": "yes"}, "overwrite is 'yes'; allowed: true, false"),
        ({"quantize": "int8"}, "quantize is 'int8' with format='safetensors'; allowed: with format=onnx"),
        ({"format": "onnx", "quantize": "int4"}, "quantize is 'int4'; did you mean 'int8'?; allowed: int8"),
        ({"source": "x.txt"}, "source is 'x.txt' without quantize; allowed"),
        ({"dtype": "float16"}, "dtype is 'float16'; did you mean 'bfloat16'?; allowed: float32, bfloat16"),
        ({"format": "onnx", "dtype": "bfloat16"}, "dtype is 'bfloat16' with format='onnx'; allowed: with safetensors"),
        ({"results": "nowhere"}, "results is nowhere, which holds no metrics; allowed: the folder of a run"),
        ({"formt": "onnx"}, "unknown setting '--formt' of export; did you mean '--format'?"),
    ],
)
def test_bad_setting(change, expected, pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"state_dict": {}, "global_step": 0, "share": Fraction(1, 3)}, tmp_path / "pickled.ckpt")
    torch.save({"weights": {}}, tmp_path / "other.ckpt")
    strange = torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)
    strange["state_dict"].popitem()
    torch.save(strange, tmp_path / "strange.ckpt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    settings = {"ckpt_path": str(pretrained), "format": "safetensors", "output": "out"} | change
    argv = [word for key, value in settings.items() if value is not None for word in (f"--{key}", value)]
    assert expected in complaint(["export", *argv], tmp_path)
    (tmp_path / "complaint.txt").unlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("form", "missing", "expected"),
    [
        (
            "huggingface",
            "transformers",
            "needs transformers, not installed here; allowed after: pip install 'lit-linformer[hf]'",
        ),
        ("onnx", "onnxruntime", "needs onnxruntime, not installed here; allowed after: pip install 'lit-linformer[onnx]'"),
    ],
)
def test_missing_extra_names_the_pip_command(form, missing, expected, monkeypatch, tmp_path):
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest))
    line = complaint(["export", "--ckpt_path", "run", "--format", form, "--output", "out"], tmp_path)
    assert expected in line


def test_overwrite_replaces_an_export(pretrained, tmp_path):
    export(pretrained, "safetensors", tmp_path / "out", tmp_path)
    (tmp_path / "out/model.onnx").touch()  # from an earlier export
    (tmp_path / "link").symlink_to(tmp_path / "out")
    export(pretrained, "safetensors", tmp_path / "link", tmp_path, "--overwrite", "true")
    assert not (tmp_path / "out/model.onnx").exists() and (tmp_path / "out/model.safetensors").is_file()
    assert (tmp_path / "link").is_symlink() and {path.name for path in tmp_path.iterdir()} >= {"link", "out"}
    assert (tmp_path / "out").stat().st_mode & 0o777 != 0o700 or (tmp_path / "output.txt").stat().st_mode & 0o077 == 0


def test_overwrite_leaves_what_no_export_wrote(pretrained, tmp_path):
    argv = ["export", "--ckpt_path", str(pretrained), "--format", "safetensors", "--output", str(tmp_path / "out")]
    argv += ["--overwrite", "true"]
    export(pretrained, "safetensors", tmp_path / "out", tmp_path)
    (tmp_path / "out/notes.txt").touch()
    assert "out, which holds notes.txt, and no export wrote that" in complaint(argv, tmp_path)
    (tmp_path / "out/notes.txt").unlink()
    # A model of ours that was trained further elsewhere, and a foreign one.
    card = (tmp_path / "out/README.md").read_text()
    (tmp_path / "out/README.md").write_text("# Fine-tuned")
    assert "which holds no export" in complaint(argv, tmp_path)
    (tmp_path / "out/README.md").write_text(card)
    (tmp_path / "out/config.json").write_text('{"model_type": "bert"}')
    assert "which holds no export" in complaint(argv, tmp_path)
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_full_disk_is_one_line(form, pretrained, tmp_path):
    with small_disk(tmp_path / "small", "40k") as folder:
        argv = ["export", "--ckpt_path", str(pretrained), "--format", form, "--output", str(folder / "out")]
        assert f"output: cannot write {folder}/out: No space left on device; allowed" in complaint(argv, tmp_path)
        assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(pretrained, tmp_path):
    (tmp_path / "file").touch()
    argv = ["export", "--ckpt_path", str(pretrained), "--format", "safetensors", "--output", str(tmp_path / "file/out")]
    assert f"output: cannot write {tmp_path}/file/out: " in complaint(argv, tmp_path)


def test_folder_that_is_no_export(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    foreign = r"another project's; allowed: what export wrote, or .* run\.py convert"
    with pytest.raises(ValueError, match=foreign):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()  # as in older models on the hub
    with pytest.raises(ValueError, match=foreign):
        open_checkpoint(tmp_path)
