"""Forward and backward of the base-size encoder on a GPU, by attention and by how it is compiled: encoder.json.

python docs/results/gpu-h200-compiled/encoder_by_variant.py   (from the project's folder, with PYTHONPATH=.)
"""

import json
import time

import torch

from lit_linformer.model import Encoder, EncoderConfig

ROWS, N = 128, 512
LOOKUP = {"attention": "lookup", "attention_options": {"window": 16}}
VARIANTS = {  # name: (compiled, what it is)
    "full": ("layers", {"attention": "full"}),
    "linformer": ("layers", {"attention": "linformer"}),
    "linformer whole": ("whole", {"attention": "linformer"}),
    "lookup": ("layers", {"attention": "lookup", "attention_options": {"window": 0}}),
    "window": ("layers", {"attention": "window", "attention_options": {"window": 16}}),
    "lookup+window": ("layers", LOOKUP),
    "lookup+window, chunk 32": ("layers", {"attention": "lookup", "attention_options": {"window": 16, "chunk": 32}}),
    "lookup+window whole": ("whole", LOOKUP),
    "lookup+window eager": ("", LOOKUP),
}


def measure(compiled: str, settings: dict) -> dict:
    torch.manual_seed(0)
    shape = {"vocab_size": 8192, "max_length": N, "hidden_size": 768, "num_heads": 12, "num_layers": 12}
    shape |= {"intermediate_size": 3072, "projection_dim": 64, "local_width": 5, "norm": "pre", "dropout": 0.0}
    shape |= {"attention_dropout": 0.0, "sharing": "layerwise", "projection_init": "block_mean", "short_rows": "mean"}
    net = Encoder(EncoderConfig(**shape, **settings)).cuda()
    if compiled == "layers":
        for layer in net.layers:
            layer.compile()
    forward = torch.compile(net) if compiled == "whole" else net
    ids = (torch.rand(ROWS, N, device="cuda") ** 3 * 8000).long() + 5  # skewed, as words are

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = forward(ids)
        hidden.float().square().mean().backward()
        net.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step(), step()
    torch.cuda.synchronize()
    first, times = time.perf_counter() - began, []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 4)
    median = sorted(times)[2]
    return {"ms": median * 1e3, "thousand tokens/s": ROWS * N / median / 1e3, "seconds of the first two steps": first}


if __name__ == "__main__":
    for name, (compiled, settings) in VARIANTS.items():
        print(name, json.dumps(measure(compiled, settings)), flush=True)
        torch._dynamo.reset()
