"""The model card: README.md of an exported folder, with the training curve. Facts only."""

import csv
from pathlib import Path
from typing import Any

from lit_linformer.model import ATTENTIONS, count_parameters
from lit_linformer.runs.folder import PERPLEXITY
from lit_linformer.runs.record import of_class
from lit_linformer.runs.trained_model import COLUMNS, TrainedModel, own_classes
from lit_linformer.utils.figures import COLOURS, figure_class, open_frame, plain_numbers, rendered, thinned
from lit_linformer.utils.markdown import plain

OF_WEIGHTS = ("safetensors", "huggingface")  # formats that need the model's classes; the others are graphs
ROWS = 24  # of the perplexity table; a longer curve is thinned
FOLDER = "path/to/this/folder"
PICTURE, FEWEST = "perplexity.png", 3  # fewest points of a curve that is worth a picture

USE = {
    "safetensors": """import torch
from lit_linformer.export import load

net, tokenizer = load("FOLDER")
ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("some text"), tokenizer.eos_id]])
logits = net(ids)  # SHAPE""",
    "huggingface": """import lit_linformer.export.huggingface  # in a checkout of lit-linformer: pip install -e '.[hf]'
from transformers import pipeline

print(pipeline("PIPELINE", "FOLDER")(TEXT))""",
    "onnx": """import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/model.onnx")
inputs = {"input_ids": np.ARRAY, "attention_mask": np.ones((1, 5), dtype=np.int64)}
(logits,) = session.run(["logits"], inputs)  # SHAPE; any B, and N up to LONGEST""",
    "torch": """import torch

model = torch.export.load("FOLDER/model.pt2").module()
logits = model(torch.TENSOR, torch.ones(1, 5, dtype=torch.int64))  # SHAPE; any B, and N up to LONGEST""",
}
WITHOUT_TOKENIZER = {
    "safetensors": """import torch
from lit_linformer.export import load

net, _ = load("FOLDER")
logits = net(torch.TENSOR)  # SHAPE; any B, and N up to LONGEST""",
    "huggingface": """import torch
import lit_linformer.export.huggingface  # in a checkout of lit-linformer: pip install -e '.[hf]'
from transformers import MODEL

model = MODEL.from_pretrained("FOLDER")
logits = model(torch.TENSOR).logits  # SHAPE; any B, and N up to LONGEST""",
}
TRAINING = {
    "converted_from": "converted from",
    "text": "text",
    "task": "task",
    "data": "data",
    "step": "optimiser steps",
    "tokens": "tokens, pads included",
}


def write(model: TrainedModel, folder: Path, form: str, notes: list[str]) -> None:
    """Writes README.md, perplexity.csv and perplexity.png; notes: lines that the export adds."""
    if model.curve:
        with open(folder / PERPLEXITY, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *model.curve])
    if len(model.curve) >= FEWEST and (figure := figure_class()) is not None:
        (folder / PICTURE).write_bytes(rendered(_draw(figure, model.curve), dpi=100, format="png"))
    text = card(model, form, notes, pictured=(folder / PICTURE).is_file())
    (folder / "README.md").write_text(text, encoding="utf-8")


def _draw(figure_class: Any, curve: list[tuple[int, int, float]]) -> Any:
    """Perplexity against tokens."""
    figure = figure_class(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([tokens / 1e6 for _, tokens, _ in curve], [perplexity for *_, perplexity in curve], ".-", color=COLOURS[0])
    axes.set(xlabel="tokens seen (millions)", ylabel="validation perplexity", yscale="log")
    axes.set_xlim(left=0)
    plain_numbers(axes.yaxis)
    axes.grid(True, alpha=0.25)
    open_frame(axes)
    return figure


def card(model: TrainedModel, form: str, notes: list[str], pictured: bool) -> str:
    """The text of README.md."""
    lines = [*(_hub(model) if form == "huggingface" else []), f"# {plain(model.name)}", "", _lead(model)]
    lines += ["", *_settings(model), "", *_training(model, pictured), *_results(model)]
    lines += ["", *_use(model, form)]
    if own := form in OF_WEIGHTS and own_classes(model.encoder):
        lines += ["", f"It needs {' and '.join(own)}, which is not in this folder: a module that Python can import."]
    for note in notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _hub(model: TrainedModel) -> list[str]:
    """The metadata that the hub reads from a card: https://huggingface.co/docs/hub/model-cards"""
    licence = [f"license: {model.facts['license']}"] if "license" in model.facts else []
    tag = [f"pipeline_tag: {_pipeline(model)}"] if model.tokenizer is not None else []  # pipelines begin with a tokenizer
    return ["---", *licence, *tag, "library_name: transformers", "tags: [linformer]", "---", ""]


def _pipeline(model: TrainedModel) -> str:
    return "text-classification" if model.classifies else "fill-mask"


def _lead(model: TrainedModel) -> str:
    kind = model.encoder.attention_kind.title or f"encoder with the attention {model.encoder.attention}"
    task = "sequence classification" if model.classifies else "masked language modelling"
    if model.classifies and model.num_labels == 1:
        task = "regression" if model.tokenizer is None else "regression of texts"
    a = "An" if kind[0] in "aeiou" else "A"
    return f"{a} {kind} for {task}, trained and exported with lit-linformer {model.facts['version']}."


def _settings(model: TrainedModel) -> list[str]:
    e = model.encoder
    settings = {**vars(e), "parameters": count_parameters(model.net)}
    hidden = ("causal", "activation_checkpointing", "initializer_range", "projection_noise", "local_std")
    hidden += tuple({name for known in ATTENTIONS.values() for name in known.settings} - {*e.attention_kind.settings})
    hidden += tuple(name for name in ("attention_options", "projection_options") if settings[name] is None)
    hidden += ("vocab_size",) if e.input_size else ("input_size",)
    lines = ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | {_number(value)} |" for name, value in settings.items() if name not in hidden]
    if model.classifies:
        lines += [f"| pooling | {model.net.pooling} |"]
        of_text = "labels, any number of them a text" if model.several_labels else "labels"
        lines += [f"| {of_text} | {plain(', '.join(model.labels))} |"] if model.labels else []
    return lines


def _training(model: TrainedModel, pictured: bool) -> list[str]:
    facts = model.facts
    lines = ["## Training", "", "| | |", "|---|---|"]
    lines += [f"| {label} | {_number(facts[key])} |" for key, label in TRAINING.items() if key in facts]
    lines += [f"| longest row, in tokens | {model.max_length} |"]
    lines += [f"| validation perplexity | {facts['perplexity']:.2f} |"] if "perplexity" in facts else []
    lines += [f"| validation {key} | {value:.4f} |" for key, value in facts.get("scores", {}).items()]
    lines += [f"| seconds | {facts['seconds']:,.0f} |"] if "seconds" in facts else []
    lines += [f"| {plain(key)} | {plain(str(value))} |" for key, value in facts.get("environment", {}).items()]
    lines += [f"| license of the weights | {plain(facts['license'])} |"] if "license" in facts else []
    if made := [facts[key] for key in ("command", "exported") if key in facts]:
        lines += ["", "```sh", *made, "```"]
    if model.curve:
        lines += ["", f"![Validation perplexity against tokens]({PICTURE})"] if pictured else []
        held_out = "text" if model.tokenizer is not None else "rows"
        # Other data mask in their own way.
        masked = model.tokenizer is not None or of_class(facts.get("data"), "LongRangeData")
        lines += ["", f"Perplexity on held-out {held_out}{', at 15 % masking' * masked}:", ""]
        lines += ["| step | tokens | perplexity |", "|---:|---:|---:|"]
        lines += [f"| {step:,} | {tokens:,} | {perplexity:,.2f} |" for step, tokens, perplexity in thinned(model.curve, ROWS)]
    return lines


def _results(model: TrainedModel) -> list[str]:
    """The table of the runs that --results names."""
    results = model.facts.get("results", [])
    if not results:
        return []
    lines = ["", "## Results", "", "| run | metric | value |", "|---|---|---:|"]
    for result in results:
        lines += [f"| {plain(result['run'])} | {name} | {value:.4g} |" for name, value in result["metrics"].items()]
    return [*lines, "", "```sh", *dict.fromkeys(command for result in results for command in result["commands"]), "```"]


def _use(model: TrainedModel, form: str) -> list[str]:
    e, tokenizer = model.encoder, model.tokenizer
    words = {"FOLDER": FOLDER, "LONGEST": str(e.max_length)}
    words["SHAPE"] = f"(B, {model.num_labels})" if model.classifies else f"(B, N, {e.vocab_size})"
    words["MODEL"] = "AutoModelForSequenceClassification" if model.classifies else "AutoModelForMaskedLM"
    ids, shell = [0] * 5, []
    if tokenizer is not None:
        ids = [tokenizer.bos_id, *[tokenizer.mask_id] * 3, tokenizer.eos_id]
        words["PIPELINE"] = _pipeline(model)
        pair = '{"text": "some text", "text_pair": "another"}' if model.pair else '"some text"'
        # A pipeline truncates only if it is told to; `predict` truncates at the longest row.
        words["TEXT"] = f"{pair}, truncation=True" if model.classifies else f'"The {tokenizer.mask_token} of a function."'
        if form in OF_WEIGHTS and not model.classifies:
            command = f'python run.py predict --model.pretrained {FOLDER} --data.text "The {tokenizer.mask_token} of a word."'
            shell = ["", "With lit-linformer itself:", "", "```sh", command, "```"]
    words |= {"ARRAY": f"array([{ids}])", "TENSOR": f"tensor([{ids}])"}
    if e.input_size:
        words |= {"ARRAY": f"zeros((1, 5, {e.input_size}), dtype=np.float32)", "TENSOR": f"zeros(1, 5, {e.input_size})"}
    use = (USE if tokenizer is not None else USE | WITHOUT_TOKENIZER)[form]
    for word, put in words.items():
        use = use.replace(word, put)
    return ["## Use", "", "```python", *use.splitlines(), "```", "", _rows(model), *shell]


def _rows(model: TrainedModel) -> str:
    """A sentence on what the model's input rows look like."""
    e = model.encoder
    if model.tokenizer is not None:
        names = {i: name for name, i in model.tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        bos, eos = names[model.tokenizer.bos_id], names[model.tokenizer.eos_id]
        row = f"`{bos} text {eos} {eos} text {eos}`" if model.pair else f"`{bos} text {eos}`"
        windows = model.facts.get("windows", 1)
        read = f" In training and in its scores a text of more than {model.max_length:,} tokens was read in up to {windows:,} "
        read += "windows, whose logits were averaged; the example above reads one row, so its answers to such texts differ."
        return f"Rows are {row}, padded on the right.{read if windows > 1 else ''}"
    token = f"{e.input_size} numbers each" if e.input_size else f"ids from 0 to {e.vocab_size - 1}"
    given = f", as {plain(model.facts['data'])} gives them" if "data" in model.facts else ""
    return f"Tokens are {token}{given}; rows are padded on the right."


def _number(value: object) -> str:
    if isinstance(value, str):
        return plain(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
