"""What DistributedDataParallel costs: P processes that train together against P that train alone, at the same time.

    OMP_NUM_THREADS=1 python scripts/bench_ddp.py --config conf/quickstart.yaml --processes 2 --steps 60 --rounds 5
    python scripts/bench_ddp.py --config conf/pretrain/small.yaml --processes 8 --accelerator gpu -- --data.source texts/

Both do the same work on the same cores or GPUs, and share the machine in the same way: what differs are the exchange of
gradients and waiting for the slowest. Runs of `run.py fit` take turns; each tells its tokens/s after the first steps. What
follows `--` are settings of both. Leaves ddp.json in --output.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # it works without installing the project, as run.py does

from lit_linformer.utils.environment import environment, without_folders  # noqa: E402
from lit_linformer.utils.files import write_text  # noqa: E402


def fit(names: list[str], devices: list[str], folder: Path, args: argparse.Namespace, *extra: str) -> float:
    """Tokens/s of runs at the same time, added up."""
    log_every = max(1, args.steps // 4)  # the first of these windows is not counted
    command = [sys.executable, str(ROOT / "run.py"), "fit", "--config", args.config, *extra]
    command += ["--trainer.accelerator", args.accelerator, "--trainer.max_steps", str(args.steps)]
    command += ["--trainer.log_every_n_steps", str(log_every), "--trainer.limit_val_batches", "0"]
    command += args.settings
    started = []
    for name, of in zip(names, devices, strict=True):
        words = [*command, "--name", name, "--overwrite", "true", "--trainer.devices", of]
        words += ["--trainer.default_root_dir", str(folder / name)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for process in started:
            shown, _ = process.communicate()
            if process.returncode:
                lines = "\n".join(shown.splitlines()[-5:])
                sys.exit(f"error: a run ended with exit status {process.returncode}:\n{lines}")
    finally:
        for process in started:  # where one has failed the others would train on
            process.kill()
    results = [json.loads((folder / name / "result.json").read_text(encoding="utf-8")) for name in names]
    return sum(result["throughput"]["tokens_per_second"] for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="conf/quickstart.yaml", help="what is trained (default conf/quickstart.yaml)")
    parser.add_argument("--processes", type=int, default=2, help="P (default 2); as many GPUs, with --accelerator gpu")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="cpu (default) or gpu")
    parser.add_argument("--steps", type=int, default=60, help="of each run; a quarter warms up (default 60)")
    parser.add_argument("--rounds", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--output", default="runs/bench-ddp", help="folder of ddp.json (default runs/bench-ddp)")
    parser.add_argument("settings", nargs="*", metavar="-- --SETTING VALUE", help="settings of all runs")
    args = parser.parse_args()
    count, on_gpu = args.processes, args.accelerator == "gpu"
    if count < 2:
        sys.exit(f"error: --processes is {count}; allowed: 2 or more")
    together, alone = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number in range(args.rounds):
            devices = [f"[{index}]" if on_gpu else "1" for index in range(count)]
            alone.append(fit([f"alone-{index}" for index in range(count)], devices, folder, args))
            ddp = ["--config", str(ROOT / "conf/trainer/ddp.yaml")]
            together.append(fit(["together"], [str(count)], folder, args, *ddp))
            print(f"round {number + 1}: alone {alone[-1]:,.0f}, together {together[-1]:,.0f} tokens/s", flush=True)
    shares = [a / b for a, b in zip(together, alone, strict=True)]
    content = {
        "command": without_folders(shlex.join(["python", "scripts/bench_ddp.py", *sys.argv[1:]])),
        "environment": environment("cuda:0" if on_gpu else "cpu"),
        "alone_tokens_per_second": alone,
        "together_tokens_per_second": together,
        "share": {"median": statistics.median(shares), "lowest": min(shares), "highest": max(shares)},
    }
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "ddp.json", json.dumps(content, indent=1) + "\n")
    spread = f"{min(shares):.3f} to {max(shares):.3f}"
    print(f"{count} processes together: {statistics.median(shares):.3f} of the tokens/s of {count} alone ({spread})")


if __name__ == "__main__":
    main()
