"""ONNX: one graph for every length; int8 quantisation, and what it costs."""

import re
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.export.verify import largest_difference, random_inputs
from lit_linformer.runs.trained_model import open_checkpoint
from tests.export.models import VARIANTS, export, model_of
from tests.helpers import slow
from tests.model.mechanisms import MECHANISMS

SLOW = [VARIANTS[0], VARIANTS[-2], MECHANISMS["lsh"], MECHANISMS["sparse"]]
NAMES = ["key-value", "full", "modern lookup", "lsh", "sparse"]


@pytest.mark.parametrize("settings", [VARIANTS[4], *map(slow, SLOW)], ids=NAMES)
def test_onnx_graph_for_every_length(settings, tmp_path):
    pytest.importorskip("onnxruntime")
    from lit_linformer.export import onnx

    model = model_of(settings)
    onnx.write(model, tmp_path)
    written = onnx.logits(model, tmp_path)
    assert largest_difference(model, written) < 1e-5
    ids, mask = list(random_inputs(model))[3]
    other = ids.masked_fill(mask == 0, 7)  # the ids of padding never matter
    assert torch.equal(written(ids, mask)[mask.bool()], written(other, mask)[mask.bool()])


@pytest.mark.slow
def test_int8_tells_its_cost(pretrained, tmp_path):
    shown = export(pretrained, "onnx", tmp_path / "out", tmp_path, "--quantize", "int8")
    ((before, after),) = re.findall(r"perplexity float32 ([\d.]+) → int8 ([\d.]+) ", shown)
    assert float(after) == pytest.approx(float(before), rel=0.1) and "onnxruntime int8" in shown
    assert (tmp_path / "out/model.int8.onnx").is_file() and "perplexity float32" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("classes", "several", "after", "expected"),
    [
        (2, False, [[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [3.0, 4.0]], "int8 gives float32's answer for 3 of 4 texts"),
        (2, True, [[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [3.0, 4.0]], "int8 gives float32's answer for 2 of 4 texts"),
        (1, False, [[1.0], [2.5], [3.0], [4.0]], "values change by 0.125 on average, 0.500 at most, on 4 texts"),
    ],
)
def test_int8_answers_that_change_are_counted(classes, several, after, expected):
    pytest.importorskip("onnx")
    from lit_linformer.export import quantize

    before = {2: [[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [0.0, 1.0]], 1: [[1.0], [2.0], [3.0], [4.0]]}[classes]
    batches = [{"input_ids": torch.zeros(2, 3, dtype=torch.int64)}] * 2
    parts = [iter(torch.tensor(logits).split(2)) for logits in (before, after)]
    logits = [lambda ids, mask, part=part: next(part) for part in parts]
    assert (
        quantize.cost(SimpleNamespace(classifies=True, num_labels=classes, several_labels=several), batches, *logits)
        == expected
    )


@pytest.mark.slow
def test_int8_of_a_classifier(finetuned, tmp_path):
    pytest.importorskip("onnxruntime")
    from lit_linformer.export import onnx, quantize

    model = open_checkpoint(finetuned)
    onnx.write(model, tmp_path)
    batches = quantize.read_batches(model, None, tmp_path / "tokenizer.json")
    assert sum(len(batch["input_ids"]) for batch in batches) == 37
    quantize.write(tmp_path)
    before, after = (onnx.logits(model, tmp_path, file) for file in (onnx.MODEL, onnx.INT8))
    ((same, of),) = re.findall(
        r"int8 gives float32's answer for (\d+) of (\d+) texts", quantize.cost(model, batches, before, after)
    )
    assert 33 <= int(same) <= int(of) == 37


@pytest.mark.parametrize("elsewhere", [False, True])
def test_int8_perplexity_is_the_projects_own(elsewhere, pretrained, corpus, tmp_path):
    """On the run's validation text, or on another text: the same as `validate` on the same rows."""
    pytest.importorskip("onnxruntime")
    from lit_linformer.export import quantize

    model = open_checkpoint(pretrained)
    (tmp_path / "tokenizer.json").write_text(model.tokenizer.to_str())
    batches = quantize.read_batches(model, str(corpus) if elsewhere else None, tmp_path / "tokenizer.json")
    found = quantize.perplexity(lambda ids, mask: model.net(ids, mask.bool()), batches)
    nll = sum(model.net.nll(b["input_ids"], b["positions"], b["labels"], b.get("attention_mask")).sum() for b in batches)
    count = sum((b["labels"] >= 0).sum() for b in batches)
    assert found == pytest.approx((nll / count).exp().item(), rel=1e-5)


def test_an_exported_folder_is_measured_on_the_text_that_is_given(tmp_path, pretrained, corpus):
    from lit_linformer.export import quantize

    export(pretrained, "safetensors", tmp_path / "folder", tmp_path)
    model = open_checkpoint(tmp_path / "folder")
    (tmp_path / "tokenizer.json").write_text(model.tokenizer.to_str())
    assert quantize.read_batches(model, str(corpus), tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="quantize is 'int8'; allowed: for a run whose data is PretrainingData, or with"):
        quantize.read_batches(model, None, tmp_path / "tokenizer.json")


def test_a_text_that_is_missing_is_told_before_the_graph_is_written(tmp_path, pretrained, monkeypatch):
    pytest.importorskip("onnxruntime")
    from lit_linformer.export import command, onnx

    export(pretrained, "safetensors", tmp_path / "folder", tmp_path)
    monkeypatch.setattr(onnx, "write", lambda model, folder: pytest.fail("the graph was written first"))
    words = ["--ckpt_path", str(tmp_path / "folder"), "--format", "onnx", "--output", str(tmp_path / "o"), "--quantize", "int8"]
    with pytest.raises(ValueError, match="quantize is 'int8'; allowed: for a run whose data is PretrainingData, or with"):
        command.main(words)
    assert not (tmp_path / "o").exists()
