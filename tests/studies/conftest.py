"""Helpers that several tests of the studies share."""

import json

import yaml

from lit_linformer.studies.benchmark.layers import read_settings
from lit_linformer.studies.report.sources import Run

SMALL = "--lengths 32 64 --projection_dims 8 64 --hidden_size 16 --num_heads 2 --num_layers 1 --tokens 128 --rounds 3".split()


def settings_of(*argv):
    """Settings of a benchmark that takes a moment."""
    return read_settings([*SMALL, *argv])


def tables(text):
    """{first cell: cells} of all lines of all tables."""
    lines = ([word.strip() for word in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|"))
    return {line[0]: line for line in lines}


def write_run(folder, points, attention="linformer", finished=True, log=None, seconds=(), threads=1, **settings):
    """A pretraining run as fit leaves it: points are (step, tokens, perplexity), seconds the training time at each."""
    folder.mkdir(parents=True)
    encoder = {"attention": attention, "max_length": settings.get("n", 512), "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    data = {"class_path": "lit_linformer.data.PretrainingData", "init_args": {"source": settings.get("source", "text.txt")}}
    config = {"trainer": {"max_steps": 100}, "model": {"init_args": {"encoder": encoder}}, "data": data}
    config["model"]["init_args"]["pretrained"] = settings.get("pretrained")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [f"{step},{tokens},{step / 10},{value},{value}\n" for step, tokens, value in points]
    head = "step,tokens,seconds,perplexity,best"
    if seconds:  # wall-clock time exceeds processor time, which was shared
        head += ",training_seconds,cpu_seconds"
        lines = [f"{line.strip()},{2 * spent + 7},{spent}\n" for line, spent in zip(lines, seconds, strict=True)]
    (folder / "perplexity.csv").write_text(f"{head}\n{''.join(lines)}")
    if finished:
        result = {"step": points[-1][0], "tokens": points[-1][1], "seconds": points[-1][0] / 10, "metrics": {}}
        result["environment"] = {"hardware": "An Abacus", "threads": threads}
        (folder / "result.json").write_text(json.dumps(result))
    return Run(folder, folder.name)
