"""Whole training steps of the base model on a GPU, compiled by layer, all variants in turns in one process: steps.json.

python docs/results/gpu-h100/steps_by_variant.py   (from the project's folder, with PYTHONPATH=.)

The script that ran, tidied, without its limits of time and its profiler.
"""

import json
import statistics
import time

import torch
from torch import Tensor, nn

from lit_linformer.model import MaskedLanguageModel
from lit_linformer.model.flops import training_flops
from lit_linformer.studies.benchmark.steps import by_hand, encoder_config, make_batch, masked_tokens
from lit_linformer.utils.peaks import device_peak

BASE = dict(
    device="cuda", precision="bf16", compile=True, vocab_size=50265, hidden_size=768, num_layers=12, num_heads=12,
    intermediate_size=3072, projection_dim=128, mask_rate=0.15, dropout=0.0, tokens=65536,
)  # fmt: skip
MULTIPLE = {"vocab_size": 50304}  # of 64
CASES = {  # name: (model, n, settings, whether what the layers add to is bfloat16)
    "linformer": ("linformer", 512, {}, False),
    "lookup": ("lookup", 512, {}, False),
    "transformer": ("transformer", 512, {}, False),
    "linformer, V 50304": ("linformer", 512, MULTIPLE, False),
    "linformer, V 50304, bf16 residual": ("linformer", 512, MULTIPLE, True),
    "lookup, V 50304, bf16 residual": ("lookup", 512, MULTIPLE, True),
    "lookup k=64": ("lookup", 512, MULTIPLE | {"projection_dim": 64}, True),
    "linformer 8192": ("linformer", 8192, MULTIPLE, True),
    "lookup 8192": ("lookup", 8192, MULTIPLE, True),
    "transformer 8192": ("transformer", 8192, MULTIPLE, True),
}


class Rounded(nn.Module):
    """What ``inner`` gives, in bfloat16: as the first layer's input it makes every sum of the residual stream so."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).to(torch.bfloat16)


def build(kind: str, n: int, more: dict, rounded: bool):
    torch.manual_seed(0)
    settings = BASE | more
    net = MaskedLanguageModel(encoder_config(kind, settings, n))
    if rounded:
        net.encoder.dropout = Rounded(net.encoder.dropout)
    step, batch = by_hand(net, settings), {name: part.cuda() for name, part in make_batch(settings, n, 0).items()}
    if kind == "lookup":  # skewed, as words are
        ids = torch.rand(batch["input_ids"].shape, device="cuda") ** 3
        batch["input_ids"] = (ids * (settings["vocab_size"] - 5)).long() + 5
    flops = settings["tokens"] // n * training_flops(net.encoder, n, masked_tokens(settings, n))
    return step, batch, flops


def seconds(step, batch, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    peak, models, found = device_peak("cuda", "bf16"), {}, {}
    for name, case in CASES.items():
        torch.cuda.reset_peak_memory_stats()
        models[name] = build(*case)
        found[name] = {"seconds of the first two steps": 2 * seconds(*models[name][:2], 2), "ms": []}
        found[name]["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    for _ in range(5):
        for name, (step, batch, _) in models.items():
            seconds(step, batch, 1)
            found[name]["ms"].append(1e3 * seconds(step, batch, 6))
    for name, (_, batch, flops) in models.items():
        median = statistics.median(found[name]["ms"]) / 1e3
        found[name] |= {"tokens/s": batch["input_ids"].numel() / median, "mfu": flops / median / peak}
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "models": found}, indent=1))
