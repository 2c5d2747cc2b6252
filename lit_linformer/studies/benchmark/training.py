"""Training steps: tokens/s of this project's models against RoBERTa's: `python run.py benchmark --what training`.

All have the same shape, batch, masking rate, dropout and optimiser (studies/benchmark/steps.py says which model is which). They
take turns in one process, so that a slow moment affects all alike; a ratio is the median of the rounds' ratios. If the package
`transformers` is not installed, its models are left out. --scaling gives further lengths for the Linformer alone, with the same
number of tokens per step. Writes training.json.

    python run.py benchmark --what training --hidden_size 256 --num_layers 4 --tokens 2048
    python run.py benchmark --what training --device cuda --precision bf16 --compile true --scaling 8192
"""

import importlib.metadata
import importlib.util
import statistics
from typing import Any

from lit_linformer.studies.benchmark.subject import (
    CELL_SECONDS,
    CLOCK,
    DEVICE,
    ROUNDS,
    THREADS,
    WHAT,
    begin,
    output,
    spread,
    write,
)
from lit_linformer.utils.arguments import FLAG, Setting, choice, listed, number, whole

MODELS = ("linformer", "lookup", "linformer-paper", "transformer", "roberta", "linformer-lightning", "roberta-trainer")
NEEDS = {"roberta": ("transformers",), "roberta-trainer": ("transformers", "accelerate")}
# Which models' speeds are compared.
RATIOS = (
    ("linformer", "roberta"),
    ("linformer-paper", "roberta"),
    ("transformer", "roberta"),
    ("linformer", "transformer"),
    ("lookup", "transformer"),
    ("linformer-lightning", "roberta-trainer"),
    ("linformer", "linformer-lightning"),
)
COUNT = whole("N", 1)
SETTINGS = {
    "what": WHAT,
    "models": Setting(listed(choice(*MODELS, name="MODEL")), f"of {', '.join(MODELS)} (default: all)", list(MODELS)),
    "length": Setting(COUNT, "n", 512),
    "scaling": Setting(listed(COUNT), "other n, for the Linformer alone: 8192", []),
    "tokens": Setting(COUNT, "tokens in a step, the same for every n (default 2048; on a GPU 65536)"),
    "hidden_size": Setting(COUNT, "D", 768),
    "num_layers": Setting(COUNT, "layers (default 2; on a GPU 12)"),
    "num_heads": Setting(COUNT, "heads (default: of width 64)"),
    "vocab_size": Setting(whole("N", 8), "V", 50265),
    "projection_dim": Setting(whole("K", 1), "k", 128),
    "mask_rate": Setting(number("SHARE", above=0, most=1), "share of tokens to predict", 0.15),
    "dropout": Setting(number("SHARE", 0, 1), "dropout, everywhere", 0.0),
    "device": DEVICE,
    "precision": Setting(choice("float32", "bf16"), "bf16: autocast", "float32"),
    "compile": Setting(FLAG, "torch.compile for all of them", False),
    "threads": THREADS,
    "clock": CLOCK,
    "rounds": ROUNDS,
    "warmup": Setting(COUNT, "rounds before these", 1),
    "steps": Setting(COUNT, "training steps in each round (default 1; on a GPU 10)"),
    "cell_seconds": CELL_SECONDS,
    "output": output("runs/benchmark-training"),
}
DEFAULTS = {"tokens": (2048, 65536), "num_layers": (2, 12), "steps": (1, 10)}  # (CPU, GPU)


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = begin("training", __doc__, SETTINGS, argv, "training", **DEFAULTS)
    settings["num_heads"] = settings["num_heads"] or max(1, settings["hidden_size"] // 64)
    settings["intermediate_size"] = 4 * settings["hidden_size"]
    names, notes = names_of(settings)
    for note in notes:
        print(f"note: {note}", flush=True)
    from lit_linformer.studies.benchmark.process import Job, measure
    from lit_linformer.studies.benchmark.steps import check, measure_training

    for name in names:
        check(name, settings)
    place = {"threads": settings["threads"]}
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is not None:
            place[package] = importlib.metadata.version(package)
    found = evaluate(settings, measure(Job(measure_training, settings), names))
    print(f"{settings['precision']}, {settings['tokens']} tokens a step, {settings['clock']} time")
    for name, entry in found["models"].items():
        if entry["status"] != "ok":
            print(f"{name:<28}{entry['status']}{': ' + entry['reason'] if 'reason' in entry else ''}")
            continue
        speed = entry["tokens_per_second"]
        mfu = f"  MFU {entry['mfu']:.1%}" if "mfu" in entry else ""
        print(f"{name:<28}{speed['median']:>12,.0f} tokens/s ({speed['min']:,.0f} to {speed['max']:,.0f}){mfu}")
    for name, ratio in found["ratios"].items():
        print(f"{name:<48}{ratio['median']:.2f} × ({ratio['min']:.2f} to {ratio['max']:.2f})")
    told = {key: value for key, value in settings.items() if key not in ("what", "output", "cell_seconds")}
    content = {"environment": place, "notes": notes, "settings": told, **found}
    write(settings["output"], "training", argv, settings["device"], content)


def names_of(settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The models, "KIND N" each, and notes on those that are left out."""
    names, notes = [], []
    for kind in settings["models"]:
        if missing := [package for package in NEEDS.get(kind, ()) if importlib.util.find_spec(package) is None]:
            notes.append(f"{kind} is left out: {' and '.join(missing)} not installed")
        else:
            names.append(f"{kind} {settings['length']}")
    return list(dict.fromkeys([*names, *(f"linformer {n}" for n in settings["scaling"])])), notes


def evaluate(settings: dict[str, Any], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens/s, MFU and ratios of what was measured."""
    from lit_linformer.studies.benchmark.steps import split, step_flops
    from lit_linformer.utils.peaks import device_peak

    peak, models, done = device_peak(settings["device"], settings["precision"]), {}, {}
    for name, found in measured.items():
        models[name] = dict(found)
        if found["status"] != "ok":
            continue
        n = split(name)[1]
        tokens = max(1, settings["tokens"] // n) * n
        done[name] = [tokens / seconds for seconds in found["seconds"]]
        models[name]["tokens_per_second"] = spread(done[name])
        if (flops := step_flops(name, settings)) is not None:
            reached = flops / statistics.median(found["seconds"])
            models[name]["gflops_per_second"] = float(f"{reached / 1e9:.5g}")
            if peak is not None:
                models[name]["mfu"] = float(f"{reached / peak:.4g}")
    n, ratios = settings["length"], {}
    pairs = [(f"{a} {n}", f"{b} {n}") for a, b in RATIOS] + [(f"linformer {m}", f"linformer {n}") for m in settings["scaling"]]
    for a, b in pairs:
        if a in done and b in done and a != b:
            ratios[f"{a} / {b}"] = spread([x / y for x, y in zip(done[a], done[b], strict=True)])
    return {"peak_tflops": peak and peak / 1e12, "models": models, "ratios": ratios}
