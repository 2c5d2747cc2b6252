"""Lists configs, runs and the names that settings allow: `python run.py list`, or `python run.py list runs`.

    configs        conf/*.yaml for fit: what each reproduces, and what it costs
    grids          the same for grid: many runs and one table
    spaces         the same for tune --space: what is searched
    runs           those in runs/ or in --source: best value, steps, tokens, time, state
    attentions     for --model.encoder.attention
    projections    for --model.encoder.projection
    tasks          for --model
    data           for --data
    callbacks      for --trainer.callbacks+

Without one of these names it lists them all.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_linformer.cli.defaults import ENCODER
from lit_linformer.runs.record import RunRecord, find_runs
from lit_linformer.utils import sources
from lit_linformer.utils.amounts import clock
from lit_linformer.utils.arguments import Setting, parse, several, word
from lit_linformer.utils.configs import head
from lit_linformer.utils.environment import ROOT
from lit_linformer.utils.errors import SettingError, UserError, meant

SETTINGS = {"source": Setting(several(word("FOLDER")), "where to look for runs, three levels deep", ["runs"])}
# Callbacks that every command has or adds by itself, and base classes.
BY_THEMSELVES = (
    "AtomicCheckpointIO Curves EvaluationWriter Finite LastCheckpoint LastValidation Measuring Owed PredictionWriter "
    "Preemption Progress Resuming RunResult Throughput TrainingModule TrimMemory"
).split()
ALL = 10_000  # characters: a width at which no line is cut


@dataclass(frozen=True)
class Item:
    """A name, a sentence on what it is, and more text for a page of its own."""

    name: str
    words: str
    more: str = ""


def main(argv: list[str]) -> None:
    names = [name for name in argv[:1] if not name.startswith("-")]
    given = parse("list", __doc__, SETTINGS, argv[len(names) :])
    if names and names[0] not in KINDS:
        raise UserError(f"list {names[0]}{meant(names[0], KINDS)}", f"list, or list with one of {', '.join(KINDS)}")
    for place in map(Path, given["source"]):
        if not place.is_dir() and [str(place)] != SETTINGS["source"].default:
            raise SettingError("source", place, "a folder with runs in it", more=", which is no folder")
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else ALL
    for place, name in enumerate(names or KINDS):
        title, listed = KINDS[name]
        print(f"{chr(10) if place else ''}{_cut(title, width)}")
        for line in listed([Path(folder) for folder in given["source"]], bool(names), width):
            print(line, flush=True)


def configs(*commands: str) -> Callable[..., Iterable[str]]:
    def listed(_: list[Path], alone: bool, width: int) -> Iterable[str]:
        place = Path("conf") if Path("conf").is_dir() else ROOT / "conf"
        files = sorted(place.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
        items = [Item(str(file), told.sentence, told.cost) for file in files if (told := head(file)).command in commands]
        return _items(items, alone, width, "cost: ")

    return listed


def runs(places: list[Path], alone: bool, width: int) -> list[str]:
    found = [RunRecord(folder) for folder in dict.fromkeys(folder for place in places for folder in find_runs(place))]
    if not found:
        return [f"  none in {', '.join(map(str, places))}; the first: python run.py fit --config conf/quickstart.yaml"]
    return _table([("run", "best", "step", "tokens", "time", "state", "model"), *map(_row, found)], width)


def _row(run: RunRecord) -> tuple[str, ...]:
    (value, best_step), step, seconds, tokens = run.best(), run.step(), run.last("seconds"), run.last("tokens")
    metric = run.monitor.removeprefix("val/")
    best = "" if value is None else f"{value:{'.2f' if 'perplexity' in metric else '.4g'}} {metric}"
    at = f" at {best_step:,}" if best and best_step is not None and best_step != step else ""
    time = "" if seconds is None else clock(seconds)
    many = "" if tokens is None else f"{tokens / 1e6:.1f} M" if tokens >= 1e5 else f"{int(tokens):,}"
    return str(run.folder), best + at, "" if step is None else f"{step:,}", many, time, run.status(), run.model()


def _table(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Aligned columns; if they do not fit, the least important ones are left out, and lines are cut."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    order = list(range(len(sizes)))
    for gone in (4, 3, 6, 2):  # time, tokens, model, step
        if sum(sizes[place] + 2 for place in order) <= width:
            break
        order.remove(gone)
    return [_cut("  " + "  ".join(row[place].ljust(sizes[place]) for place in order).rstrip(), width) for row in rows]


def declared(find: Callable[[str], dict[str, sources.Declared]], place: str) -> Callable[..., Iterable[str]]:
    def listed(_: list[Path], alone: bool, width: int) -> Iterable[str]:
        found = ((name, one) for name, one in find(place).items() if name not in BY_THEMSELVES)
        return _items([Item(name, one.summary, _settings(one) if alone else "") for name, one in found], alone, width)

    return listed


def _settings(one: sources.Declared) -> str:
    """The settings that a class itself declares, with defaults; for model classes without those that the encoder passes."""
    from lit_linformer.cli.short_help import shown

    own = [setting for setting in one.own() if setting.name != "encoder"]
    if one.module.name.startswith("lit_linformer.model"):
        encoder = sources.find(ENCODER).settings()
        own = [setting for setting in own if setting.name not in encoder and setting.default is not sources.NotGiven]
    return ", ".join(f"{setting.name} {shown(setting.default)}" for setting in own)


def _items(items: list[Item], alone: bool, width: int, label: str = "") -> Iterable[str]:
    """One line for each item; on a page of its own (``alone``) the whole text, and more in further lines."""
    column = max((len(item.name) for item in items), default=0) + 4
    below = alone and column > width // 3  # names so long that the words go below them
    column = 6 if below else column
    for item in items:
        name, more = f"  {item.name}", f"{label}{item.more}" if alone and item.more else ""
        if not alone or width == ALL:  # in a pipe one line each, to be searched
            yield _cut(name.ljust(column) + item.words + (f"  ({more})" if more else ""), width)
            continue
        if below:
            yield name
        for text in ((" " * column if below else name.ljust(column)) + item.words, more and " " * column + more):
            yield from textwrap.wrap(text, width, subsequent_indent=" " * column) if text else ()


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


KINDS: dict[str, tuple[str, Callable[..., Iterable[str]]]] = {
    "attentions": ("attentions: --model.encoder.attention NAME", declared(sources.registered, "ATTENTIONS")),
    "projections": ("projections: --model.encoder.projection NAME", declared(sources.registered, "PROJECTIONS")),
    "tasks": ("tasks: --model NAME", declared(sources.exported, "lit_linformer.tasks")),
    "data": ("data: --data NAME", declared(sources.exported, "lit_linformer.data")),
    "callbacks": (
        "callbacks: --trainer.callbacks+ NAME; Lightning's too, as EarlyStopping",
        declared(sources.exported, "lit_linformer.callbacks"),
    ),
    "configs": ("configs: python run.py fit --config FILE", configs("fit", "convert")),
    "grids": ("grids, many runs and one table: python run.py grid --config FILE", configs("grid")),
    "spaces": ("spaces, to search for better settings: python run.py tune --config FILE --space SPACE", configs("tune")),
    "runs": ("runs: python run.py predict --config RUN/config.yaml", runs),
}
