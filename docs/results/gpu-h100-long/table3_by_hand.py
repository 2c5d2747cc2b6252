"""Table 3 beyond n = 8,192 on a GPU: time and memory of the base size's layers, not compiled: table3.json.

python docs/results/gpu-h100-long/table3_by_hand.py   (from the project's folder, with PYTHONPATH=.)

The script that ran, tidied, without its limits of time. It measures as `benchmark` does, of fused attention two kernels alone.
"""

import json

import torch

from lit_linformer.studies.benchmark.models import build
from lit_linformer.studies.benchmark.passes import forget, make_input, peak_memory, run, timed

SETTINGS = dict(
    device="cuda", precision="bf16", compile=False, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072,
    sharing="layerwise", order="compress_first", projection="linear", local_width=0,
)  # fmt: skip
NAMES = ["fused flash", "fused cudnn", "linformer 128", "linformer 256", "linformer 1024"]
TOKENS = 65536


def measured(n: int, backward: bool) -> dict[str, dict]:
    x, models, found = make_input(SETTINGS, TOKENS // n, n, backward), {}, {}
    for name in NAMES:
        weights = next(iter(models.values())).state_dict(keep_vars=True) if models else None
        models[name] = build(name, SETTINGS, n, weights)
    for name, model in models.items():
        run(model, x)
        forget(model, x)
        found[name] = {"ms": [], "peak GiB": peak_memory(lambda model=model: run(model, x), "cuda") / 2**30}
        forget(model, x)
    for _ in range(3):
        for name, model in models.items():
            found[name]["ms"].append(1e3 * timed(model, x))
    torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    cells = {
        f"{n} {'forward and backward' if backward else 'forward'}": measured(n, backward)
        for n in (16384, 32768, 65536)
        for backward in (False, True)
    }
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "table3": cells}, indent=1))
