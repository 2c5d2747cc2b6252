"""The cells of `benchmark`: planning, estimating and measuring them, and resuming an interrupted benchmark."""

import time
from pathlib import Path
from typing import Any

from lit_linformer.studies.benchmark.models import has_slots, operations
from lit_linformer.studies.benchmark.passes import measure_largest_batch, measure_memory, measure_speed, measure_time
from lit_linformer.studies.benchmark.process import Job, measure
from lit_linformer.studies.benchmark.tables import progress, with_ratios
from lit_linformer.utils.errors import SettingError
from lit_linformer.utils.files import read_json, write_json

CHOOSE_CELLS = ("lengths", "backward", "memory", "largest_batch", "output", "overwrite")  # change no measurement
# May differ between two starts of a command: recorded in the file, but no reason to throw away hours of measurements.
NOT_COMPARED = ("commit", "cpu", "fused", "cores", "lightning", "lit-linformer")
KINDS = {
    "memory": ("peak memory", measure_memory),
    "time": ("time", measure_time),
    "largest_batch": ("largest batch", measure_largest_batch),
}
START = 1.0  # seconds that a process takes to start
Place = tuple[str, str, int]  # kind, direction, n


def plan(settings: dict[str, Any]) -> list[Place]:
    """All cells, those of short sequences first. Memory comes before time: a model that ran out of memory is not timed."""
    directions = {False: ["forward"], True: ["forward+backward"], "both": ["forward", "forward+backward"]}
    kinds = [kind for kind in KINDS if kind == "time" or settings[kind]]
    return [(k, direction, n) for n in settings["lengths"] for direction in directions[settings["backward"]] for k in kinds]


def key(place: Place) -> str:
    return "/".join(map(str, place))


def model_names(settings: dict[str, Any], n: int, fused: list[str]) -> list[str]:
    """The models at one n. Transformers come first, since a Linformer shares their weights."""
    dims = [k for k in settings["projection_dims"] if k <= n]
    members = {"written-out": ["written-out"], "fused": fused, "linformer": [f"linformer {k}" for k in dims]}
    others = [word for word in settings["models"] if word not in members]
    members |= {word: [f"{word} {k}" for k in dims] if has_slots(word) else [word] for word in others}
    names = [name for kind, found in members.items() if kind in settings["models"] for name in found]
    return names + ([f"peer {k}" for k in dims] if settings["peer"] else [])


def seconds_needed(settings: dict[str, Any], places: list[Place], fused: list[str]) -> dict[Place, float]:
    """Estimated seconds for each cell: its operation count at the speed of one measured pass; 0 for largest batches."""
    if not places:
        return {}
    n = min(settings["lengths"][0], 2048)  # at 65,536 the pass of a Transformer takes minutes
    found = measure(Job(measure_speed, {**settings, "num_layers": 1, "compile": False}, n=n), ["fused"])["fused"]
    if found["status"] != "ok":
        return {}
    a_second = _operations("fused", settings, n) * n / found["seconds"]

    def needed(kind: str, direction: str, n: int) -> float:
        passes = (settings["warmup"] + settings["rounds"] if kind == "time" else 1) * (1 if direction == "forward" else 3)
        tokens = max(1, settings["tokens"] // n) * n * settings["num_layers"] * passes
        each = [_operations(name, settings, n) for name in model_names(settings, n, fused)]
        starts = START * (len(each) if kind == "memory" and settings["device"] == "cpu" else 1)
        return starts + sum(min(count * tokens / a_second, settings["cell_seconds"]) for count in each)

    return {place: 0.0 if place[0] == "largest_batch" else needed(*place) for place in places}


def _operations(name: str, settings: dict[str, Any], n: int) -> float:
    """Operations per token and layer of the forward pass; an attention without `flops` counts as the Transformer."""
    return operations(name, settings, n) or operations("fused", settings, n)


def words(seconds: float) -> str:
    """40 s, 12 min, 3.4 h."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def measure_cells(folder: Path, data: dict[str, Any]) -> list[str]:
    """Measures the missing cells and writes benchmark.json after each; returns the failures with their reasons."""
    settings, done, failed, fused = data["settings"], data["cells"], [], data["environment"]["fused"]
    cells = plan(settings)
    left = seconds_needed(settings, [place for place in cells if key(place) not in done], fused)
    if total := sum(left.values()):
        print(f"about {words(total)} by operation counts; softmax and compilation take additional time", flush=True)
    spent, expected = 0.0, 0.0
    for number, place in enumerate(cells, 1):
        kind, direction, n = place
        label = f"[{number}/{len(cells)}] {KINDS[kind][0]}, {direction}, n = {n}"
        if key(place) in done:
            print(f"{label}: finished before", flush=True)
            continue
        began = time.monotonic()
        job = Job(KINDS[kind][1], settings, direction != "forward", n, max(1, settings["tokens"] // n))
        names = model_names(settings, n, fused)
        # A model whose single pass does not fit or takes too long is not timed.
        known = done.get(key(("memory", direction, n)), {"models": {}})["models"] if kind == "time" else {}
        hopeless = {name: entry for name, entry in known.items() if entry["status"] in ("OOM", "over limit")}
        # Resident size is a property of the process, so on a CPU each model's memory is measured in its own process.
        alone = kind == "memory" and settings["device"] == "cpu"
        measured = measure(job, [name for name in names if name not in hopeless], alone) | hopeless
        cell = {"kind": kind, "direction": direction, "n": n, "batch": job.batch}
        done[key(place)] = with_ratios({**cell, "models": {name: measured[name] for name in names}}, settings)
        write_json(folder / "benchmark.json", data, indent=1)
        took = time.monotonic() - began
        spent, expected = spent + took, expected + left.pop(place, 0.0)
        rest = f"; about {words(sum(left.values()) * spent / expected)} left" if expected and sum(left.values()) else ""
        print(f"{label}, {progress(done[key(place)])} ({took:.0f} s{rest})", flush=True)
        failed += [f"{key(place)} {name}: {found['reason']}" for name, found in measured.items() if found["status"] == "failed"]
    write_json(folder / "benchmark.json", data, indent=1)
    return failed


def finished_cells(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The cells that an earlier start finished; ValueError if its settings differ."""
    if data["settings"]["overwrite"] or not file.exists():
        return {}
    before = read_json(file)
    if before is None or not {"settings", "environment", "cells"} <= before.keys():
        raise SettingError("output", file.parent, "--overwrite true", more=f", whose {file.name} is not whole")
    old = before["settings"] | before["environment"]
    new = data["settings"] | data["environment"]
    for name in new:
        if old.get(name) != new[name] and name not in (*CHOOSE_CELLS, *NOT_COMPARED):
            more = f", which was measured with {name} {old.get(name)}, not {new[name]}"
            raise SettingError("output", file.parent, "another --output, or --overwrite true", more=more)
    cells = before["cells"].values()
    whole = [cell for cell in cells if all(entry["status"] != "failed" for entry in cell["models"].values())]
    return {key((cell["kind"], cell["direction"], cell["n"])): cell for cell in whole}
