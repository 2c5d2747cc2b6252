"""The overhead of DistributedDataParallel: P processes that train together, against P that train alone at the same time.

Both do the same work on the same cores or GPUs, and share the machine in the same way: the difference is exchanging
gradients and waiting for the slowest. Runs of `fit` take turns; each reports its tokens/s after the first steps. Writes
ddp.json.

    OMP_NUM_THREADS=1 python run.py benchmark --what parallel --config conf/quickstart.yaml --processes 2
    python run.py benchmark --what parallel --config conf/pretrain/small.yaml --processes 8 --arguments "--data.source texts/"
"""

import os
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lit_linformer.runs.record import RunRecord
from lit_linformer.studies.benchmark.subject import DEVICE, WHAT, begin, output, spread, write
from lit_linformer.utils.arguments import Setting, whole, word
from lit_linformer.utils.environment import ROOT, cores, run_command
from lit_linformer.utils.errors import UserError

SETTINGS = {
    "what": WHAT,
    "config": Setting(word("FILE"), "what is trained", "conf/quickstart.yaml"),
    "processes": Setting(whole("N", 2), "P; on GPUs, one for each", 2),
    "device": DEVICE,
    "steps": Setting(whole("N", 2), "steps of each run, a quarter of them for warm-up", 60),
    "rounds": Setting(whole("N", 1), "rounds", 5),
    "arguments": Setting(word('"--SETTING VALUE …"'), "settings for all runs", ""),
    "output": output("runs/benchmark-ddp"),
}


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = begin("parallel", __doc__, SETTINGS, argv, "ddp")
    count, on_gpu = settings["processes"], settings["device"] != "cpu"
    together, alone = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(settings["rounds"]):
            devices = [f"[{index}]" if on_gpu else "1" for index in range(count)]
            alone.append(fit([f"alone-{index}" for index in range(count)], devices, Path(scratch), settings))
            ddp = ["--config", str(ROOT / "conf/trainer/ddp.yaml")]
            together.append(fit(["together"], [str(count)], Path(scratch), settings, *ddp))
            print(f"round {number + 1}: alone {alone[-1]:,.0f}, together {together[-1]:,.0f} tokens/s", flush=True)
    shares = [a / b for a, b in zip(together, alone, strict=True)]
    shown = f"({min(shares):.3f} to {max(shares):.3f})"
    print(f"{count} processes together: {statistics.median(shares):.3f} of the tokens/s of {count} alone {shown}")
    content = {"alone_tokens_per_second": alone, "together_tokens_per_second": together, "share": spread(shares)}
    write(settings["output"], "ddp", argv, settings["device"], content)


def fit(names: list[str], devices: list[str], folder: Path, settings: dict[str, Any], *extra: str) -> float:
    """Total tokens/s of runs that train at the same time: one for each name, on its devices."""
    log_every = max(1, settings["steps"] // 4)  # the first of these windows is not counted
    command = [*run_command(), "fit", "--config", settings["config"], *extra, "--trainer.max_steps", str(settings["steps"])]
    command += ["--trainer.accelerator", "cpu" if settings["device"] == "cpu" else "gpu"]
    command += ["--trainer.log_every_n_steps", str(log_every), "--trainer.limit_val_batches", "0"]
    command += shlex.split(settings["arguments"])
    here = {"OMP_NUM_THREADS": str(max(1, cores() // settings["processes"])), **os.environ}  # as Lightning shares them in DDP
    started = []
    for name, of in zip(names, devices, strict=True):
        words = [*command, "--name", name, "--overwrite", "true", "--trainer.devices", of]
        words += ["--trainer.default_root_dir", str(folder / name)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=here))
    try:
        for process in started:
            shown, _ = process.communicate()
            if process.returncode:
                raise UserError(f"a run ended with exit status {process.returncode}: {(shown.splitlines() or [''])[-1]}")
    finally:
        for process in started:  # if one has failed the others would train on
            process.kill()
    return sum(RunRecord(folder / name).result["throughput"]["tokens_per_second"] for name in names)
