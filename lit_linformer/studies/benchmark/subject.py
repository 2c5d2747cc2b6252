"""What the subjects of `benchmark` share: common settings, defaults that depend on the device, and a JSON file of results."""

import statistics
from pathlib import Path
from typing import Any

from lit_linformer.utils.arguments import Setting, check_device, choice, number, parse, whole, word
from lit_linformer.utils.environment import command_line, environment
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.files import check_own, write_json

SUBJECTS = {
    "layers": "time and memory of layers against n and k",
    "training": "training steps against RoBERTa's",
    "loop": "fit against a bare PyTorch loop",
    "lengths": "texts of unequal lengths against full rows",
    "parallel": "processes under DDP against single ones",
    "preparation": "text to token files",
}
WHAT = Setting(choice(*SUBJECTS), "; ".join(f"{name}: {what}" for name, what in SUBJECTS.items()), "layers")
DEVICE = Setting(word("auto|cpu|cuda|cuda:N"), "where to measure; auto: a GPU if there is one", "auto")
THREADS = Setting(whole("N", 1), "threads of a CPU (default: torch's)")
CLOCK = Setting(choice("wall", "cpu"), "cpu: the process's own time, for a shared machine; with --threads 1", "wall")
ROUNDS = Setting(whole("N", 1), "timed rounds for each", 7)
CELL_SECONDS = Setting(number("SECONDS", above=0), "time limit for all passes of one model at one n", 600.0)


def output(folder: str) -> Setting:
    return Setting(word("FOLDER"), "where to write results", folder)


def fill(settings: dict[str, Any], by_device: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Adds the device and the defaults that depend on it; by_device: {setting: (on a CPU, on a GPU)}."""
    import torch

    device = check_device(settings["device"])
    defaults = {"threads": torch.get_num_threads(), **{name: pair[device != "cpu"] for name, pair in by_device.items()}}
    left = {name for name, value in settings.items() if value is None}
    return settings | {name: value for name, value in defaults.items() if name in left} | {"device": device}


def begin(
    what: str, doc: str, known: dict[str, Setting], argv: list[str], file: str, **by_device: tuple[Any, Any]
) -> dict[str, Any]:
    """A subject's settings, completed by `fill`; ValueError for a bad one, or if its file exists and is not a benchmark's."""
    settings = parse(f"benchmark --what {what}", doc, known, argv)
    if "device" in settings:
        settings = fill(settings, by_device)
    # Otherwise the process's CPU time is not the time of the work.
    if settings.get("clock") == "cpu" and (settings["device"] != "cpu" or settings["threads"] > 1):
        raise UserError("clock is cpu", "wall, or a CPU with threads = 1")
    check_own(Path(settings["output"]), [f"{file}.json"], f"{file}.json", "benchmark")
    return settings


def write(folder: str, name: str, argv: list[str], device: str, content: dict[str, Any]) -> None:
    """Writes FOLDER/NAME.json: ``content`` with the command and the environment, to which its "environment" is added."""
    made = {"command": command_line(["benchmark", *argv]), "environment": environment(device) | content.pop("environment", {})}
    write_json(Path(folder, f"{name}.json"), {**made, **content}, indent=1)
    print(f"→ {folder}/{name}.json", flush=True)


def spread(values: list[float]) -> dict[str, float]:
    return {name: float(f"{f(values):.5g}") for name, f in (("median", statistics.median), ("min", min), ("max", max))}
