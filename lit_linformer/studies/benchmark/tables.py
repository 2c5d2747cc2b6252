"""Ratios and tables of `benchmark`'s measurements."""

import statistics
from collections.abc import Iterable
from typing import Any

from lit_linformer.studies.paper import MEMORY_SAVED, TIME_SAVED
from lit_linformer.utils.markdown import aligned

VALUES = {"time": "median", "memory": "bytes", "largest_batch": "batch"}
SAVED = {"time": "Time saved", "memory": "Memory saved (peak)", "largest_batch": "Memory saved (largest batch)"}
UNITS = {"time": ("ms", 1e3), "memory": ("MiB", 2**-20), "largest_batch": ("sequences", 1)}  # and the conversion factor
BASELINES = {"written-out": "written-out attention", "fused": "fused attention", "peer": "the package `linformer`"}
OURS = "linformer"  # the model that the paper's numbers are of


def compared(names: Iterable[str]) -> list[str]:
    """The models that are compared with the baselines, sorted by kind and k."""
    parts = [name.partition(" ") for name in names]
    return ["".join(part) for part in sorted(parts, key=lambda part: (part[0], int(part[2] or 0))) if part[0] not in BASELINES]


def _of_kind(kind: str, names: Iterable[str]) -> list[str]:
    """Names whose first word is ``kind``: a user's own model may be called fused_ideas.Fast."""
    return [name for name in names if name.partition(" ")[0] == kind]


def column(name: str) -> str:
    """A model's column heading: k = 128 for the Linformer."""
    kind, _, k = name.partition(" ")
    return f"k = {k}" if kind == OURS else f"{kind}, k = {k}" if k else kind


def with_ratios(cell: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Adds medians and quartiles to a cell, and each model's ratios to the baselines."""
    from lit_linformer.studies.benchmark.models import operations  # `report`, which shows tables, needs no torch for that

    models, n = cell["models"], cell["n"]
    for entry in models.values():
        if "seconds" in entry:
            entry["median"], entry["quartiles"] = _middle(entry["seconds"])
    cell["ratios"] = {}
    for name, entry in models.items():
        kind, _, k = name.partition(" ")
        if kind in BASELINES:
            continue
        found = cell["ratios"][name] = {}
        for baseline in BASELINES:
            other = _best(cell, baseline, k)
            if other is None:
                continue
            both = entry["status"] == models[other]["status"] == "ok"
            found[baseline] = {"against": other, **(_ratio(cell["kind"], entry, models[other]) if both else {"ratio": None})}
            if cell["kind"] == "time" and baseline != "peer":
                if (ours := operations(name, settings, n)) is not None:
                    found[baseline]["operation_counts"] = operations("fused", settings, n) / ours
            paper = (TIME_SAVED if cell["kind"] == "time" else MEMORY_SAVED).get(n, {}).get(int(k)) if kind == OURS else None
            if paper and baseline == "written-out" and cell["direction"] == "forward":  # all that the paper compared
                found[baseline]["paper"] = paper
    return cell


def _middle(values: list[float]) -> tuple[float, list[float]]:
    """Median, and first and third quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return statistics.median(values), [low, high]


def _best(cell: dict[str, Any], baseline: str, k: str) -> str | None:
    """The model that represents a baseline: the best of several fused kernels that worked."""
    names = [name for name in _of_kind(baseline, cell["models"]) if baseline != "peer" or name == f"peer {k}"]
    value = VALUES[cell["kind"]]
    worked = [name for name in names if cell["models"][name]["status"] == "ok"]
    if not worked:
        return names[0] if names else None
    return (max if value == "batch" else min)(worked, key=lambda name: cell["models"][name][value])


def _ratio(kind: str, ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if kind == "time":
        rounds = [theirs / mine for mine, theirs in zip(ours["seconds"], other["seconds"], strict=True)]
        median, quartiles = _middle(rounds)
        return {"ratio": median, "quartiles": quartiles}
    if kind == "memory":
        # Less than a page of difference is no measurement.
        return {"ratio": other["bytes"] / ours["bytes"] if ours["bytes"] > 0 and other["bytes"] > 0 else None}
    # If our batch is at the bound, the ratio is a lower limit; if the baseline's is, nothing is known.
    return {"ratio": None if other["at_bound"] else ours["batch"] / other["batch"], "at_least": ours["at_bound"]}


def digits(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{decimals}f}"


def _value(kind: str, entry: dict[str, Any], spread: bool = False) -> str:
    """One model's entry in a table."""
    if entry["status"] != "ok":
        return entry["status"]
    if kind == "memory":
        return f"{entry['bytes'] / 2**20:,.1f}"
    if kind == "largest_batch":
        return ("≥ " if entry["at_bound"] else "") + f"{entry['batch']:,}"
    median, low, high = (digits(1e3 * value) for value in (entry["median"], *entry["quartiles"]))
    return f"{median} ({low}–{high})" if spread else median


def progress(cell: dict[str, Any]) -> str:
    """The cell in one line."""
    unit, _ = UNITS[cell["kind"]]
    parts = []
    for name, entry in cell["models"].items():
        parts.append(f"{name} {_value(cell['kind'], entry)}" + (f" {unit}" if entry["status"] == "ok" else ""))
    return ("" if cell["kind"] == "largest_batch" else f"batch {cell['batch']}: ") + ", ".join(parts)


def headline(data: dict[str, Any]) -> str:
    """Two lines: hardware and versions, and the models' shape."""
    settings, here = data["settings"], data["environment"]
    how = [settings[key] for key in ("projection", "sharing", "order") if key in settings]
    shape = [
        f"{settings['num_layers']} layers of width {settings['hidden_size']}, {settings['num_heads']} heads",
        ", ".join([f"feed-forward {settings['intermediate_size']}", *how, settings["precision"]]),
        f"{settings['tokens']:,} tokens a batch",
    ]
    if settings["local_width"]:
        shape.append(f"local convolution of width {settings['local_width']}")
    place = [here["hardware"], f"torch {here['torch']}"]
    if settings["device"] == "cpu":
        place.append(f"{settings['threads']} thread{'s' * (settings['threads'] > 1)}")
    if settings["compile"]:
        place.append("torch.compile")
    if "commit" in here:
        place.append(f"commit {here['commit']}")
    return ", ".join(place) + "\n" + ", ".join(shape)


def markdown(data: dict[str, Any]) -> str:
    """benchmark.md: all tables."""
    place, shape = headline(data).splitlines()
    parts = [f"# Benchmark\n\n{place}  \n{shape}  \n`{data['command']}`\n", *(f"- {note}\n" for note in data["notes"])]
    cells = sorted(data["cells"].values(), key=lambda cell: cell["n"])
    for direction in ("forward", "forward+backward"):
        for kind in VALUES:
            if here := [cell for cell in cells if (cell["kind"], cell["direction"]) == (kind, direction)]:
                parts += _tables(kind, direction, here, data["settings"])
    reasons = [
        f"- {cell['kind']}, {cell['direction']}, n = {cell['n']}, {name}: {entry['reason']}\n"
        for cell in cells
        for name, entry in cell["models"].items()
        if "reason" in entry
    ]
    return "\n".join([*parts, *(["## Failed\n", "".join(reasons)] if reasons else [])])


def _tables(kind: str, direction: str, cells: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """The values, then the ratios to each baseline, with the paper's and those of operation counts below."""
    title = {
        "time": f"Time, {direction}: ms a batch of {settings['tokens']:,} tokens, median (quartiles) of {settings['rounds']}",
        "memory": f"Peak memory, {direction}: MiB above weights and input, batch of {settings['tokens']:,} tokens",
        "largest_batch": f"Largest batch, {direction}: sequences within {settings['batch_memory']:g} GiB",
    }[kind]
    names = list(dict.fromkeys(name for cell in cells for name in cell["models"]))
    lines = [["n", *(["batch"] if kind != "largest_batch" else []), *names]]
    for cell in cells:
        values = [_value(kind, cell["models"][name], spread=True) if name in cell["models"] else "" for name in names]
        lines.append([f"{cell['n']:,}", *([f"{cell['batch']:,}"] if kind != "largest_batch" else []), *values])
    parts = [f"## {title}\n", aligned(lines, right=True)]
    ours = compared(names)
    for baseline, what in BASELINES.items():
        representing = _of_kind(baseline, names)
        if not ours or not representing:
            continue
        lines = [["n", *map(column, ours)]]
        for cell in cells:
            lines.append([f"{cell['n']:,}", *(ratio_text(cell, name, baseline, spread=True) for name in ours)])
            for key, label, show in (("paper", "paper", "{:g}".format), ("operation_counts", "operation counts", digits)):
                numbers = [cell["ratios"].get(name, {}).get(baseline, {}).get(key) for name in ours]
                if any(numbers):
                    lines.append([f"{cell['n']:,}: {label}", *(show(number) if number else "" for number in numbers)])
        # The paper's ratios of memory are those of the largest batches.
        hint = "; the paper's is of largest batches" if kind == "memory" and any("paper" in line[0] for line in lines) else ""
        what += ", the best kernel" * (baseline == "fused" and len(representing) > 1)
        parts += [f"### {SAVED[kind]} against {what}, {direction}: ×{hint}\n", aligned(lines, right=True)]
    return parts


def ratio_text(cell: dict[str, Any], name: str, baseline: str, spread: bool = False) -> str:
    """One ratio, or why there is none; "" if the cell has no such model."""
    if name not in cell["models"]:
        return ""
    if cell["models"][name]["status"] != "ok":
        return cell["models"][name]["status"]
    found = cell["ratios"][name].get(baseline)
    if found is None:
        return ""
    if found["ratio"] is None:
        status = cell["models"][found["against"]]["status"]
        return "–" if status == "ok" else f"{found['against']}: {status}"
    text = ("≥ " if found.get("at_least") else "") + digits(found["ratio"])
    return f"{text} ({'–'.join(map(digits, found['quartiles']))})" if spread and "quartiles" in found else text
