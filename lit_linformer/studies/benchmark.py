"""Table 3 and figure 2 of the paper, measured here: `python run.py benchmark`.

Time and peak memory of layers against n and k: the Linformer's (`linformer`), the Transformer's with softmax written out as
in the paper (`written-out`), and on fused attention (`fused`: what torch picks on a CPU, every kernel it has on a GPU). All
have the same shape and weights, take hidden states of --tokens tokens, and have no dropout. Each round times every model once,
in an order that moves on; a ratio is the median of the rounds' ratios. A model that runs out of memory or over the time limit
is shown as such. Memory is the peak of a pass above weights and input, in a process of its own on a CPU. The largest batch
that fits, on a GPU, is what the paper's "memory saved" compares. Weights and activations are cast to --precision, without
autocast; float32 is without TF32. Beside the ratios of time stand the paper's, and those of the operation counts: what the
Linformer would gain if every operation took the same time. Softmax counts nothing there, so against written-out attention more
can be gained. A backward pass is taken for twice its forward pass.

The folder gets benchmark.json (rewritten after every cell: the same command goes on where it stopped), benchmark.md,
figure2.png, table3.png, and the same for TensorBoard.

    python run.py benchmark --lengths 512 1024 2048 --projection_dims 128 256
    python run.py benchmark --device cuda --precision bf16 --backward both
"""

import importlib.util
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from lit_linformer.studies.gridfile import read_json
from lit_linformer.studies.settings import check_choice, check_number, device, help_shown, meant
from lit_linformer.utils.environment import commit, cores, versions
from lit_linformer.utils.files import json_text, write_text

# kind: what a value is; a kind that ends in … takes several, apart or with commas between them.
SETTINGS = {
    "lengths": ("N …", None, "n, tokens a sequence (default 512 1024 2048 4096; on a GPU on to 65536)"),
    "projection_dims": ("K …", None, "k, slots (default 128 256; on a GPU 128 256 512 1024 2048); k > n is left out"),
    "models": ("MODEL …", "written-out fused linformer", "written-out, fused, linformer (default: all three), class paths"),
    "tokens": ("N", None, "tokens a batch: it shrinks as n grows, to 1 (default 8192; on a GPU 65536)"),
    "hidden_size": ("N", "768", "D, width (default 768)"),
    "num_heads": ("N", "12", "heads a layer (default 12)"),
    "num_layers": ("N", None, "layers (default 2; on a GPU 12, the paper's)"),
    "intermediate_size": ("N", None, "width inside the feed-forward (default 4 D)"),
    "sharing": ("none|headwise|key-value|layerwise", "layerwise", "which E and F are one (default layerwise, as Table 3)"),
    "projection": ("NAME", "linear", "of the Linformer, as model.encoder.projection (default linear)"),
    "order": ("compress_first|project_first", "compress_first", "W_K (E x) or E (W_K x) (default compress_first)"),
    "local_width": ("N", "0", "odd width of the local convolution, in all models but the peer (default 0: none)"),
    "peer": ("true|false", "false", "the package `linformer` too, shaped alike, pre-norm and headwise (default false)"),
    "backward": ("true|false|both", "false", "with (true) or without (false, default, as the paper) backward, or both"),
    "precision": ("float32|bf16|fp16", "float32", "what weights and activations are cast to (default float32)"),
    "compile": ("true|false", "false", "torch.compile; not for the largest batch (default false)"),
    "device": ("NAME", "auto", "auto (default: cuda if there is one), cpu, cuda, cuda:1 …"),
    "threads": ("N", None, "of a CPU (default: torch's)"),
    "rounds": ("N", "7", "timed passes of each model (default 7)"),
    "warmup": ("N", None, "passes before these (default 1; on a GPU 3)"),
    "memory": ("true|false", "true", "measure peak memory (default true)"),
    "largest_batch": ("true|false", None, "find the largest batch that fits (GPU only; default true there)"),
    "batch_memory": ("GIB", "16", "memory that the largest batch may take, GiB (default 16, the paper's V100)"),
    "max_batch": ("N", "65536", "sequences that the largest batch may have (default 65536)"),
    "cell_seconds": ("SECONDS", "600", "time limit of one model in one cell, seconds (default 600)"),
    "output": ("FOLDER", "runs/benchmark", "where results go (default runs/benchmark)"),
    "overwrite": ("true|false", "false", "true: start anew (default false: finished cells are not measured again)"),
}
DEFAULTS = {  # where it depends on the device: (CPU, GPU)
    "lengths": ([512, 1024, 2048, 4096], [512 << i for i in range(8)]),
    "projection_dims": ([128, 256], [128 << i for i in range(5)]),
    "tokens": (8192, 65536),
    "num_layers": (2, 12),
    "warmup": (1, 3),
    "largest_batch": (False, True),
}
CHOOSE_CELLS = ("lengths", "backward", "memory", "largest_batch", "output", "overwrite")  # change no measurement
# What may differ between two starts of one command: it is told in the file, and no reason to throw hours away.
NOT_COMPARED = ("commit", "cpu", "fused", "cores", "lightning", "lit-linformer")
MODELS = ("written-out", "fused", "linformer")
KINDS = {"memory": "peak memory", "time": "time", "largest_batch": "largest batch"}


def main(argv: list[str]) -> None:
    """Measures what is not measured yet, writes the folder's files, prints the tables; ValueError for a bad setting."""
    if help_shown(argv, "benchmark [--SETTING VALUE …]", SETTINGS, 48, __doc__):
        return
    settings = read_settings(argv)
    from lit_linformer.studies import benchmark_report as report

    folder = Path(settings["output"])
    data = {
        "command": shlex.join(["python", "run.py", "benchmark", *argv]),
        "settings": settings,
        "environment": environment(settings),
        "notes": notes(settings),
        "cells": {},
    }
    data["cells"] = finished_cells(folder / "benchmark.json", data)
    folder.mkdir(parents=True, exist_ok=True)
    print(report.headline(data), flush=True)
    for note in data["notes"]:
        print(f"note: {note}", flush=True)
    try:
        failed = measure_cells(folder, data)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
        raise
    print("\n" + report.write(folder, data), end="", flush=True)
    if failed:
        raise ValueError(
            f"{len(failed)} measurements failed: {'; '.join(failed[:3])}{'; …' if len(failed) > 3 else ''}; "
            "allowed: the same command again tries them again"
        )


def measure_cells(folder: Path, data: dict[str, Any]) -> list[str]:
    """Measures the cells that data lacks, and writes benchmark.json after each; returns what failed, and why."""
    from lit_linformer.studies.benchmark_report import progress, with_ratios
    from lit_linformer.studies.measure import Job, measure

    settings, done, failed = data["settings"], data["cells"], []
    cells = plan(settings)
    for number, (kind, direction, n) in enumerate(cells, 1):
        label, key = f"[{number}/{len(cells)}] {KINDS[kind]}, {direction}, n = {n}", f"{kind}/{direction}/{n}"
        if key in done:
            print(f"{label}: finished before", flush=True)
            continue
        began = time.monotonic()
        job = Job(kind, direction != "forward", n, max(1, settings["tokens"] // n), settings)
        names = model_names(settings, n, data["environment"]["fused"])
        # A model whose single pass does not fit, or takes too long, needs no timing.
        known = done.get(f"memory/{direction}/{n}", {"models": {}})["models"] if kind == "time" else {}
        hopeless = {name: entry for name, entry in known.items() if entry["status"] in ("OOM", "over limit")}
        measured = measure(job, [name for name in names if name not in hopeless]) | hopeless
        cell = {"kind": kind, "direction": direction, "n": n, "batch": job.batch}
        done[key] = with_ratios({**cell, "models": {name: measured[name] for name in names}}, settings)
        write_json(folder / "benchmark.json", data)
        print(f"{label}, {progress(done[key])} ({time.monotonic() - began:.0f} s)", flush=True)
        failed += [f"{key} {name}: {entry['reason']}" for name, entry in measured.items() if entry["status"] == "failed"]
    write_json(folder / "benchmark.json", data)
    return failed


def read_settings(argv: list[str]) -> dict[str, Any]:
    """Every setting with its value, checked as far as can be before anything is measured."""
    given: dict[str, list[str]] = {}
    key = None
    for word in argv:
        if word[:2] == "--":
            name, equals, value = word.partition("=")
            key = name[2:]
            if key not in SETTINGS:
                allowed = [f"--{known}" for known in SETTINGS]
                raise ValueError(f"unknown setting {name!r} of benchmark{meant(name, allowed)}; allowed: {', '.join(allowed)}")
            given[key] = [value] if equals else []
        elif key is None:
            raise ValueError(f"the first word is {word!r}; allowed: a setting, as --lengths 512 1024")
        else:
            given[key].append(word)
    settings = {name: _value(name, given[name]) if name in given else None for name in SETTINGS}
    settings |= {name: _value(name, [text]) for name, (_, text, _) in SETTINGS.items() if text and settings[name] is None}
    settings["device"] = device(settings["device"])
    on_gpu = settings["device"] != "cpu"
    settings |= {name: pair[on_gpu] for name, pair in DEFAULTS.items() if settings[name] is None}
    settings["lengths"], settings["projection_dims"] = (sorted(set(settings[key])) for key in ("lengths", "projection_dims"))
    settings["intermediate_size"] = settings["intermediate_size"] or 4 * settings["hidden_size"]
    if settings["threads"] is None:
        import torch

        settings["threads"] = torch.get_num_threads()
    _check(settings, on_gpu)
    return settings


def _value(name: str, words: list[str]) -> Any:
    kind = SETTINGS[name][0]
    if kind.endswith(" …"):
        words = [word for text in words for word in text.replace(",", " ").split()]
    if not words:
        raise ValueError(f"--{name} has no value; allowed: {kind}")
    if kind.endswith(" …"):
        return [_one(name, kind.removesuffix(" …"), word) for word in words]
    if len(words) > 1:
        raise ValueError(f"{name} is {' '.join(words)!r}; allowed: one value")
    return _one(name, kind, words[0])


def _one(name: str, kind: str, word: str) -> Any:
    if "|" in kind:
        chosen = check_choice(name, word, kind.split("|"))
        return {"true": True, "false": False}.get(chosen, chosen)
    if kind == "MODEL":
        return word if "." in word else check_choice(name, word, MODELS)
    if kind in ("N", "K"):
        return int(check_number(name, word, whole=True, least=0 if name == "local_width" else 1))
    if kind in ("SECONDS", "GIB"):
        if (value := check_number(name, word)) <= 0:
            raise ValueError(f"{name} is {word!r}; allowed: a number above 0")
        return value
    return word


def _check(settings: dict[str, Any], on_gpu: bool) -> None:
    lengths, dims = settings["lengths"], settings["projection_dims"]
    if "linformer" in settings["models"] or settings["peer"]:
        for k in dims:
            if k > lengths[-1]:
                raise ValueError(f"projection_dims is {k}; allowed: at most the longest of lengths, {lengths[-1]}")
    if settings["largest_batch"] and not on_gpu:
        raise ValueError("largest_batch is true; allowed: false on a CPU, whose memory other programs use too")
    if settings["peer"]:
        if importlib.util.find_spec("linformer") is None:
            raise ValueError("peer is true, but its package is not installed; allowed: false, or `pip install linformer` first")
        if settings["intermediate_size"] != 4 * settings["hidden_size"]:
            wide = 4 * settings["hidden_size"]
            raise ValueError(f"intermediate_size is {settings['intermediate_size']}; allowed with peer: 4 hidden_size = {wide}")
    from lit_linformer.studies.benchmark_models import encoder_config, has_slots

    # These raise for what does not fit together.
    encoder_config(settings, lengths[-1], dims[0] if dims[0] <= lengths[-1] else None)
    for path in own_models(settings):
        encoder_config(settings, lengths[-1], dims[0] if has_slots(path) else None, path)


def notes(settings: dict[str, Any]) -> list[str]:
    """What a reader of the tables would wonder at."""
    found = []
    for n in settings["lengths"]:
        if large := [str(k) for k in settings["projection_dims"] if k > n]:
            found.append(f"n = {n} has no k = {', '.join(large)}, which is more than n: blank, as in the paper")
    if long := [str(n) for n in settings["lengths"] if n > settings["tokens"]]:
        found.append(f"n = {', '.join(long)} is more than tokens = {settings['tokens']}: a batch of one sequence there")
    if settings["compile"] and settings["largest_batch"]:
        found.append("the largest batch is found without compile: each batch would compile anew")
    return found


def plan(settings: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(kind, direction, n) of each cell, short ones first. Memory before time, which skips what memory found hopeless."""
    directions = {False: ["forward"], True: ["forward+backward"], "both": ["forward", "forward+backward"]}
    kinds = [kind for kind in KINDS if kind == "time" or settings[kind]]
    return [(k, direction, n) for n in settings["lengths"] for direction in directions[settings["backward"]] for k in kinds]


def model_names(settings: dict[str, Any], n: int, fused: list[str]) -> list[str]:
    """The models at one n, Transformers first: a Linformer takes its weights from one."""
    dims = [k for k in settings["projection_dims"] if k <= n]
    from lit_linformer.studies.benchmark_models import has_slots

    members = {"written-out": ["written-out"], "fused": fused, "linformer": [f"linformer {k}" for k in dims]}
    members |= {path: [f"{path} {k}" for k in dims] if has_slots(path) else [path] for path in own_models(settings)}
    names = [name for kind, found in members.items() if kind in settings["models"] for name in found]
    return names + ([f"peer {k}" for k in dims] if settings["peer"] else [])


def own_models(settings: dict[str, Any]) -> list[str]:
    """Class paths of attention that is not this project's."""
    return [name for name in settings["models"] if name not in MODELS]


def environment(settings: dict[str, Any]) -> dict[str, Any]:
    """Where it was measured."""
    from lit_linformer.studies.measure import Job, measure

    job = Job("describe", settings["backward"] is not False, 1, 1, settings)
    found = {**versions(), "cores": cores(), **measure(job, [""])[""]}
    return {**found, "commit": head} if (head := commit()) else found


def finished_cells(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The cells of an earlier start; ValueError if they were measured otherwise."""
    if data["settings"]["overwrite"] or not file.exists():
        return {}
    before = read_json(file)
    if before is None or not {"settings", "environment", "cells"} <= before.keys():
        raise ValueError(f"output is {file.parent}, whose {file.name} is not whole; allowed: --overwrite true")
    defaults = {name: _value(name, [text]) for name, (_, text, _) in SETTINGS.items() if text}  # of what it did not know yet
    settings = defaults | before["settings"]
    old = {key: value for key, value in settings.items() if key not in CHOOSE_CELLS} | before["environment"]
    new = {key: value for key, value in data["settings"].items() if key not in CHOOSE_CELLS} | data["environment"]
    for key in new:
        if old.get(key) != new[key] and key not in NOT_COMPARED:
            raise ValueError(
                f"output is {file.parent}, which was measured with {key} {old.get(key)}, not {new[key]}; "
                "allowed: another --output, or --overwrite true"
            )
    cells = before["cells"].values()
    whole = [cell for cell in cells if all(entry["status"] != "failed" for entry in cell["models"].values())]
    return {f"{cell['kind']}/{cell['direction']}/{cell['n']}": cell for cell in whole}


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_text(path, json_text(data, indent=1) + "\n")
