"""All measurements on a GPU, the most important first, in as many calls of ten minutes as it takes, and one page of results.

    python scripts/gpu_suite.py --source texts/ --tokenizer tokenizer.json --output runs/gpu-suite --minutes 9.5

The same command again continues: finished parts are skipped, and a part that ran out of time is started again (benchmark and
training resume where they stopped). A part that fails, or that makes no progress in its time, does not stop the others; the
next call tries it once more. No network is needed: text and tokenizer are given as files (`python run.py prepare` makes a
tokenizer.json).

    OUTPUT/page/                     report.md, suite.json, pictures: as docs/results/ holds; written after each part
    OUTPUT/page/weights/             the pretrained model in bfloat16, in pieces of --piece_mb: cat them to model.safetensors
    OUTPUT/PART/, OUTPUT/PART.log    what each part has written

With --device cpu, or --tiny, it is a rehearsal: everything is so small that the numbers mean nothing.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # it works without installing the project, as run.py does

from gpu_page import write_page  # noqa: E402

from lit_linformer.utils.arguments import check_device  # noqa: E402
from lit_linformer.utils.environment import environment, without_folders  # noqa: E402
from lit_linformer.utils.files import last_line, read_json, value_at  # noqa: E402

RUN = str(ROOT / "run.py")
STARTED = time.monotonic()
# Seconds that a part may take, and where its numbers are. Compiling a base model takes up to a minute; the tests compile ten.
PARTS = {
    "speed": (240, "training.json"),
    "tests": (300, ""),
    "mechanisms": (300, "training.json"),  # lookup compiles for more than 100 of them
    "prepare": (300, ""),
    "half": (90, "result.json"),
    "nccl": (150, "ddp.json"),
    "table3": (300, "benchmark.json"),
    "window": (120, "benchmark.json"),
    "roberta": (200, "training.json"),
    "pretrain": (0, "result.json"),  # what is left
}
COMPILING = 60  # seconds without training
CLOSING = 90  # seconds of a call that are not training: start, first and last validation, export, page


def commands(args: argparse.Namespace, seconds: float) -> dict[str, list[str]]:
    """The command of each part but the last, run in the output folder; ``seconds``: its time limit."""
    python, device = sys.executable, ["--device", args.device]
    together = str(processes(args))
    few = "--hidden_size 32 --num_heads 2 --num_layers 1 --vocab_size 500 --tokens 8192 --rounds 1"
    fast = (few if args.tiny else "--precision bf16 --compile true --rounds 5 --steps 8").split()
    fast += ["--cell_seconds", f"{seconds:.0f}"]
    speed = [python, RUN, "benchmark", "--what", "training", *device, *fast]
    layers = [python, RUN, "benchmark", *device, "--cell_seconds", "25" if not args.tiny else "600"]
    sizes = "--precision bf16 --backward both --lengths 512 1024 2048 4096 8192 16384 32768 65536 --projection_dims 128 256 "
    sizes += "--tokens 65536 --models fused linformer --largest_batch false --rounds 5"
    wide = "--precision bf16 --backward both --lengths 4096 16384 65536 --projection_dims 256 --tokens 65536 "
    wide += "--largest_batch false --memory false --rounds 5"
    small = "--hidden_size 32 --num_heads 2 --num_layers 1 --tokens 1024 --rounds 1 --projection_dims 16"
    table, window = ((f"{small} --lengths 64 128", f"{small} --lengths 128")) if args.tiny else (sizes, wide)
    short = [*training(args, "half"), "--trainer.max_steps", "4" if args.tiny else "60", "--model.warmup_steps", "2"]
    return {
        # In one process, also if pytest-xdist is not installed.
        "tests": [python, *"-m pytest -o addopts= -p no:cacheprovider -m gpu -rs".split(), str(ROOT / "tests/gpu")],
        "speed": [*speed, "--models", "linformer", "transformer", "--scaling", "8192", "--output", "speed"],
        "mechanisms": [*speed, "--models", "lookup", "linformer", "transformer", "--output", "mechanisms"],
        "prepare": [python, RUN, "prepare", "--config", args.config, *data(args)],
        "half": [*short, "--trainer.precision", "bf16-mixed" if args.device == "cpu" else "16-mixed"],
        "nccl": [
            python, RUN, "benchmark", "--what", "parallel", *device, "--config", args.config, "--processes", together,
            "--steps", "4" if args.tiny else "60", "--rounds", "1" if args.tiny else "3", "--output", "nccl",
            "--arguments", shlex.join(data(args)),
        ],
        "table3": [*layers, *table.split(), "--output", "table3"],
        "window": [
            *layers, *window.split(), "--output", "window",
            "--models", "fused", "linformer", "examples.sliding_window.SlidingWindow",
        ],
        "roberta": [
            *speed, "--models", "linformer-lightning", "roberta-trainer", *(["--tokens", "512"] if args.tiny else []),
            "--output", "roberta",
        ],
    }  # fmt: skip


def processes(args: argparse.Namespace) -> int:
    """The number of GPUs here; in a rehearsal two processes."""
    import torch

    return 2 if args.device == "cpu" else torch.cuda.device_count()


def data(args: argparse.Namespace) -> list[str]:
    """Settings of every training run: the text, a batch for one device, and in a rehearsal a small model."""
    words = ["--data.source", args.source, "--data.tokenizer", args.tokenizer, "--data.cache_dir", args.cache]
    words += "--data.validation_fraction 0.01 --data.test_fraction 0 --data.global_batch_size null".split()
    small = "--model.encoder.hidden_size 32 --model.encoder.num_heads 2 --model.encoder.num_layers 1 --data.batch_size 4 "
    small += "--model.encoder.intermediate_size 64 --model.encoder.max_length 128 --data.validation_fraction 0.1 "
    small += "--data.num_workers 0"
    return [*words, *(small if args.tiny else f"--data.batch_size {args.batch_size} --data.num_workers 4").split()]


def training(args: argparse.Namespace, name: str) -> list[str]:
    words = [sys.executable, RUN, "fit", "--config", args.config, "--name", name, "--trainer.default_root_dir", name]
    words += [*data(args), "--ckpt_path", "auto"]
    words += ["--trainer.accelerator", "cpu" if args.device == "cpu" else "gpu", "--trainer.devices", "1"]
    every = "2 --trainer.log_every_n_steps 1 --last.every_n_steps 2" if args.tiny else "500 --trainer.log_every_n_steps 20"
    return [*words, *f"--trainer.limit_val_batches 20 --trainer.val_check_interval {every}".split()]


def pretraining(args: argparse.Namespace, done: dict[str, Any], seconds: float) -> list[str]:
    """The command that pretrains for as many steps as the measured speed allows; their number is fixed at the first start."""
    words, at = training(args, "pretrain"), max(10, int(seconds - CLOSING))
    until = int(trained(Path(args.output) / "pretrain/checkpoints/last.ckpt")) + at  # max_time counts earlier calls, too
    words += "--model.optimizer muon --model.schedule wsd --data.mask_rate 0.3".split()  # conf/pretrain/small.yaml's training
    words += [
        "--trainer.max_time",
        f"00:{until // 3600:02d}:{until // 60 % 60:02d}:{until % 60:02d}",
        *(["--model.compile", "true"] if not args.tiny else []),
    ]
    # Shares of a measured speed: the trained model has lookup, whose encoder has 0.65 of block means' tokens/s on an H200.
    measured = [("mechanisms", "lookup 512", 0.85), ("speed", "linformer 512", 0.55)]
    keys = [(part, ("results", "models", model, "tokens_per_second", "median"), share) for part, model, share in measured]
    speed = next((share * value for part, key, share in keys if (value := value_at(done.get(part, {}), key))), None)
    steps = done.get("pretrain", {}).get("steps")
    if steps is None and speed and not args.tiny:
        steps = int(speed * max(10, (60 * args.pretrain_minutes or at) - COMPILING) / (512 * args.batch_size))
    steps = 6 if args.tiny else steps
    if steps:
        done.setdefault("pretrain", {})["steps"] = steps
        words += ["--trainer.max_steps", str(steps), "--model.warmup_steps", str(max(1, steps // 20))]
    else:
        words += "--model.schedule constant --model.warmup_steps 300".split()
    return [*words, *shlex.split(args.pretrain_arguments)]


def trained(checkpoint: Path) -> float:
    """Seconds of training that led to a checkpoint, by Lightning's Timer; 0 if there is no checkpoint."""
    import torch

    if not checkpoint.exists():
        return 0.0
    callbacks = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["callbacks"]
    return callbacks.get("Timer", {}).get("time_elapsed", {}).get("train", 0.0)


def run(command: list[str], log: Path, limit: float) -> tuple[str, float]:
    """(ok | failed | time limit, seconds); after ``limit`` seconds the part and all processes that it started are ended."""
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
                process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, round(time.monotonic() - began, 1)


def results(part: str, folder: Path) -> Any:
    """The results that a part has written so far."""
    if part == "tests":
        log = (folder / "tests.log").read_text(errors="replace")
        told = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s.*?)(?: =+)?$", log, re.MULTILINE)
        return told[-1] if told else None
    return read_json(folder / part / PARTS[part][1])


def keep_weights(args: argparse.Namespace, folder: Path, seconds: float) -> None:
    """Keeps the pretrained model in bfloat16, cut into pieces; nothing if exporting it fails or takes longer."""
    target, limit = folder / "page/weights", int(args.piece_mb * 2**20)
    words = ["export", "--ckpt_path", "pretrain", "--format", "safetensors", "--dtype", "bfloat16", "--output", "export"]
    if run([sys.executable, RUN, *words, "--overwrite", "true"], folder / "export.log", seconds)[0] != "ok":
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "export", target)
    whole = target / "model.safetensors"
    if whole.stat().st_size > limit:
        with open(whole, "rb") as file:
            for number in range(-(-whole.stat().st_size // limit)):
                whole.with_name(f"{whole.name}.{number:02d}").write_bytes(file.read(limit))
        whole.unlink()


def measure(args: argparse.Namespace, content: dict[str, Any], folder: Path) -> None:
    """Runs the remaining parts, as long as there is time."""
    deadline, parts = STARTED + 60 * args.minutes - 15, content["parts"]
    for name in (name for name in PARTS if name in args.only):
        before, left = parts.get(name, {}), deadline - time.monotonic()
        finished = name != "pretrain" and before.get("status") in ("ok", "left out")
        least = args.least if name != "pretrain" or args.tiny else max(args.least, 2 * CLOSING)
        if finished or before.get("failures", 0) > 1 or left < least:
            print(f"{name}: {'no time left' if not finished and left < least else before['status']}", flush=True)
            continue
        if name == "nccl" and processes(args) < 2:
            parts[name] = {"status": "left out", "seconds": 0, "command": "one GPU"}
            continue
        limit = min(PARTS[name][0] or left, left) if not args.tiny else left
        command = pretraining(args, parts, limit) if name == "pretrain" else commands(args, limit)[name]
        print(f"{name}, at most {limit:.0f} s", flush=True)
        status, seconds = run(command, folder / f"{name}.log", limit)
        told = without_folders(shlex.join(["python", *command[1:]]))
        parts[name] = {**parts.get(name, {}), "status": status, "command": told, "results": results(name, folder)}
        parts[name]["hardware"] = content["environment"]["hardware"]  # calls may land on different cards
        parts[name]["seconds"] = round(before.get("seconds", 0) + seconds, 1)
        nothing_new = name != "pretrain" and parts[name]["results"] == before.get("results")
        parts[name]["failures"] = before.get("failures", 0) + (status == "failed" or (status == "time limit" and nothing_new))
        if status != "ok":
            lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:]
            parts[name]["log"] = [without_folders(line) for line in lines]
        if name == "pretrain" and (folder / name / "checkpoints/last.ckpt").exists():
            write_page(content, folder)  # keeps its results so far, should the call end here
            keep_weights(args, folder, max(10.0, deadline - time.monotonic()) if not args.tiny else 300.0)
        write_page(content, folder)
        print(f"    {status} after {seconds:.0f} s: {last_line(folder / f'{name}.log')[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="text to train on: a file, a folder or a glob, as data.source")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder with a tokenizer's files")
    parser.add_argument("--output", default="runs/gpu-suite", help="where everything is written (default runs/gpu-suite)")
    parser.add_argument("--minutes", type=float, default=9.5, help="length of this call (default 9.5)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu for a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in which everything is small")
    parser.add_argument("--config", default=str(ROOT / "conf/pretrain/linformer_base.yaml"), help="config of what is trained")
    parser.add_argument("--cache", default="cache", help="token files, as data.cache_dir (default: in OUTPUT)")
    parser.add_argument("--batch_size", type=int, default=128, help="rows per step in training (default 128)")
    parser.add_argument("--pretrain_minutes", type=float, default=0, help="of pretraining in all (default: the rest of a call)")
    parser.add_argument("--pretrain_arguments", default="", help='more settings of the pretraining: "--SETTING VALUE …"')
    parser.add_argument("--piece_mb", type=float, default=15, help="MiB of each file into which weights are cut (default 15)")
    parser.add_argument("--least", type=float, default=40, help="no part begins with fewer seconds left (default 40)")
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
    args.tiny = args.tiny or args.device == "cpu"
    args.config = str(Path(args.config).resolve())
    folder = Path(args.output).resolve()
    args.cache = args.cache if args.cache == "cache" else str(Path(args.cache).resolve())
    (folder / "page").mkdir(parents=True, exist_ok=True)
    content = {
        "command": without_folders(shlex.join(["python", "scripts/gpu_suite.py", *sys.argv[1:]])),
        "environment": environment(args.device),
        "parts": (read_json(folder / "page/suite.json") or {}).get("parts", {}),
    }
    measure(args, content, folder)
    print("\n" + "\n".join(write_page(content, folder)) + f"\n→ {args.output}/page/report.md", flush=True)
    if any(part["status"] == "failed" for part in content["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
