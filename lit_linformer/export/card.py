"""The model card: README.md of an exported folder, facts only."""

import re
from pathlib import Path

from lit_linformer.model import ATTENTIONS, count_parameters
from lit_linformer.runs.trained_model import TrainedModel, own_classes
from lit_linformer.utils.figures import spread

NOT_ALONE = ("safetensors", "huggingface")  # weights, which a class of the user's own makes a model of; the others are graphs
ROWS = 24  # of the perplexity table; a longer curve is thinned

USE = {
    "safetensors": """from lit_linformer.export import load

net, tokenizer = load("FOLDER")
ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("some text"), tokenizer.eos_id]])
logits = net(ids)  # SHAPE""",
    "huggingface": """import lit_linformer.export.huggingface  # pip install 'lit-linformer[hf]'
from transformers import pipeline

print(pipeline("PIPELINE", "FOLDER")(TEXT))""",
    "onnx": """import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/model.onnx")
inputs = {"input_ids": np.array([IDS]), "attention_mask": np.ones((1, 5), dtype=np.int64)}
(logits,) = session.run(["logits"], inputs)  # SHAPE; any B, and N up to LONGEST""",
    "torch": """import torch

model = torch.export.load("FOLDER/model.pt2").module()
logits = model(torch.tensor([IDS]), torch.ones(1, 5, dtype=torch.int64))  # SHAPE; any B, and N up to LONGEST""",
}


def write(model: TrainedModel, folder: Path, form: str, notes: list[str]) -> None:
    """README.md; notes: lines that the export adds."""
    (folder / "README.md").write_text(card(model, folder_name="path/to/this/folder", form=form, notes=notes), encoding="utf-8")


def card(model: TrainedModel, folder_name: str, form: str, notes: list[str]) -> str:
    e, facts = model.encoder, model.facts
    kind = e.attention_kind.title or f"encoder with the attention {e.attention}"
    task = "sequence classification" if model.classifies else "masked language modelling"
    if model.classifies and model.num_labels == 1:
        task = "regression of texts"
    lines = [
        f"# {plain(model.name)}",
        "",
        f"{'An' if kind[0] in 'aeiou' else 'A'} {kind} for {task}, trained and exported with lit-linformer {facts['version']}.",
        "",
    ]
    settings = {**vars(e), "parameters": count_parameters(model.net)}
    hidden = ("causal", "activation_checkpointing", "initializer_range", "projection_noise")
    hidden += tuple({name for known in ATTENTIONS.values() for name in known.settings} - {*e.attention_kind.settings})
    hidden += tuple(name for name in ("attention_options", "projection_options") if settings[name] is None)
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | {_number(value)} |" for name, value in settings.items() if name not in hidden]
    if model.classifies:
        lines += [f"| pooling | {model.net.pooling} |"]
        lines += [f"| labels | {plain(', '.join(model.labels))} |"] if model.labels else []
    lines += ["", "## Training", "", "| | |", "|---|---|"]
    names = {
        "converted_from": "converted from",
        "text": "text",
        "task": "task",
        "step": "optimiser steps",
        "tokens": "tokens, pads included",
    }
    lines += [f"| {label} | {_number(facts[key])} |" for key, label in names.items() if key in facts]
    lines += [f"| longest row, in tokens | {model.max_length} |"]
    lines += [f"| validation perplexity | {facts['perplexity']:.2f} |"] if "perplexity" in facts else []
    lines += [f"| validation {key} | {value:.4f} |" for key, value in facts.get("scores", {}).items()]
    if model.curve:
        head = ["", "Perplexity on held-out text, at 15 % masking:", "", "| step | tokens | perplexity |", "|---:|---:|---:|"]
        lines += head + [f"| {step} | {tokens} | {perplexity:.2f} |" for step, tokens, perplexity in spread(model.curve, ROWS)]
    use = USE[form].replace("FOLDER", folder_name).replace("LONGEST", str(e.max_length))
    ids = [model.tokenizer.bos_id, *[model.tokenizer.mask_id] * 3, model.tokenizer.eos_id]
    use = use.replace("SHAPE", f"(B, {model.num_labels})" if model.classifies else f"(B, N, {e.vocab_size})")
    use = use.replace("IDS", str(ids)).replace("PIPELINE", "text-classification" if model.classifies else "fill-mask")
    pair = '{"text": "some text", "text_pair": "another"}' if model.pair else '"some text"'
    use = use.replace("TEXT", pair if model.classifies else f'"The {model.tokenizer.mask_token} of a function."')
    lines += [
        "",
        "## Use",
        "",
        "```python",
        *use.splitlines(),
        "```",
        "",
        "Rows are " + _layout(model) + ", padded on the right.",
    ]
    if own := form in NOT_ALONE and own_classes(e):
        lines += ["", f"It needs {' and '.join(own)}, which is not in this folder: a module that Python can import."]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def _layout(model: TrainedModel) -> str:
    names = {i: name for name, i in model.tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    bos, eos = names[model.tokenizer.bos_id], names[model.tokenizer.eos_id]
    return f"`{bos} text {eos} {eos} text {eos}`" if model.pair else f"`{bos} text {eos}`"


def _number(value: object) -> str:
    if isinstance(value, str):
        return plain(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def plain(text: str) -> str:
    """A name that someone chose, so that Markdown and HTML show it as it is, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]#|~]|\b_|_\b)", r"\\\1", text)
