"""models/small, as cloned: complete, small, described in its card, and answering."""

import json
import re
from pathlib import Path

import pytest
import torch

from lit_linformer.runs.exported import SUMS
from lit_linformer.runs.trained_model import open_checkpoint
from tests.helpers import inside

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models/small"
PROMPT = re.search(r'--model.pretrained models/small --data.text "(.*)"', (ROOT / "README.md").read_text())[1]


@pytest.fixture(scope="module")
def model():
    return open_checkpoint(FOLDER)


def test_it_is_small_and_whole(model):
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 10e6
    assert {line.partition("  ")[2] for line in (FOLDER / SUMS).read_text().splitlines()} == {
        "model.safetensors",
        "tokenizer.json",
    }
    assert round(sum(parameter.numel() for parameter in model.net.parameters()) / 1e6, 1) == 3.4


def test_its_card_tells_what_it_was_made_from(model):
    card, facts = (FOLDER / "README.md").read_text(), model.facts
    assert (
        "CC BY-SA" in card and "license: mit" in card and "(perplexity.png)" in card and (FOLDER / "perplexity.png").is_file()
    )
    assert f"| tokens, pads included | {facts['tokens']:,} |" in card and facts["tokens"] > 30e6
    assert f"| validation perplexity | {facts['perplexity']:.2f} |" in card and model.curve[-1][2] == facts["perplexity"]
    assert "python run.py export" in card


def test_it_answers_as_the_readme_says(model):
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(PROMPT), model.tokenizer.eos_id]
    with torch.inference_mode():
        logits = model.net(torch.tensor([ids]))[0, ids.index(model.tokenizer.mask_id)]
    answer = model.tokenizer.decode([logits.argmax()]).strip()
    assert f"Fill a mask (*{answer}*)" in (ROOT / "README.md").read_text()


def test_transformers_answers_alike(model):
    transformers = pytest.importorskip("transformers")
    import lit_linformer.export.huggingface  # noqa: F401

    with inside(ROOT):
        (found, *_) = transformers.pipeline("fill-mask", "models/small")(PROMPT)
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(PROMPT), model.tokenizer.eos_id]
    with torch.inference_mode():
        chances = model.net(torch.tensor([ids]))[0, ids.index(model.tokenizer.mask_id)].softmax(-1)
    assert found["token"] == chances.argmax() and found["score"] == pytest.approx(chances.max().item(), rel=1e-4)


@pytest.mark.slow
def test_onnxruntime_computes_the_same(model, tmp_path):
    pytest.importorskip("onnxruntime")
    from lit_linformer.export import onnx
    from lit_linformer.export.verify import largest_difference

    onnx.write(model, tmp_path)
    assert largest_difference(model, onnx.logits(model, tmp_path)) < 1e-3
    assert json.loads((tmp_path / "config.json").read_text())["lit_linformer"] == model.facts
