"""Text to measure a model on: rows of tokens, masked as in validation."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_linformer.data import PretrainingData
from lit_linformer.model import MaskedLanguageModel
from lit_linformer.runs.record import of_class
from lit_linformer.tasks.mlm import inputs
from lit_linformer.tasks.perplexity import Perplexity

BATCH = 4
KEPT = ("column", "cache_dir")  # settings of the run's own text that another text takes over


def names_text(settings: dict[str, Any]) -> bool:
    """Whether a run's data settings, class_path included, name a text to pretrain on; a conversion's may name none."""
    return of_class(settings.get("class_path"), "PretrainingData") and bool(settings.get("source"))


def open_text(settings: dict[str, Any], source: str | None, tokenizer: Path, max_length: int) -> tuple[PretrainingData, str]:
    """The data, and the name of the split to read: a run's validation text or, if ``source`` is given, all of that text.

    settings: the run's settings of PretrainingData; empty if there is no run.
    """
    settings = {key: value for key, value in settings.items() if key != "class_path"}
    settings |= {"tokenizer": str(tokenizer), "max_length": max_length, "text": None, "file": None, "num_workers": 0}
    if source is None:
        data = PretrainingData(**settings)
        data.setup("validate")
        return data, "validation"
    kept = {key: settings[key] for key in ("tokenizer", "max_length", *KEPT) if key in settings}
    data = PretrainingData(source, validation_fraction=0.0, test_fraction=0.0, **kept)
    data.setup("fit")
    return data, "train"


def masked_batches(data: PretrainingData, split: str, max_length: int, rows: int) -> list[dict[str, Tensor]]:
    """Up to ``rows`` rows of max_length tokens, in batches of up to BATCH; the same ones in every call."""
    batch = math.gcd(rows, BATCH)  # no more rows than asked for: of longer rows they would be another text
    return list(itertools.islice(data.evaluation_loader(split, max_length, batch), rows // batch))


@torch.inference_mode()
def perplexity(net: MaskedLanguageModel, batches: Iterable[dict[str, Tensor]]) -> float:
    """exp(Σ nll / Σ masked tokens), on the device of the model."""
    metric, device = Perplexity(), net.head.dense.weight.device
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
        nll = net.nll(*inputs(batch))
        metric.update(nll.cpu(), batch["labels"].cpu())
    return metric.compute().item()
