"""Tokens/s of training: our Linformer and Transformer against RoBERTa of the package `transformers`, and against their length.

    python scripts/throughput.py --output runs/throughput --hidden_size 256 --num_layers 4 --tokens 2048
    python scripts/throughput.py --device cuda --precision bf16 --compile --output runs/throughput-gpu

All have the same shape, batch, masking rate, dropout and optimiser (lit_linformer/studies/training_steps.py says which model is
which). They take turns in one process, so that a slow moment hits all alike; a ratio is the median of the rounds' ratios. Where
`transformers` is not installed its models are left out. --scaling are further lengths for the Linformer alone, with the same
number of tokens a step. Leaves throughput.json in --output.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it works without installing the project, as run.py does

from lit_linformer.studies.measure import Job, measure
from lit_linformer.studies.settings import device
from lit_linformer.studies.training_steps import MODELS, step_flops
from lit_linformer.utils.environment import environment, without_folders
from lit_linformer.utils.files import write_text
from lit_linformer.utils.peaks import device_peak

# What is compared with what.
RATIOS = (
    ("linformer", "roberta"),
    ("linformer-paper", "roberta"),
    ("transformer", "roberta"),
    ("linformer", "transformer"),
    ("linformer-lightning", "roberta-trainer"),
    ("linformer", "linformer-lightning"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="what is measured (default: all)")
    parser.add_argument("--length", type=int, default=512, help="n (default 512)")
    parser.add_argument("--scaling", type=int, nargs="*", default=[], help="other n, of the Linformer alone: 8192")
    parser.add_argument("--tokens", type=int, help="tokens a step, whatever n (default 2048; on a GPU 65536)")
    parser.add_argument("--hidden_size", type=int, default=768, help="D (default 768)")
    parser.add_argument("--num_layers", type=int, help="layers (default 2; on a GPU 12)")
    parser.add_argument("--num_heads", type=int, help="heads (default: of 64)")
    parser.add_argument("--vocab_size", type=int, default=50265, help="V (default 50265)")
    parser.add_argument("--projection_dim", type=int, default=128, help="k (default 128)")
    parser.add_argument("--mask_rate", type=float, default=0.15, help="share of tokens to predict (default 0.15)")
    parser.add_argument("--dropout", type=float, default=0.0, help="everywhere (default 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="bf16: autocast (default float32)")
    parser.add_argument("--compile", action="store_true", help="torch.compile for all of them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU (default: torch's)")
    clock = "wall (default), or cpu: the process's own time, for a machine that is shared; with --threads 1"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clock)
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each model (default 7)")
    parser.add_argument("--warmup", type=int, default=1, help="turns before these (default 1)")
    parser.add_argument("--steps", type=int, help="training steps a turn (default 1; on a GPU 10)")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of one model (default 600)")
    parser.add_argument("--output", default="runs/throughput", help="folder of throughput.json (default runs/throughput)")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    settings = {**vars(args), "device": device(args.device), "cell_seconds": args.seconds}
    on_gpu = settings["device"] != "cpu"
    for name, pair in {"tokens": (2048, 65536), "num_layers": (2, 12), "steps": (1, 10)}.items():
        settings[name] = pair[on_gpu] if settings[name] is None else settings[name]
    settings["num_heads"] = args.num_heads or max(1, args.hidden_size // 64)
    settings["intermediate_size"] = 4 * args.hidden_size
    for name in ("length", "tokens", "num_layers", "steps", "rounds", "threads"):
        if settings[name] < 1:
            raise ValueError(f"{name} is {settings[name]}; allowed: 1 or more")
    if args.clock == "cpu" and (on_gpu or args.threads > 1):
        raise ValueError("clock is cpu; allowed: wall, or a CPU with threads = 1")
    return settings


def names_of(settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The models, "KIND N" each, and notes on those that are left out."""
    kinds, notes = settings["models"], []
    needs = {"roberta": ("transformers",), "roberta-trainer": ("transformers", "accelerate")}
    for kind, packages in needs.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if kind in kinds and missing:
            notes.append(f"{kind} is left out: {' and '.join(missing)} not installed")
            kinds = [other for other in kinds if other != kind]
    names = [f"{kind} {settings['length']}" for kind in kinds]
    return names + [f"linformer {n}" for n in settings["scaling"] if f"linformer {n}" not in names], notes


def spread(values: list[float]) -> dict[str, float]:
    return {name: float(f"{f(values):.5g}") for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def evaluate(settings: dict[str, Any], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens/s, MFU and ratios of what was measured."""
    peak, models, done = device_peak(settings["device"], settings["precision"]), {}, {}
    for name, found in measured.items():
        models[name] = dict(found)
        if found["status"] != "ok":
            continue
        n = int(name.partition(" ")[2])
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


def main() -> None:
    args = arguments()
    try:
        settings = settings_of(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    names, notes = names_of(settings)
    for note in notes:
        print(f"note: {note}", flush=True)
    place = environment(settings["device"]) | {"threads": settings["threads"]}
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is not None:
            place[package] = importlib.metadata.version(package)
    measured = measure(Job("training", True, settings["length"], 0, settings), names)
    result = {
        "command": without_folders(shlex.join(["python", "scripts/throughput.py", *sys.argv[1:]])),
        "environment": place,
        "notes": notes,
        "settings": {key: value for key, value in settings.items() if key not in ("output", "cell_seconds")},
        **evaluate(settings, measured),
    }
    path = Path(args.output) / "throughput.json"
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{place['hardware']}, {settings['precision']}, {settings['tokens']} tokens a step, {settings['clock']} time")
    for name, found in result["models"].items():
        if found["status"] != "ok":
            print(f"{name:<28}{found['status']}{': ' + found['reason'] if 'reason' in found else ''}")
            continue
        speed = found["tokens_per_second"]
        mfu = f"  MFU {found['mfu']:.1%}" if "mfu" in found else ""
        print(f"{name:<28}{speed['median']:>12,.0f} tokens/s ({speed['min']:,.0f} to {speed['max']:,.0f}){mfu}")
    for name, ratio in result["ratios"].items():
        print(f"{name:<48}{ratio['median']:.2f} × ({ratio['min']:.2f} to {ratio['max']:.2f})")
    print(f"→ {path}")


if __name__ == "__main__":
    main()
