"""Tables and lists of the report: curves in numbers, what is unfinished, and commands, hardware and budget."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from lit_linformer.studies.benchmark.tables import digits
from lit_linformer.studies.grid.measures import median
from lit_linformer.studies.report.sources import Group, Run
from lit_linformer.utils.markdown import aligned, code, plain

NOT_RECORDED = "not recorded"
MOST = 6  # different values in one line


def curve_table(groups: list[Group]) -> str:
    """One line per group that was started: tokens, time, perplexity, and its ratio to the Transformer's."""
    groups = [group for group in groups if any(run.state() != "not started" for run in group.runs)] or groups
    panels = len({group.panel for group in groups}) > 1
    against = any(group.transformer for group in groups) and not all(group.transformer for group in groups)
    paper = any(group.paper for group in groups)
    head = ["run", *["panel"] * panels, "tokens, millions", "steps", "seconds", "last perplexity", "best"]
    lines = [head + ["÷ Transformer"] * against + ["paper"] * paper]
    for group in groups:
        used = group.used
        line = [plain(group.label), *[plain(group.panel)] * panels]
        line.append(_spread((run.last("tokens") for run in used), millions))
        line += [_spread((run.last(key) for run in used), number) for key in ("step", "seconds")]
        curves = [list(points.values()) for run in used if (points := run.points())]
        line += [_spread((end(curve) for curve in curves), of_any_size) for end in (lambda curve: curve[-1], _best)]
        lines.append(line + [ratio(group, groups)] * against + [group.paper or "–"] * paper)
    explained = "\n÷ Transformer: the ratio of the perplexities at the last number of tokens where both were validated.\n"
    return aligned(lines, right=True, words=1 + panels) + explained * against


def conversion_table(runs: list[Run]) -> str:
    """One line per run: its teacher's perplexity, and its own right after the conversion, half-way and at the end."""
    lines = [["run", "teacher", "right after", "half-way", "last perplexity", "÷ teacher", "tokens, millions"]]
    for run in runs:
        points, show = run.points(), of_any_size
        tokens = sorted(points)
        middle = min(tokens, key=lambda spent: abs(spent - tokens[-1] / 2)) if tokens else None
        found = [points.get(spent) for spent in (0, middle, tokens[-1] if tokens else None)]
        share = f"{found[-1] / run.teacher:.3f}" if run.teacher and tokens else "–"
        shown = ["–" if value is None else show(value) for value in (run.teacher, *found)]
        lines.append([plain(run.label), *shown, share, millions(tokens[-1]) if tokens else "–"])
    return aligned(lines, right=True, words=1)


def ratio(group: Group, groups: list[Group]) -> str:
    """The ratio to the most similar Transformer at the last point where both were validated."""
    ours, found = group.median(), []
    for other in groups:
        theirs = other.median()
        common = max((tokens for tokens in ours if tokens in theirs and tokens > 0), default=0)
        if other.transformer and other.comparable(group) and common:
            branch = other.same("local_width") != group.same("local_width")
            # Prefer runs of equal length: with a falling learning rate the shorter one is ahead at its end.
            likeness = (other.panel != group.panel, branch, other.unlike(group), max(theirs) - common)
            found.append((likeness, ours[common] / theirs[common], common, other.label))
    if group.transformer or not found:
        return "–"
    _, value, tokens, name = min(found, key=lambda one: (one[0], -one[1]))  # of equally similar ones the better
    which = f", {plain(name)}" if len({other.label for other in groups if other.transformer}) > 1 else ""
    return f"{of_any_size(value, 3)} at {millions(tokens)} M{which}"


def _best(curve: list[float]) -> float:
    return min(filter(math.isfinite, curve), default=math.nan)


def _spread(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """The median and, where they differ, lowest to highest."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, high = show(min(known)), show(max(known))
    return show(median(known)) if low == high else f"{show(median(known))} ({low}–{high})"


def millions(tokens: float) -> str:
    return digits(tokens / 1e6)


def of_any_size(value: float, decimals: int = 2) -> str:
    """A perplexity or a ratio as text; that of a model that has diverged may have hundreds of digits."""
    return f"{value:,.{decimals}f}" if value < 1e6 else f"{value:.3g}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def unfinished(runs: list[Run]) -> str:
    """A list of the unfinished runs, one line per state; "" if all are finished."""
    by_state: dict[str, list[str]] = {}
    for run in runs:
        if state := run.state():
            by_state.setdefault(state, []).append(plain(run.label))
    if not by_state:
        return ""
    lines = (f"- {'; '.join(labels)}: {state}\n" for state, labels in by_state.items())
    return f"Not finished, {sum(map(len, by_state.values()))} of {len(runs)}:\n\n{''.join(lines)}"


def facts(commands: Iterable[str | None], places: Iterable[dict[str, Any] | None], *more: tuple[str, str]) -> str:
    """Command, hardware, versions and further facts, as a list."""
    environments = [place or {} for place in places]
    lines = [
        ("command", counted(code(command) if command else NOT_RECORDED for command in commands)),
        ("hardware", counted(map(_hardware, environments))),
        ("versions", counted(map(_versions, environments))),
        *more,
    ]
    return "How it was made:\n\n" + "".join(f"- {name}: {text}\n" for name, text in lines)


def run_facts(runs: list[Run], command: str | None = None) -> str:
    """The ``facts`` of runs: for a grid its own command, else each run's."""
    begun = [run for run in runs if run.config or run.result] or runs
    amounts = ["one run" if len(begun) == 1 else f"{len(begun)} runs"]
    for key, unit, show in (("step", "steps", number), ("tokens", "M tokens", millions)):
        if known := [run.last(key) for run in begun if run.last(key)]:
            of = "" if len(begun) == 1 else " each" if len(known) == len(begun) else f" each of {len(known)}"
            amounts.append(f"{_spread(known, show)} {unit}{of}")
    amounts.append(f"{sum(run.last('seconds') or 0 for run in begun):,.0f} seconds{' together' if len(begun) > 1 else ''}")
    commands = [command] if command else [run.result.get("command") for run in begun]
    shapes = list(filter(None, map(_shape, begun)))
    more = [("model", counted(shapes))] if shapes else []
    return facts(commands, [run.result.get("environment") for run in begun], *more, ("budget", ", ".join(amounts)))


def counted(texts: Iterable[str]) -> str:
    """Each text once, with its count unless all are the same."""
    counts = Counter(texts)
    shown = [text if len(counts) == 1 or times == 1 else f"{text} ({times} ×)" for text, times in counts.items()]
    left = f"; and {len(shown) - MOST} others" if len(shown) > MOST else ""
    return "; ".join(itertools.islice(shown, MOST)) + left or NOT_RECORDED


def _hardware(place: dict[str, Any]) -> str:
    parts = [str(place[key]) for key in ("hardware", "cpu") if key in place]
    for key, one, several in (("cores", "core", "cores"), ("threads", "thread", "threads"), ("processes", "", "processes")):
        if place.get(key, 1) > 1 or (key in place and one):
            parts.append(f"{place[key]} {one if place[key] == 1 else several}")
    return plain(", ".join(parts)) or NOT_RECORDED


def _versions(place: dict[str, Any]) -> str:
    names = {"python": "Python", "lightning": "Lightning"}
    there = [key for key in ("python", "torch", "lightning", "lit-linformer", "commit") if key in place]
    return plain(", ".join(f"{names.get(key, key)} {place[key]}" for key in there)) or NOT_RECORDED


def _shape(run: Run) -> str:
    layers, width, heads, n = (run.encoder(name) for name in ("num_layers", "hidden_size", "num_heads", "max_length"))
    precision = run.setting("trainer.precision")
    if layers is None:
        return ""
    return f"{layers} layers of width {width}, {heads} heads, n = {n}" + (f", precision {precision}" if precision else "")
