"""A study's results: study.md, the best run's config as best.yaml, slices.png and importance.png."""

import math
from typing import Any

from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from lit_linformer.runs.record import RunRecord
from lit_linformer.studies.tune.space import Axis
from lit_linformer.studies.tune.study import Study, run_name
from lit_linformer.utils.configs import as_yaml
from lit_linformer.utils.figures import COLOURS, figure_class, literal, open_frame, plain_numbers, rendered
from lit_linformer.utils.files import write_bytes, write_text
from lit_linformer.utils.markdown import of_words

FEWEST = 4  # finished trials needed to compute importances
STAR = {"marker": "*", "s": 140, "color": COLOURS[1], "edgecolors": "black", "linewidths": 0.6, "zorder": 3}


def write_page(study: Study, command: str) -> str:
    """Writes each file for which there are results, and returns the table."""
    table = markdown(study)
    text = f"# {study.space.name}: {study.metric}\n\n`{command}`\n\n{table}"
    if done := study.finished():
        write_best(study)
    if (figure := figure_class()) is not None and done:
        text += "\n![Value against each setting](slices.png)\n"
        write_bytes(study.folder / "slices.png", rendered(draw_slices(figure, study), format="png", dpi=120))
        if len(done) >= FEWEST and len(study.space.axes) > 1:
            text += "\n![What the value depends on](importance.png)\n"
            evaluator = PedAnovaImportanceEvaluator()  # the default of Optuna 4 needs scikit-learn
            found = get_param_importances(study.optuna, evaluator=evaluator)
            bars = draw_importance(figure, found, study.metric)
            write_bytes(study.folder / "importance.png", rendered(bars, format="png", dpi=120))
    write_text(study.folder / "study.md", text)
    return table


def markdown(study: Study) -> str:
    """A row for each trial, the best first; those ended early and unfinished ones come last."""
    axes, rows = study.space.axes, [["trial", *(axis.setting for axis in study.space.axes), study.metric, "state"]]
    sign = -1 if study.optuna.direction.name == "MAXIMIZE" else 1
    trials = study.trials()
    for one in sorted(trials, key=lambda one: sign * one.value if one.state == TrialState.COMPLETE else math.inf):
        words = [axis.word(one.params[axis.setting]) if axis.setting in one.params else "–" for axis in axes]
        rows.append([run_name(one.number), *words, *_outcome(one)])
    return of_words(rows)


def _outcome(trial: FrozenTrial) -> tuple[str, str]:
    """A trial's value and state, in words."""
    if trial.state == TrialState.COMPLETE:
        return f"{trial.value:.4g}", "finished"
    if trial.state == TrialState.PRUNED:
        return "–", f"ended early: {trial.user_attrs.get('why', '')}"
    return "–", f"unfinished, validated up to step {trial.last_step or 0:,}"


def write_best(study: Study) -> None:
    """best.yaml: the config of the best run under another name, so that `fit` accepts it."""
    best = study.optuna.best_trial
    name, to = run_name(best.number), study.folder / "best.yaml"
    config = {**RunRecord(study.folder / name).config, "name": f"{study.space.name}-best"}
    found = ", ".join(f"{axis.setting} {axis.word(best.params[axis.setting])}" for axis in study.space.axes)
    head = f"# The best of {len(study.trials())} trials, {name}: {study.metric} {best.value:.4g} with {found}.\n"
    write_text(to, f"{head}#   python run.py fit --config {to}\n{as_yaml(config)}")


def draw_slices(figure_class: Any, study: Study) -> Any:
    """A panel for each setting: the values of finished trials, later ones darker; at the top, trials that were ended early."""
    axes, trials, done = study.space.axes, study.trials(), study.finished()
    early = [one for one in trials if one.state == TrialState.PRUNED]
    wide = min(len(axes), 3)
    high = math.ceil(len(axes) / wide)
    figure = figure_class(figsize=(1.6 + 3.4 * wide, 3.4 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False, sharey=True).flatten()
    best, values = study.optuna.best_trial, [one.value for one in done]
    last = max(1, len(trials) - 1)  # so that the colour bar of a single trial has a length, too
    for panel, axis in zip(panels, axes, strict=False):
        shade = {"c": [one.number for one in done], "cmap": "Blues", "vmin": -len(trials) / 3, "vmax": last}
        points = panel.scatter(_places(axis, done), values, edgecolors="0.3", linewidths=0.6, label="finished", **shade)
        top = panel.get_xaxis_transform()  # x as measured, y as a share of the panel's height
        panel.scatter(_places(axis, early), [0.97] * len(early), marker="x", color="0.5", transform=top, label="ended early")
        panel.scatter(_places(axis, [best]), [best.value], label="best", **STAR)
        panel.set_xlabel(axis.setting)
        if axis.ends is None:
            panel.set_xticks(range(len(axis.choices)), list(map(literal, axis.choices)))
            panel.set_xlim(-0.5, len(axis.choices) - 0.5)
        elif axis.log:
            panel.set_xscale("log")
            panel.set_xlim(axis.ends[0] / 1.15, axis.ends[1] * 1.15)
            plain_numbers(panel.xaxis, (1, 2, 5) if axis.ends[1] < 30 * axis.ends[0] else (1, 3))
        else:
            room = 0.05 * (axis.ends[1] - axis.ends[0])
            panel.set_xlim(axis.ends[0] - room, axis.ends[1] + room)
        if min(values) > 0 and max(values) > 3 * min(values):
            panel.set_yscale("log")
            plain_numbers(panel.yaxis)
        panel.margins(y=0.15)
        panel.grid(True, alpha=0.25)
        open_frame(panel)
    for panel in panels[len(axes) :]:
        panel.set_axis_off()
    first = figure.axes[0]
    first.set_ylabel(study.metric)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    bar = figure.colorbar(points, ax=figure.axes, label="trial")
    bar.ax.set_ylim(0, last)
    bar.ax.yaxis.get_major_locator().set_params(integer=True)
    return figure


def _places(axis: Axis, trials: list[FrozenTrial]) -> list[float]:
    found = [one.params[axis.setting] for one in trials]
    return found if axis.ends is not None else [axis.choices.index(value) for value in found]


def draw_importance(figure_class: Any, found: dict[str, float], metric: str) -> Any:
    """A bar for each setting, the longest at the top."""
    figure = figure_class(figsize=(6.4, 1.2 + 0.42 * len(found)), layout="constrained")
    panel = figure.add_subplot()
    names = sorted(found, key=found.__getitem__)
    bars = panel.barh(names, [found[name] for name in names], color=COLOURS[0])
    panel.bar_label(bars, [f"{found[name]:.0%}" for name in names], padding=3)
    panel.set(xlabel=f"importance for {metric} (PED-ANOVA)", xlim=(0, 1.1))
    open_frame(panel)
    return figure
