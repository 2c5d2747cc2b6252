"""A trained run with its encoder, the text that it reads, and its spectrum."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_linformer.model import PROJECTIONS, Encoder, EncoderConfig
from lit_linformer.model.linformer import SHARINGS
from lit_linformer.model.lowrank import Measured, check_index, check_layers, check_maps, measure
from lit_linformer.runs.checkpoints import checkpoint_path
from lit_linformer.runs.exported import is_exported
from lit_linformer.runs.place import seen_from
from lit_linformer.runs.record import RunRecord
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks.evaluation import names_text, open_text
from lit_linformer.utils.errors import SettingError, UserError


@dataclass
class MeasuredRun:
    """A trained run, ready to be measured.

    Args:
        path: the run's folder, or an exported one.
        checkpoint: its checkpoint; for an export the folder.
        step: optimiser steps of the checkpoint.
        encoder, weights: the encoder's settings and weights.
        rows: token ids (S, N).
        text: what the rows are, in words.
        layers: which layers are measured.
        index: which singular value the heat map shows, from 1.
        measured: the result of ``measure``.
    """

    path: Path
    checkpoint: Path
    step: int
    encoder: EncoderConfig
    weights: dict[str, Tensor]
    rows: Tensor
    text: str
    layers: list[int]
    index: int
    measured: Measured | None = None

    @property
    def name(self) -> str:
        return f"{self.path} ({self.encoder.attention_kind.describe(self.encoder)}, n = {self.rows.shape[1]})"

    def measure(self, device: str) -> None:
        def progress(done: int) -> None:
            if sys.stderr.isatty():
                print(f"\r{self.path}: {done} of {len(self.rows)} sentences", end="", file=sys.stderr, flush=True)

        encoder = Encoder(self.encoder)
        check_maps(encoder)
        encoder.load_state_dict(self.weights)
        self.measured = measure(encoder.eval().to(device), self.rows, self.layers, rank=self.index, progress=progress)
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def suggestion(self, threshold: float) -> str | None:
        """Settings of a Linformer that keeps ``threshold`` of each layer's spectrum; None unless every layer was measured."""
        if len(self.layers) < self.encoder.num_layers:
            return None
        dims = ",".join(map(str, self.measured.suggested(threshold)))
        e = self.encoder
        words = [] if e.attention_kind.slots else [f"--model.encoder.attention {EncoderConfig.attention}"]
        words += [f"--model.encoder.projection_dim '[{dims}]'"]
        if SHARINGS[e.sharing].one_for_layers:  # one E for all layers has one k
            words += ["--model.encoder.sharing key-value"]
        try:
            for k in self.measured.suggested(threshold):
                PROJECTIONS.find(e.projection).check(e.max_length, k, e.projection_init)
        except ValueError:  # windows: k must divide n
            words += [f"--model.encoder.projection {EncoderConfig.projection}"]
        return " ".join(words)


def open_run(path: Path, given: dict[str, Any]) -> MeasuredRun:
    """Finds a run's checkpoint and text, as the command's settings say; ValueError for bad input before any computation."""
    found = path if is_exported(path) else Path(checkpoint_path("spectrum", given["ckpt_path"], path))
    run = read_model(found, "run" if found == path else "ckpt_path")
    run.check_modules()
    step = run.checkpoint["global_step"] if run.checkpoint else (run.exported.get("lit_linformer") or {}).get("step", 0)
    layers, heads = check_layers("layers", given["layers"], run.encoder), given["heads"]
    if heads and heads[-1] >= run.encoder.num_heads:
        raise SettingError("heads", heads, f"heads from 0 to {run.encoder.num_heads - 1}", when=f"for {path}")
    data = RunRecord(path).setting("data", {})
    settings = data.get("init_args", {})
    seen_from(path, settings)
    length = settings.get("max_length")
    length = min(length, run.encoder.max_length) if isinstance(length, int) else run.encoder.max_length
    index = check_index("index", given["index"], run.encoder, length)
    rows, text = _rows(path, data, given["source"], run.tokenizer, length, given["num_sentences"])
    return MeasuredRun(path, found, step, run.encoder, run.encoder_weights, rows, text, layers, index)


def _rows(path: Path, data: dict, source: str | None, tokenizer: str | None, length: int, count: int) -> tuple[Any, str]:
    """Token ids (S, N) of the run's validation text, or of another text with its tokenizer; and a description."""
    settings = data.get("init_args", {})
    ours = names_text({"class_path": data.get("class_path"), **settings})
    if tokenizer is None and not ours:
        raise SettingError("run", path, "a run with a tokenizer")
    if source is None and not ours:
        raise UserError("source is not given", "a text, as for data.source", when=f"for {path}, which pretrains on no text")
    prepared, split = open_text(settings, source, tokenizer or settings.get("tokenizer", "bpe"), length)
    blocks = prepared.blocks[split]
    if blocks.full == 0:
        raise UserError("source is not given", "a longer text", when=f"for {path}, whose validation text has no full row")
    rows = torch.from_numpy(blocks.full_rows(count))
    return rows, f"the validation text of {settings.get('source')}" if source is None else source
