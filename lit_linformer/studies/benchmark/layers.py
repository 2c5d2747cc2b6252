"""Table 3 and figure 2 of the paper, measured here: `python run.py benchmark`.

Time and peak memory of layers against n and k: the Linformer's (`linformer`), the Transformer's with unfused softmax as in the
paper (`written-out`), and with fused attention (`fused`: what torch picks on a CPU, every kernel it has on a GPU). All have the
same shape and weights, take hidden states of --tokens tokens, and have no dropout. Each round times every model once, in
rotating order; a ratio is the median of the rounds' ratios. Running out of memory or over the time limit is a result, too.
Memory is the peak of a pass above weights and input, on a CPU in its own process. The largest batch that fits, on a GPU, is
what the paper's "memory saved" compares. Weights and activations are cast to --precision, without autocast; float32 is without
TF32. Next to the ratios of time are the paper's, and those of the operation counts: what the Linformer would gain if every
operation took the same time. Softmax is not counted there, so the gain over written-out attention can be larger. A backward
pass counts as two forward passes.

Written to the folder: benchmark.json (rewritten after every cell: the same command continues where it stopped), benchmark.md,
figure2.png, table3.png, and the same for TensorBoard.

    python run.py benchmark --lengths 512 1024 2048 --projection_dims 128 256
    python run.py benchmark --device cuda --precision bf16 --backward both
"""

import importlib.util
from pathlib import Path
from typing import Any

from lit_linformer.studies.benchmark.subject import CELL_SECONDS, DEVICE, ROUNDS, THREADS, WHAT, fill, output
from lit_linformer.utils.arguments import FLAG, Kind, Setting, check_choice, choice, listed, number, parse, whole, word
from lit_linformer.utils.environment import command_line, commit, cores, versions
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.figures import figure_class
from lit_linformer.utils.files import check_own, write_text

MODELS = ("written-out", "fused", "linformer")
MODEL = Kind("MODEL", lambda where, name: _model(where, name))
WAYS = {"true": True, "false": False, "both": "both"}
PASSES = Kind("true|false|both", lambda where, word: WAYS[check_choice(where, word, list(WAYS))])
COUNT = whole("N", 1)
SETTINGS = {
    "what": WHAT,
    "lengths": Setting(listed(COUNT), "n, tokens in a sequence (default 512 1024 2048 4096; on a GPU up to 65536)"),
    "projection_dims": Setting(
        listed(whole("K", 1)), "k, slots (default 128 256; on a GPU 128 256 512 1024 2048); k > n is left out"
    ),
    "models": Setting(
        listed(MODEL), "some of these, other attentions, such as window or window:window=64, or a class path", list(MODELS)
    ),
    "tokens": Setting(COUNT, "tokens in a batch; the longer n, the fewer sequences (default 8192; on a GPU 65536)"),
    "hidden_size": Setting(COUNT, "D, width", 768),
    "num_heads": Setting(COUNT, "heads in a layer", 12),
    "num_layers": Setting(COUNT, "layers (default 2; on a GPU 12, the paper's)"),
    "intermediate_size": Setting(COUNT, "width of the feed-forward (default 4 D)"),
    "sharing": Setting(choice("none", "heads", "headwise", "key-value", "layerwise"), "which E and F are shared", "layerwise"),
    "projection": Setting(word("NAME"), "the Linformer's, as model.encoder.projection", "linear"),
    "order": Setting(choice("compress_first", "project_first"), "W_K (E x) or E (W_K x)", "compress_first"),
    "local_width": Setting(whole("N"), "odd width of the local convolution, in all models except the peer; 0: none", 0),
    "peer": Setting(FLAG, "measure the package `linformer`, too, of the same shape, pre-norm and headwise", False),
    "backward": Setting(PASSES, "with the backward pass or, as in the paper, without it", False),
    "precision": Setting(choice("float32", "bf16", "fp16"), "dtype of weights and activations", "float32"),
    "compile": Setting(FLAG, "torch.compile; not for the largest batch", False),
    "device": DEVICE,
    "threads": THREADS,
    "rounds": ROUNDS,
    "warmup": Setting(COUNT, "passes before these (default 1; on a GPU 3)"),
    "memory": Setting(FLAG, "measure peak memory", True),
    "largest_batch": Setting(FLAG, "find the largest batch that fits (GPU only; default true there)"),
    "batch_memory": Setting(number("GIB", above=0), "memory that this batch may take, GiB; the paper's V100 has 16", 16.0),
    "max_batch": Setting(COUNT, "sequences that this batch may have", 65536),
    "cell_seconds": CELL_SECONDS,
    "output": output("runs/benchmark"),
    "overwrite": Setting(FLAG, "start over; by default finished cells are not measured again", False),
}
DEFAULTS = {  # those that depend on the device: (CPU, GPU)
    "lengths": ([512, 1024, 2048, 4096], [512 << i for i in range(8)]),
    "projection_dims": ([128, 256], [128 << i for i in range(5)]),
    "tokens": (8192, 65536),
    "num_layers": (2, 12),
    "warmup": (1, 3),
    "largest_batch": (False, True),
}
FILES = ("benchmark.json", "benchmark.md", "figure2.png", "table3.png")


def main(argv: list[str]) -> None:
    """Measures what is missing, writes the folder's files and prints the tables; ValueError for a bad setting."""
    settings = read_settings(argv)
    from lit_linformer.studies.benchmark import tables
    from lit_linformer.studies.benchmark.cells import finished_cells, measure_cells
    from lit_linformer.studies.grid.run import until_stopped

    folder = Path(settings["output"])
    check_own(folder, FILES, "benchmark.json", "benchmark")
    data = {
        "command": command_line(["benchmark", *argv]),
        "settings": settings,
        "environment": environment(settings),
        "notes": notes(settings),
        "cells": {},
    }
    data["cells"] = finished_cells(folder / "benchmark.json", data)
    folder.mkdir(parents=True, exist_ok=True)
    print(tables.headline(data), flush=True)
    for note in data["notes"]:
        print(f"note: {note}", flush=True)
    failed = until_stopped(lambda: measure_cells(folder, data))
    print("\n" + write(folder, data), end="", flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} measurements failed: {'; '.join(failed[:3])}{'; …' if len(failed) > 3 else ''}",
            "the same command again tries them again",
        )


def read_settings(argv: list[str]) -> dict[str, Any]:
    """All settings with their values, checked as far as possible before anything is measured."""
    settings = fill(parse("benchmark", __doc__, SETTINGS, argv), DEFAULTS)
    del settings["what"]
    settings["lengths"], settings["projection_dims"] = (sorted(set(settings[key])) for key in ("lengths", "projection_dims"))
    settings["intermediate_size"] = settings["intermediate_size"] or 4 * settings["hidden_size"]
    _check(settings, settings["device"] != "cpu")
    return settings


def _model(where: str, word: str) -> str:
    """One of MODELS, or what `kind_settings` reads."""
    name = word.partition(":")[0]
    if word not in MODELS and "." not in name:
        from lit_linformer.model import ATTENTIONS
        from lit_linformer.studies.benchmark.models import kind_settings

        check_choice(where, name, [*MODELS, *(other for other in ATTENTIONS if other not in ("full", *MODELS))])
        kind_settings(word)
    return word


def _check(settings: dict[str, Any], on_gpu: bool) -> None:
    from lit_linformer.studies.benchmark.models import TRANSFORMERS, encoder_config, has_slots

    lengths, dims = settings["lengths"], settings["projection_dims"]
    if settings["peer"] or any(has_slots(name) for name in settings["models"] if name not in TRANSFORMERS):
        for k in dims:
            if k > lengths[-1]:
                raise SettingError("projection_dims", k, f"at most the longest of lengths, {lengths[-1]}")
    if settings["largest_batch"] and not on_gpu:
        raise SettingError("largest_batch", True, "false on a CPU, whose memory other programs use too")
    if settings["peer"]:
        if importlib.util.find_spec("linformer") is None:
            allowed = "false, or `pip install linformer` first"
            raise SettingError("peer", True, allowed, more=", but its package is not installed")
        if settings["intermediate_size"] != 4 * settings["hidden_size"]:
            wide = 4 * settings["hidden_size"]
            raise SettingError("intermediate_size", settings["intermediate_size"], f"4 hidden_size = {wide}", when="with peer")
    from lit_linformer.studies.benchmark.cells import model_names

    for name in model_names(settings, lengths[-1], ["fused"]):
        encoder_config(name, settings, lengths[-1])  # ValueError for settings that contradict each other


def notes(settings: dict[str, Any]) -> list[str]:
    """Notes that explain gaps and oddities in the tables."""
    found = []
    for n in settings["lengths"]:
        if large := [str(k) for k in settings["projection_dims"] if k > n]:
            found.append(f"n = {n} has no k = {', '.join(large)}, which is more than n: blank, as in the paper")
    if long := [str(n) for n in settings["lengths"] if n > settings["tokens"]]:
        found.append(f"n = {', '.join(long)} is more than tokens = {settings['tokens']}: a batch of one sequence there")
    tokens = settings["tokens"]
    for n in settings["lengths"]:
        if n < tokens and tokens % n:
            found.append(f"tokens = {tokens} is no multiple of n = {n}: a batch of {tokens // n * n} tokens there")
    if settings["compile"] and settings["largest_batch"]:
        found.append("the largest batch is found without compile: each batch would compile anew")
    return found


def environment(settings: dict[str, Any]) -> dict[str, Any]:
    """Hardware and versions with which it is measured."""
    from lit_linformer.studies.benchmark.passes import describe
    from lit_linformer.studies.benchmark.process import Job, measure

    found = {**versions(), "cores": cores(), **measure(Job(describe, settings, settings["backward"] is not False), [""])[""]}
    return {**found, "commit": head} if (head := commit()) else found


def write(folder: Path, data: dict[str, Any]) -> str:
    """Writes benchmark.md, the figures, and both for TensorBoard; returns what to print."""
    from torch.utils.tensorboard import SummaryWriter

    from lit_linformer.studies.benchmark import figures, tables

    text = tables.markdown(data)
    write_text(folder / "benchmark.md", text)
    for old in folder.glob("events.out.tfevents.*.benchmark"):  # an earlier start's, whose cells are in this one too
        old.unlink()
    with SummaryWriter(str(folder), filename_suffix=".benchmark") as writer:
        writer.add_text("benchmark", text)
        for cell in data["cells"].values():
            unit, scale = tables.UNITS[cell["kind"]]
            for name, entry in cell["models"].items():
                if entry["status"] == "ok":
                    tag = f"{cell['kind']}, {cell['direction']}, {unit}/{name}"
                    writer.add_scalar(tag, entry[tables.VALUES[cell["kind"]]] * scale, cell["n"])
        if (Figure := figure_class()) is None:
            return text + f"\n{folder}/: benchmark.json, benchmark.md; for figures `pip install matplotlib`, then again\n"
        made = []
        for name, draw in (("figure2", figures.draw_times), ("table3", figures.draw_ratios)):
            (folder / f"{name}.png").unlink(missing_ok=True)
            if (figure := draw(Figure, data)) is not None:
                figure.savefig(folder / f"{name}.png", dpi=150)
                writer.add_figure(name, figure)
                made.append(f"{name}.png")
    return text + f"\n{folder}/: {', '.join(['benchmark.json', 'benchmark.md', *made])}\n"
