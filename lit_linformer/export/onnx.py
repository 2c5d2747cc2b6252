"""The onnx format: one graph for any batch and length, run with onnxruntime; 8-bit weights as an option."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lit_linformer.export.graph import traceable, traced
from lit_linformer.export.safetensors_folder import write_config
from lit_linformer.export.verify import random_tokens
from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.utils.quiet import quiet

MODEL, INT8 = "model.onnx", "model.int8.onnx"
ROUNDS = 9


def write(model: TrainedModel, folder: Path) -> None:
    """Writes config.json, tokenizer.json and model.onnx.

    The graph: input_ids and attention_mask, (B, N) int64, to logits (B, N, V), or a classifier's (B, C). With an input_size,
    input_ids are (B, N, input_size) float32.
    """
    write_config(model, folder)
    # The exporter prints its progress and notes on the operator set to stdout, stderr and the log.
    with traceable(model, "onnx"), quiet():
        torch.onnx.export(
            traced(model),
            (),
            folder / MODEL,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamo=True,
            external_data=False,
        )


def logits(model: TrainedModel, folder: Path, file: str = MODEL) -> Callable[[Tensor, Tensor], Tensor]:
    """The written model, as a function of input_ids and attention_mask (B, N); on one CPU thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / file, options, providers=["CPUExecutionProvider"])

    def run(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        fed = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.long().numpy()}
        return torch.from_numpy(session.run(["logits"], fed)[0])

    return run


def compare_speed(model: TrainedModel, sessions: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> str:
    """One line: milliseconds for a row of n tokens on one thread, PyTorch and each session in turn, the median of ROUNDS."""
    length, before = model.encoder.max_length, torch.get_num_threads()
    ids = random_tokens(model, 1, length, torch.Generator().manual_seed(0))
    mask = torch.ones(1, length, dtype=torch.int64)
    runs = {"PyTorch": lambda ids, mask: model.net(ids, mask.bool()), **sessions}
    times = {name: [] for name in runs}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for turn in range(ROUNDS + 2):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run(ids, mask)
                    if turn > 1:  # the first two warm up
                        times[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    shown = ", ".join(f"{name} {1000 * statistics.median(seconds):.1f} ms" for name, seconds in times.items())
    return f"one row of {length} tokens on one thread: {shown}"
