"""Figure 2 and Table 3, drawn from `benchmark`'s measurements without pyplot's global state."""

import math
from typing import Any

from lit_linformer.studies.benchmark.tables import BASELINES, OURS, SAVED, column, compared, digits, ratio_text
from lit_linformer.utils.figures import COLOURS, open_frame, plain_numbers

STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1))]
MARKERS = "os^Dv<"


def draw_times(figure_class: Any, data: dict[str, Any]) -> Any:
    """Figure 2: time of a batch against n at a fixed number of tokens, one line per model, whiskers at the quartiles."""
    cells = sorted((cell for cell in data["cells"].values() if cell["kind"] == "time"), key=lambda cell: cell["n"])
    directions = list(dict.fromkeys(cell["direction"] for cell in cells))
    if not any(entry["status"] == "ok" for cell in cells for entry in cell["models"].values()):
        return None
    figure = figure_class(figsize=(3.6 + 4.6 * len(directions), 4.3), layout="constrained")
    panels = figure.subplots(1, len(directions), squeeze=False)[0]
    names = list(dict.fromkeys(name for cell in cells for name in cell["models"]))
    for axes, direction in zip(panels, directions, strict=True):
        here = [cell for cell in cells if cell["direction"] == direction]
        for name in names:
            _draw_line(axes, name, names, here)
        axes.set(title=direction, xlabel="n, tokens a sequence", xscale="log", yscale="log")
        lengths = [cell["n"] for cell in here]
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=35 if len(lengths) > 5 else 0)
        axes.minorticks_off()
        plain_numbers(axes.yaxis, (1, 2, 5))
        axes.grid(True, which="major", alpha=0.25)
        open_frame(axes)
    panels[0].set_ylabel(f"time of {data['settings']['tokens']:,} tokens, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, handlelength=3)
    figure.suptitle(_subtitle(data), fontsize="small", color="0.35")
    return figure


def _family(name: str) -> str:
    """A model's family, within which looks differ: each baseline is a family, all other models together are one ("")."""
    kind = name.partition(" ")[0]
    return kind if kind in BASELINES else ""


def _draw_line(axes: Any, name: str, names: list[str], cells: list[dict[str, Any]]) -> None:
    kind, _, detail = name.partition(" ")
    index = [other for other in names if _family(other) == _family(name)].index(name)
    look = (index + index // len(STYLES)) % len(STYLES)  # the first 36 all differ
    colour = {"written-out": "black", "fused": ["0.45", "0.6", "0.3", "0.7"][index % 4]}.get(kind, COLOURS[index % len(STYLES)])
    transformers = {baseline: f"Transformer, {name}" for baseline in BASELINES}
    labels = {**transformers, OURS: f"Linformer, k = {detail}", "peer": f"package linformer, k = {detail}"}
    label = labels.get(kind, column(name))
    style = {"peer": ":", "written-out": "-"}.get(kind, STYLES[look])
    marker = {"written-out": "X", "fused": "Pph*"[index % 4], "peer": "."}.get(kind, MARKERS[look])
    worked = [cell for cell in cells if cell["models"].get(name, {}).get("status") == "ok"]
    entries = [cell["models"][name] for cell in worked]
    lengths = [cell["n"] for cell in worked]
    if stopped := [cell for cell in cells if cell["models"].get(name, {}).get("status") in ("OOM", "over limit")]:
        label += f" ({stopped[0]['models'][name]['status']} at {stopped[0]['n']:,})"
    times = [1e3 * entry["median"] for entry in entries]
    spread = [[1e3 * abs(entry["quartiles"][side] - entry["median"]) for entry in entries] for side in (0, 1)]
    axes.errorbar(lengths, times, yerr=spread, elinewidth=1, capsize=2, fmt="none", ecolor=colour, alpha=0.5)
    axes.plot(lengths, times, linestyle=style, marker=marker, color=colour, markersize=5, label=label)


def draw_ratios(figure_class: Any, data: dict[str, Any]) -> Any:
    """Table 3, a panel per kind and baseline: blue where the Linformer wins, orange where it loses; with the paper's ratios."""
    from matplotlib.colors import LinearSegmentedColormap

    cells = [cell for cell in data["cells"].values() if cell["ratios"]]
    rows = sorted({(cell["direction"], cell["kind"]) for cell in cells}, key=lambda row: (row[0], list(SAVED).index(row[1])))
    columns = [name for name in BASELINES if any(name in found for cell in cells for found in cell["ratios"].values())]
    ours = compared({name for cell in cells for name in cell["ratios"]})
    lengths = sorted({cell["n"] for cell in cells})
    if not columns:
        return None
    entries = [entry for cell in cells for found in cell["ratios"].values() for entry in found.values()]
    reach = max([abs(math.log2(entry["ratio"])) for entry in entries if entry["ratio"]] + [1.0])
    # Even a panel with a single k is as wide as its title.
    size = (1.9 + max(0.6 + 1.15 * len(ours), 2.9) * len(columns), 0.9 + (0.85 + 0.62 * len(lengths)) * len(rows))
    figure = figure_class(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    shades = LinearSegmentedColormap.from_list("wins", [COLOURS[1], "white", COLOURS[0]])
    for (direction, kind), line in zip(rows, panels, strict=True):
        by_length = {cell["n"]: cell for cell in cells if (cell["direction"], cell["kind"]) == (direction, kind)}
        for baseline, axes in zip(columns, line, strict=True):
            image = _draw_panel(axes, by_length, baseline, ours, lengths, {"cmap": shades, "vmin": -reach, "vmax": reach})
            axes.set_title(f"{SAVED[kind]}, {direction}\nagainst {BASELINES[baseline].replace('`', '')}", fontsize="medium")
            if axes is line[0]:
                axes.set_ylabel("n, tokens a sequence")
    for axes in panels[-1]:
        axes.set_xlabel("k, slots")
    bar = figure.colorbar(image, ax=panels, shrink=0.6, label="× (log scale)")
    top = int(reach)
    steps = range(-top, top + 1, max(1, top // 3))
    bar.set_ticks(list(steps), labels=[f"{2.0**step:g}" for step in steps])
    figure.suptitle(_subtitle(data), fontsize="small", color="0.35")
    return figure


def _draw_panel(
    axes: Any, by_length: dict[int, dict[str, Any]], baseline: str, ours: list[str], lengths: list[int], shades: dict[str, Any]
) -> Any:
    values = [[math.nan] * len(ours) for _ in lengths]
    for row, n in enumerate(lengths):
        for place, name in enumerate(ours):
            cell = by_length.get(n)
            if cell is None or name not in cell["models"]:
                continue
            found = cell["ratios"][name].get(baseline, {})
            if found.get("ratio"):
                values[row][place] = math.log2(found["ratio"])
            dark = abs(values[row][place]) > 0.6 * shades["vmax"]
            colour = "white" if dark else "black" if found.get("ratio") else "0.5"
            below = [f"paper {found['paper']:g}"] if "paper" in found else []
            below += [f"counts {digits(found['operation_counts'])}"] if "operation_counts" in found else []
            text = ratio_text(cell, name, baseline).replace(": ", ":\n")
            style = {"ha": "center", "va": "center", "color": colour}
            measured = bool(found.get("ratio"))
            lift = [0.0, 0.12, 0.2][len(below)]
            size = {"weight": "bold"} if measured else {"fontsize": "x-small"}
            axes.text(place, row - lift, text, **size, **style)
            axes.text(place, row + 0.32 - 0.08 * len(below), "\n".join(below), fontsize="x-small", linespacing=1.3, **style)
    image = axes.imshow(values, aspect="auto", **shades)
    axes.set_xticks(range(len(ours)), [column(name).removeprefix("k = ") for name in ours])
    axes.set_yticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _subtitle(data: dict[str, Any]) -> str:
    settings, here = data["settings"], data["environment"]
    threads = f", {settings['threads']} thread{'s' * (settings['threads'] > 1)}" if settings["device"] == "cpu" else ""
    shape = f"{settings['num_layers']} layers, D = {settings['hidden_size']}, {settings['num_heads']} heads"
    place = f"{here['hardware']}{threads}, torch {here['torch']}, {settings['precision']}"
    return f"{place} — {shape}, {settings['sharing']}"
