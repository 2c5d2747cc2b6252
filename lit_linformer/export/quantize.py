"""8-bit weights for the onnx format, and what they cost: perplexity, or a classifier's changed answers, on a text.

Shapes: B rows, N tokens, M masked positions per row, V vocabulary, C classes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_linformer.data import FineTuningData
from lit_linformer.export.onnx import INT8, MODEL
from lit_linformer.model.heads import label_nll
from lit_linformer.runs.record import of_class
from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.tasks.evaluation import BATCH, masked_batches, names_text, open_text
from lit_linformer.tasks.perplexity import Perplexity
from lit_linformer.tasks.scores import answers
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.quiet import quiet

ROWS, TEXTS = 64, 256  # how many to measure on; TEXTS for classifiers, whose rows are short
Logits = Callable[[Tensor, Tensor], Tensor]


def write(folder: Path) -> None:
    """Makes model.int8.onnx from model.onnx: linear layers' weights in 8 bits, scaled per channel; activations at run time."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(folder / MODEL)
    del graph.graph.value_info[:]  # the quantiser transposes a Gemm's weight, whose recorded shape would then be wrong
    with quiet():
        quantize_dynamic(
            graph,
            folder / INT8,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,  # 7 bits: with 8 the sums overflow on an x86 processor without VNNI
        )


def read_batches(model: TrainedModel, source: str | None, tokenizer: Path) -> list[dict[str, Tensor]]:
    """ROWS rows of the run's validation text, or of another text, masked as in validation; TEXTS texts for a classifier.

    Raises ValueError if there is no such text.
    """
    own = "FineTuningData" if model.classifies else "PretrainingData"
    settings = {key: value for key, value in model.data.items() if key != "class_path"}
    named = of_class(model.data.get("class_path"), own) if model.classifies else source is not None or names_text(model.data)
    if not named:
        text = "" if model.classifies else ", or with --source, a text to measure on"
        raise UserError("quantize is 'int8'", f"for a run whose data is {own}{text}")
    try:
        if model.classifies:
            batches = _texts(settings, source, tokenizer, model.max_length)
        else:
            data, split = open_text(settings, source, tokenizer, model.max_length)
            batches = masked_batches(data, split, model.max_length, ROWS)
    except (ValueError, OSError) as error:
        if source is not None:
            raise
        line = " ".join(str(error).split())
        raise UserError(f"source is not given, and the run's own text cannot be read ({line})", "a text") from error
    if not batches:
        raise UserError("source is not given, and the run held out no text", "a text, as for data.source")
    return batches


def _texts(settings: dict[str, Any], source: str | None, tokenizer: Path, max_length: int) -> list[dict[str, Tensor]]:
    settings |= {"tokenizer": str(tokenizer), "max_length": max_length, "text": None, "file": None, "num_workers": 0}
    settings |= {"text_pair": None, "max_windows": 1, "eval_batch_size": BATCH} | ({"source": source} if source else {})
    data = FineTuningData(**settings)
    data.setup("validate")
    loaders = data.val_dataloader()
    batches, rows = [], 0
    for batch in loaders[0] if isinstance(loaders, list) else loaders:
        batches.append(batch)
        rows += len(batch["index"])
        if rows >= TEXTS:
            break
    return batches


@torch.inference_mode()
def cost(model: TrainedModel, batches: list[dict[str, Tensor]], before: Logits, after: Logits) -> str:
    """One line: how much worse the second function of input_ids and attention_mask is than the first."""
    rows = sum(len(batch["input_ids"]) for batch in batches)
    if not model.classifies:
        a, b = (perplexity(logits, batches) for logits in (before, after))
        return f"perplexity float32 {a:.2f} → int8 {b:.2f} ({b / a - 1:+.1%}), on {rows} rows at 15 % masking"
    a, b = (torch.cat([logits(*_inputs(batch)) for batch in batches]) for logits in (before, after))
    if model.num_labels == 1:
        return f"values change by {(a - b).abs().mean():.3f} on average, {(a - b).abs().max():.3f} at most, on {rows} texts"
    same = answers(a, model.several_labels) == answers(b, model.several_labels)
    kept = same.reshape(len(a), -1).all(-1).sum()
    return f"int8 gives float32's answer for {kept} of {rows} texts"


def perplexity(logits: Logits, batches: list[dict[str, Tensor]]) -> float:
    """exp(Σ nll / Σ masked tokens)."""
    metric = Perplexity()
    for batch in batches:
        at_masks = logits(*_inputs(batch)).take_along_dim(batch["positions"][..., None], dim=1)  # (B, M, V)
        metric.update(label_nll(at_masks.double(), batch["labels"]), batch["labels"])
    return metric.compute().item()


def _inputs(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return ids, torch.ones_like(ids) if mask is None else mask.long()
