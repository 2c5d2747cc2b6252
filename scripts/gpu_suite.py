"""All that needs a GPU, in one command and ten minutes: tests, throughput, benchmark, a short training of both models.

    python scripts/gpu_suite.py --source texts/ --tokenizer tokenizer.json --output runs/gpu-suite

Needs nothing from the network: the text and the tokenizer are given as files (`python run.py prepare` makes a tokenizer.json).
Each step has a time limit, what one leaves unused goes to those after it, and a step that fails stops no other. Leaves
suite.json (rewritten after each step: status, seconds, command and results), the steps' own folders and logs, and plots where
matplotlib is installed. Without the package `transformers` the comparison with it is left out. With --device cpu everything is
tiny: it shows that the suite runs, its numbers mean nothing.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # it works without installing the project, as run.py does

from lit_linformer.utils.arguments import check_device  # noqa: E402
from lit_linformer.utils.environment import environment, without_folders  # noqa: E402
from lit_linformer.utils.files import write_text  # noqa: E402

RUN = str(ROOT / "run.py")
STEPS = ("tests", "throughput", "roberta", "benchmark", "linformer", "transformer", "report")
# Seconds of ten minutes. Compiling a base model may take one of them: three in throughput, two in roberta, none in training.
SHARES = {"tests": 80, "throughput": 190, "roberta": 120, "benchmark": 50, "linformer": 75, "transformer": 75, "report": 10}
# What is to be reached on a GPU of the H200's class: (step, how it is found in the results, at least, words).
GOALS = (
    ("throughput", ("models", "linformer 512", "mfu"), 0.5, "MFU of a training step, base model, n = 512"),
    (
        "roberta",
        ("ratios", "linformer-lightning 512 / roberta-trainer 512", "median"),
        1.5,
        "× RoBERTa's tokens/s, Trainer each",
    ),
    ("throughput", ("ratios", "linformer 8192 / linformer 512", "median"), 0.8, "tokens/s at n = 8192 over n = 512"),
)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """What each step runs in the output folder; {limit} stands for its time limit in seconds."""
    python, gpu = sys.executable, args.device != "cpu"
    fast = "--precision bf16 --compile true --rounds 5 --steps 8"
    fast = (fast if gpu else "--hidden_size 32 --num_layers 1 --vocab_size 500 --tokens 8192 --rounds 1").split()
    speed = [python, RUN, "benchmark", "--what", "training", "--device", args.device, *fast, "--cell_seconds", "{limit}"]
    tiny = "--hidden_size 32 --num_heads 2 --num_layers 1 --tokens 1024 --rounds 2".split()
    sizes = "--precision bf16 --backward both --lengths 512 2048 8192 32768 --projection_dims 128 256 --tokens 32768".split()
    sizes += "--memory false --largest_batch false --rounds 5 --cell_seconds 20".split()
    bench = sizes if gpu else [*tiny, "--lengths", "64", "128", "--projection_dims", "16", "--memory", "false"]
    return {
        # In one process, and where pytest-xdist is not installed.
        "tests": [python, *"-m pytest -o addopts= -p no:cacheprovider -m gpu -rs".split(), str(ROOT / "tests/gpu")],
        "throughput": [
            *speed, "--models", "linformer", "transformer", "--scaling", "8192",
            "--output", "throughput",
        ],
        "roberta": [
            *speed, "--models", "linformer-lightning", "roberta-trainer", *(["--tokens", "512"] if not gpu else []),
            "--output", "roberta",
        ],
        "benchmark": [
            python, RUN, "benchmark", "--device", args.device, *bench, "--output", "benchmark",
            "--overwrite", "true",
        ],
        **{kind: training(kind, args, gpu) for kind in ("linformer", "transformer")},
        "report": [
            python, RUN, "report", "--source", "linformer", "transformer", "benchmark", "--output", "report",
        ],
    }  # fmt: skip


def training(kind: str, args: argparse.Namespace, gpu: bool) -> list[str]:
    config = ROOT / f"conf/pretrain/{kind}_base.yaml"
    small = "--model.encoder.hidden_size 32 --model.encoder.num_heads 2 --model.encoder.num_layers 1 --data.batch_size 4 "
    small += "--model.encoder.intermediate_size 64 --model.encoder.max_length 128 --trainer.precision 32-true "
    small += "--trainer.max_steps 4 --trainer.val_check_interval 2 --trainer.log_every_n_steps 1 --trainer.accelerator cpu"
    large = "--data.batch_size 64 --trainer.max_steps 300 --trainer.val_check_interval 75 "
    large += "--trainer.log_every_n_steps 20 --trainer.accelerator gpu"
    return [
        sys.executable, RUN, "fit", "--config", str(config), "--name", f"suite-{kind}", "--overwrite", "true",
        "--trainer.default_root_dir", kind, "--data.source", args.source, "--data.tokenizer", args.tokenizer,
        "--data.cache_dir", "cache", "--data.validation_fraction", "0.05", "--data.test_fraction", "0",
        "--data.global_batch_size", "null", "--data.num_workers", "0", "--trainer.limit_val_batches", "20",
        "--model.warmup_steps", "40", "--trainer.max_time", "{training}", *(large if gpu else small).split(),
    ]  # fmt: skip


def filled(words: list[str], values: dict[str, str]) -> list[str]:
    return [re.sub(r"\{(\w+)\}", lambda found: values[found[1]], word) for word in words]


def run(command: list[str], log: Path, limit: float) -> tuple[str, float]:
    """(ok | failed | time limit, seconds); the step and all that it started are ended when its time is over."""
    began, paths = time.monotonic(), os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        try:
            status = "ok" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "time limit"
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, round(time.monotonic() - began, 1)


def results(step: str, folder: Path, log: Path) -> Any:
    """What a step has written, as far as it came."""
    if step == "tests":
        found = re.findall(
            r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s.*?)(?: =+)?$", log.read_text(), re.MULTILINE
        )
        return found[-1] if found else None
    names = {"throughput": "training.json", "roberta": "training.json", "benchmark": "benchmark.json"}
    path = folder / step / names.get(step, "result.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def summary(steps: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{name:<12}{step['status']:<12}{step['seconds']:>6.0f} s" for name, step in steps.items()]
    for name, keys, least, words in GOALS:
        value = steps.get(name, {}).get("results")
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        shown = "not measured" if value is None else f"{value:.2f}"
        lines.append(f"{shown:>12}  {words} (goal: {least})")
    for kind in ("linformer", "transformer"):
        if found := steps.get(kind, {}).get("results"):
            reached = {**found["metrics"], **found.get("throughput", {})}
            told = {"val/perplexity": "perplexity {:.1f}", "tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.2f}"}
            words = ", ".join(form.format(reached[key]) for key, form in told.items() if key in reached)
            lines.append(f"{'':>12}  {kind} after {found['tokens']:,} tokens: {words}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="text to train on: a file, a folder or a glob, as data.source")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder with a tokenizer's files")
    parser.add_argument("--output", default="runs/gpu-suite", help="folder of suite.json (default runs/gpu-suite)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (default 10)")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu, a rehearsal")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="steps to run (default: all)")
    args = parser.parse_args()
    try:
        args.device = check_device(args.device)
        for name in ("source", "tokenizer"):
            path = Path(getattr(args, name)).resolve()
            if not path.exists() and not any(character in path.name for character in "*?["):
                raise ValueError(f"{name} is {getattr(args, name)}; allowed: what exists")
            setattr(args, name, str(path))
    except ValueError as error:
        sys.exit(f"error: {error}")
    folder = Path(args.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    content = {
        "command": without_folders(shlex.join(["python", "scripts/gpu_suite.py", *sys.argv[1:]])),
        "environment": environment(args.device),
        "steps": {},
    }
    todo = [name for name in STEPS if name in args.only]
    for number, name in enumerate(todo):
        share = SHARES[name] / sum(SHARES[later] for later in todo[number:])
        limit = max(5.0, (deadline - time.monotonic()) * share)
        # Training stops by itself a while before, for its last validation and checkpoint.
        seconds = int(max(5, min(limit - 25, limit * 0.7)))
        known = {"limit": f"{limit:.0f}", "training": f"00:00:{seconds // 60:02d}:{seconds % 60:02d}"}
        command = filled(commands(args)[name], known)
        log = folder / f"{name}.log"
        print(f"[{number + 1}/{len(todo)}] {name}, at most {limit:.0f} s", flush=True)
        status, seconds = run(command, log, limit)
        told = without_folders(shlex.join(["python", *command[1:]]))
        content["steps"][name] = {"status": status, "seconds": seconds, "limit": round(limit, 1), "command": told}
        content["steps"][name]["results"] = results(name, folder, log)
        if status != "ok":
            content["steps"][name]["log"] = [
                without_folders(line) for line in log.read_text(errors="replace").splitlines()[-20:]
            ]
        write_text(folder / "suite.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(f"    {status} after {seconds:.0f} s", flush=True)
    print("\n" + "\n".join(summary(content["steps"])) + f"\n→ {folder.name}/suite.json", flush=True)
    if any(step["status"] != "ok" for step in content["steps"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
