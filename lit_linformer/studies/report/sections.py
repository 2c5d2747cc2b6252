"""The sections of `report`: the paper's figures and tables, each made by the code of the study that measured it."""

import contextlib
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from lit_linformer.runs.record import RunRecord, of_split
from lit_linformer.studies.grid import table
from lit_linformer.studies.paper import FIGURE1, FIGURE3, TABLE2, TASKS
from lit_linformer.studies.report.figures import draw_curves
from lit_linformer.studies.report.page import Page
from lit_linformer.studies.report.sources import Group, Run, Source
from lit_linformer.studies.report.tables import conversion_table, counted, curve_table, facts, number, run_facts, unfinished
from lit_linformer.studies.report.times import CLOCKS, clock_of, time_table
from lit_linformer.utils.environment import without_folders
from lit_linformer.utils.figures import draw_spectra
from lit_linformer.utils.markdown import aligned, code, demoted, plain

MOST_CURVES = 8  # in one figure, of runs outside of grids
# What numpy raises for a file that is missing, truncated, or of another kind.
UNREADABLE = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error)


def spectrum(page: Page, source: Source) -> None:
    """Figure 1 and its tables."""
    content, folder = source.content, source.folder
    page.add(f"## Figure 1: the spectrum of attention, {plain(str(folder))}", FIGURE1)
    try:
        named, indices = _measured(folder / "spectrum.npz", content)
    except UNREADABLE:
        page.add("Its curves are not drawn: spectrum.npz is missing or not whole.")
    else:
        what = "Cumulative share of the singular values by index, and the share at one index by layer and head"
        page.show("figure1", what, lambda figure: draw_spectra(figure, named, indices, content["threshold"]))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = (folder / "spectrum.md").read_text(encoding="utf-8").splitlines()
        skip = ("# ", f"`{content.get('command')}`")
        page.add(demoted("\n".join(line for line in lines if not line.startswith(skip)).strip()))
    budget = counted(
        f"{run['sentences']:,} rows of {run['length']:,} tokens through the checkpoint of step {run['step']:,}"
        for run in content["runs"]
    )
    page.add(facts([content.get("command")], [content.get("environment")], ("budget", budget)))


def _measured(file: Path, content: dict[str, Any]) -> tuple[list[tuple[str, Any]], list[int]]:
    """Names with their curves, and indices, as draw_spectra takes them."""
    import numpy as np
    import torch

    from lit_linformer.model.lowrank import Measured

    named, indices = [], []
    with np.load(file) as curves:
        for run in content["runs"]:
            values = torch.from_numpy(curves[f"{run['run']}:cumulative"])
            name = run.get("name") or f"{run['run']} ({run['attention']}, n = {run['length']})"
            measured = Measured(run["layers"], run["length"], run["columns"], run["sentences"], values, [], {})
            named.append((without_folders(name), measured))
            indices.append(run["index"])
    return named, indices


def benchmark(page: Page, source: Source) -> None:
    """Figure 2 and Table 3: ours, the paper's, and what operation counts allow."""
    from lit_linformer.studies.benchmark.cells import key, plan
    from lit_linformer.studies.benchmark.figures import draw_ratios, draw_times
    from lit_linformer.studies.benchmark.tables import headline, markdown

    data, settings = source.content, source.content["settings"]
    page.add(f"## Figure 2 and Table 3: time and memory, {plain(str(source.folder))}")
    page.show("figure2", "Time of a batch against n, a line a model", lambda figure: draw_times(figure, data))
    page.show("table3", "Time and memory saved against n and k", lambda figure: draw_ratios(figure, data))
    # Without its head, since the list at the section's end has command and hardware.
    page.add(demoted(markdown(data).partition(f"`{data['command']}`\n")[2].strip()))
    planned = [key(place) for place in plan(settings)]
    if left := [name for name in planned if name not in data["cells"]]:
        page.add(f"Not finished, {len(left)} of {len(planned)} cells: {', '.join(left)}.")
    place = {**data["environment"], **({"threads": settings["threads"]} if settings["device"] == "cpu" else {})}
    budget = f"{len(data['cells'])} cells, {settings['rounds']} timed passes of {settings['tokens']:,} tokens for each model"
    page.add(facts([data["command"]], [place], ("model", headline(data).splitlines()[1]), ("budget", budget)))


def pretraining_grid(page: Page, source: Source) -> None:
    """Figure 3, one panel per column of the grid; without the paper's words if other things than texts were learnt."""
    grid = source.grid
    of_texts = all(run.of_texts for run in source.runs if run.config)
    title, said = ("Figure 3: perplexity while pretraining", [FIGURE3]) if of_texts else ("Perplexity while training", [])
    page.add(f"## {title}, {plain(grid.name)}", *said)
    groups: dict[tuple[str, str], Group] = {}
    for cell, run in zip(grid.cells, source.runs, strict=True):
        row, column = cell.values[grid.rows], cell.values[grid.columns]
        paper = grid.paper.get(row, {}).get(column, "")
        empty = Group(_named(grid.rows, row), _named(grid.columns, column), [], paper)
        groups.setdefault((row, column), empty).runs.append(run)
    order = [(row, column) for column in grid.axes[grid.columns] for row in grid.axes[grid.rows]]
    chosen = [groups[key] for key in order if key in groups]
    curve_figures(page, "figure3", chosen)
    if any(len(group.runs) > 1 for group in chosen):
        page.add("Of several runs the median, with lowest and highest; in the figure each run is a thin line.")
    curve_numbers(page, chosen, source.content.get("command"))
    page.add(table.measured(source.content))


def _named(axis: str, value: str) -> str:
    """The value, with its axis if it is only a number: n = 512."""
    return f"{axis} = {value}" if value.replace(".", "", 1).isdecimal() else value


def finetuning_grid(page: Page, source: Source) -> None:
    """Table 2, and tables of other tasks."""
    grid = source.grid
    of_paper = bool({*TASKS} & {*grid.axes[grid.rows], *grid.axes[grid.columns]})
    title = "Table 2: scores after fine-tuning" if of_paper else "Scores"
    page.add(f"## {title}, {plain(grid.name)}", f"{plain(table.heading(grid))}.")
    page.add(table.markdown(grid, table.summary(grid)), table.measured(source.content))
    if of_paper and not grid.paper:
        page.add("The paper's, in percent (RoBERTa-base's size and budget; dev accuracy, of IMDB test accuracy):")
        lines = [[f"{n}", model, *map("{:.1f}".format, row[:-1]), f"{row[-1]:.2f}"] for (n, model), row in TABLE2.items()]
        page.add(aligned([["n", "model", *TASKS, "average"], *lines], right=True, words=2))
    page.add(unfinished(source.runs), run_facts(source.runs, source.content.get("command")))


def pretraining_runs(page: Page, runs: list[Run]) -> None:
    """Runs outside of grids, in as many figures as they need."""
    page.add("## Other pretraining runs")
    before = Counter()
    for run in runs:  # absolute paths are cut to their last part, which may repeat
        before[run.label] += 1
        run.label += f" ({before[run.label]})" if before[run.label] > 1 else ""
    groups = [Group(run.label, "", [run]) for run in runs]
    for place in range(0, len(groups), MOST_CURVES):
        curve_figures(page, "curves", groups[place : place + MOST_CURVES])
    curve_numbers(page, groups)


def conversions(page: Page, runs: list[Run]) -> None:
    """Runs of conf/convert/: what a converted model lost and recovered."""
    page.add("## Converted models, trained on", "A Transformer's weights in a Linformer, which learns from that Transformer.")
    what = f"Validation perplexity against tokens spent after the conversion: {', '.join(run.label for run in runs)}"
    groups, levels = [Group(run.label, "", [run]) for run in runs], sorted({run.teacher for run in runs if run.teacher})
    spent = "tokens spent after the conversion (millions)"
    page.show("conversion", what, lambda figure: draw_curves(figure, groups, spent=spent, teachers=levels))
    page.add(conversion_table(runs), unfinished(runs), run_facts(runs))
    made = (RunRecord(Path(str(run.setting("model.init_args.pretrained")))).conversion for run in runs)
    if commands := list(dict.fromkeys(content["command"] for content in made if content)):
        page.add("Converted by:", "\n".join(f"- {code(command)}" for command in commands))


def curve_figures(page: Page, name: str, groups: list[Group]) -> None:
    """Curves against tokens and, if it was measured, against time, with a table of what each reaches in equal time."""
    of = ", ".join(dict.fromkeys(group.label for group in groups if any(run.points() for run in group.runs)))
    page.show(name, f"Validation perplexity against tokens seen: {of}", lambda figure: draw_curves(figure, groups))
    if (clock := clock_of(groups)) is not None:
        what = f"Validation perplexity against {CLOCKS[clock]}: {of}"
        page.show(f"{name}-time", what, lambda figure: draw_curves(figure, groups, clock))
        page.add(time_table(groups, clock))


def curve_numbers(page: Page, groups: list[Group], command: str | None = None) -> None:
    """The curves in numbers, and a note if they are not comparable."""
    runs = [run for group in groups for run in group.runs]
    page.add(curve_table(groups))
    if len({run.text for run in runs if run.curve}) > 1:
        page.add("Not all of them were validated on the same text, tokens and masks: such perplexities do not compare.")
    page.add(unfinished(runs), run_facts(runs, command))


def finetuning_runs(page: Page, runs: list[Run]) -> None:
    page.add("## Other runs, by their scores")
    lines = [["run", "steps", "seconds", "scores at the best validation", "of `test`"]]
    for run in runs:
        validated = run.result.get("best_metrics") or run.result.get("metrics") or (run.curve[-1] if run.curve else {})
        told = [_scores(validated, "val", run.monitor), _scores(run.tested.get("metrics") or {}, "test")]
        lines.append([plain(run.label), number(run.last("step")), number(run.last("seconds")), *told])
    if not any(run.tested for run in runs):
        lines = [line[:-1] for line in lines]
    page.add(aligned(lines), unfinished(runs), run_facts(runs))


def _scores(metrics: dict[str, float | None], split: str, monitor: str = "") -> str:
    """Metrics of a split, and the one that decides which validation was best."""
    names = [key for key in metrics if of_split(key, split) or key == monitor]
    found = {key.removeprefix(f"{split}/"): metrics[key] for key in names}
    return ", ".join(f"{key} {'nan' if value is None else format(value, '.4f')}" for key, value in found.items()) or "–"
