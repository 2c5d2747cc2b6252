"""Validation perplexity against tokens, as in the paper's figure 3, or against training time."""

import math
from collections.abc import Sequence
from typing import Any

from lit_linformer.studies.report.sources import Group
from lit_linformer.studies.report.times import axis_of
from lit_linformer.utils.figures import COLOURS, SEPARATED, STYLES, literal, open_frame, plain_numbers, widths

TRANSFORMER = COLOURS[-1]  # black, as in the benchmark's figures; the others share the rest
UNFINISHED = {"marker": "x", "markersize": 8, "markeredgewidth": 1.8, "linestyle": "none"}
MOST_ACROSS = 3
FAR_ABOVE = 20  # times the largest later value: a perplexity before training that is higher lies off the y-axis


def draw_curves(
    figure_class: Any,
    groups: list[Group],
    by: str = "tokens",
    spent: str = "tokens seen (millions)",
    teachers: Sequence[float] = (),
) -> Any:
    """One panel per name, one line per group: its median, and below it its runs as thin lines. None if there are no points.

    ``by`` is the x-axis: tokens, labelled ``spent``, or a column of perplexity.csv in seconds. ``teachers``: horizontal lines.
    """
    groups = [group for group in groups if any(run.points(by) for run in group.runs)]
    if not groups:
        return None
    unit, label = (1e6, spent) if by == "tokens" else axis_of(by, groups)
    names = list(dict.fromkeys(group.panel for group in groups))
    looks = _looks(groups)
    medians = [next(group.median(by) for group in groups if group.label == label) for label in looks]
    # As on the axis, where one high value, such as that of a model that diverged, doesn't make all others equal.
    found, note = widths([(list(line), [math.log(y) if y > 0 else y for y in line.values()]) for line in medians], 0.002)
    thickness = dict(zip(looks, found, strict=True))
    across = min(len(names), MOST_ACROSS)
    down = -(-len(names) // across)
    legend = 1.2 + 0.075 * max(map(len, looks))
    figure = figure_class(figsize=(4.9 * across + legend, 3.9 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    for axes, name in zip(panels, names, strict=False):
        for group in groups:
            if group.panel == name:
                _draw_group(axes, group, by, unit, looks[group.label], thickness[group.label])
        axes.set(xlabel=label, title=literal(name), yscale="log")
        axes.yaxis.set_tick_params(labelleft=True)
        axes.xaxis.set_major_formatter(SEPARATED)
        axes.grid(True, alpha=0.25)
        for number, level in enumerate(teachers):
            axes.axhline(level, color=TRANSFORMER, linewidth=1, linestyle="--", label="teacher" if number == 0 else None)
        axes.set_xlim(left=0)
        open_frame(axes)
    curves = [run.points(by) for group in groups for run in group.runs]
    later = max((y for points in curves for spent, y in points.items() if spent), default=math.inf)
    if max(points.get(0, 0.0) for points in curves) > FAR_ABOVE * later:
        panels[0].set_ylim(top=1.3 * later)
    plain_numbers(panels[0].yaxis)  # which all panels share
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes in panels[::across]:
        axes.set_ylabel("validation perplexity")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if any(run.points(by) and not run.finished for group in groups for run in group.runs):
        mark = panels[0].plot([], [], color="0.3", **UNFINISHED)[0]
        handles["unfinished run"] = mark
    order = [text for text in (*looks, "teacher", "unfinished run") if text in handles]
    figure.legend(
        [handles[text] for text in order],
        list(map(literal, order)),
        loc="outside right center",
        frameon=False,
        handlelength=3,
        title=note,
    )
    return figure


def _looks(groups: list[Group]) -> dict[str, dict[str, Any]]:
    """{label: colour and line style}, the same in all panels."""
    labels = dict.fromkeys(group.label for group in groups)
    full = [label for label in labels if all(group.transformer for group in groups if group.label == label)]
    others = [label for label in labels if label not in full]
    looks = {label: (TRANSFORMER, STYLES[place % len(STYLES)]) for place, label in enumerate(full)}
    looks |= {label: (COLOURS[place % 6], STYLES[place % len(STYLES)]) for place, label in enumerate(others)}
    return {label: {"color": looks[label][0], "linestyle": looks[label][1]} for label in labels}


def _draw_group(axes: Any, group: Group, by: str, unit: float, look: dict[str, Any], width: float) -> None:
    several = len([run for run in group.runs if run.points(by)]) > 1
    for run in group.runs:
        x, y = _line(run.points(by), unit)
        if not x:
            continue
        if several:
            axes.plot(x, y, linewidth=0.8, alpha=0.45, **look)
        if not run.finished:
            axes.plot(x[-1], y[-1], color=look["color"], zorder=3, **UNFINISHED)
    x, y = _line(group.median(by), unit)
    axes.plot(x, y, linewidth=width, marker=".", markersize=5 + width, label=group.label, **look)


def _line(points: dict[float, float], unit: float) -> tuple[list[float], list[float]]:
    """Tokens or seconds in the given unit, and perplexities, including the untrained model's at 0."""
    return [spent / unit for spent in points], list(points.values())
