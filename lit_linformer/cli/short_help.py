"""`python run.py COMMAND … --help`: the most often changed settings, with their values on this command line.

Neither torch, Lightning nor jsonargparse is imported: the classes' settings are read from their source files.
"""

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lit_linformer.cli import often_changed as table
from lit_linformer.cli.defaults import ALWAYS_THERE, DEFAULT_CLASSES, ENCODER, RUN
from lit_linformer.cli.given import given_settings
from lit_linformer.utils import sources
from lit_linformer.utils.configs import config_files, head

WORDS = {
    "model.encoder.attention": "the attention of every layer",
    "model.encoder.projection": "what makes the k slots",
    "data.document_start": 'regular expression of a document\'s first line; for WikiText "^ = [^=]"; null: blank lines',
}
FILLED_IN = ("encoder", "vocab_size", "num_labels")  # by other sections, and by the data
USUAL = ("lr", "warmup_steps", "schedule", "weight_decay", "source", "batch_size", "max_length")
SCREEN = 30  # lines
SHORT = 24  # characters: after a shorter first sentence the next one is shown, too
COUNTS = ("0 or more", "1 or more")  # not shown, since they are obvious
NUMBERS = (*"0123456789", "at least", "more than")  # how a range begins, which is left out if there is no room for it


@dataclass(frozen=True)
class Line:
    """A setting as the page shows it."""

    name: str
    value: Any
    default: Any
    words: str
    allowed: str = ""


class Unreadable(Exception):
    """Raised for a class whose settings cannot be read from a file, without importing it."""


def short_help(argv: list[str], width: int | None = None) -> str:
    """The page; raises Unreadable for a class whose file is not found, ValueError for a --config that is no settings file."""
    width = min(width or shutil.get_terminal_size((80, 24)).columns, 160)
    sections = settings_shown(argv)
    command, files = argv[0], list(config_files(argv))
    lines = [f"usage: python run.py {command} --config FILE [--config OVERLAY …] [--SETTING VALUE …]", ""]
    if files:
        heads = ((file, head(file).sentence) for file in files)
        lines += [part for file, told in heads for part in _wrapped(f"{file}: {told}." if told else file, width)]
        lines += [
            "",
            *_wrapped("The values are those of this command line; (default …) follows where it changes one.", width),
        ]
    else:
        lines += _wrapped("No --config is given: the values are defaults. `python run.py list configs` lists configs.", width)
    for title, shown in sections:
        lines += ["", title, *_columns(shown, width)]
    typed = " ".join(["python run.py", command, *(f"--config {shlex.quote(file)}" for file in files)])
    further = table.FURTHER.get(command) if files else None
    example = f"{typed} {further}" if further else table.EXAMPLES[command]
    lines += ["", "An example", f"  {example}", "All settings (takes some seconds)", f"  {typed} --help_all"]
    return "\n".join(lines) + "\n"


def settings_shown(argv: list[str]) -> list[tuple[str, list[Line]]]:
    """[(title of a section, its settings)] of the page."""
    command, given = argv[0], given_settings(argv)
    classes = {key: _declared(key, given.get(key) or path) for key, path in DEFAULT_CLASSES.items()}
    found = []
    for title, names in table.SECTIONS[command]:
        shown = [line for name in names.split() for line in _lines(name, command, classes, given)]
        if shown:
            found.append((title, shown))
    return found


def _lines(name: str, command: str, classes: dict[str, sources.Declared], given: dict[str, Any]) -> Iterator[Line]:
    if name in classes:
        declared = classes[name]
        own = exported(name).get(declared.node.name)
        path = declared.node.name if own is not None and own.path == declared.path else given[name]
        yield Line(name, path, None, declared.summary)
        yield from _of_class(name, declared, _chosen(command, name, declared), given)
    elif name == "model.encoder":
        settings = classes["model"].settings()
        given_here = any(key.startswith("model.encoder.") for key in given)
        if "encoder" in settings and (
            given_here or "pretrained" not in settings or classes["model"].node.name in ("MLM", "Recall")
        ):
            yield from _of_class(name, _declared(name, ENCODER), table.SHAPE, given)
    elif name in RUN:
        default, words = RUN[name]
        yield Line(name, given.get(name, default), default, words)
    elif name.startswith("trainer."):
        default, words = table.TRAINER[name.removeprefix("trainer.")]
        yield Line(name, given.get(name, default), default, words)
    else:
        key, _, setting = name.partition(".")
        yield from _of_class(key, _declared(key, ALWAYS_THERE[key]), [setting], given)


def _of_class(key: str, declared: sources.Declared, names: Iterable[str], given: dict[str, Any]) -> Iterator[Line]:
    settings = declared.settings()
    for setting in (settings[name] for name in names if name in settings):
        name = f"{key}.{setting.name}"
        words, allowed = WORDS.get(name) or _telling(setting.words), setting.allowed
        if name in table.REGISTRIES:
            allowed = f"{', '.join(sources.registered(table.REGISTRIES[name]))}, or a class of your own"
        elif name in table.NAMES:
            words, allowed = words.partition(":")[0], ", ".join(sources.keys(table.NAMES[name]))
        if allowed in ("true or false", *COUNTS) or all(part in words for part in allowed.split(", ")):
            allowed = ""
        yield Line(name, given.get(name, setting.default), setting.default, words, allowed)


def _telling(words: str) -> str:
    """The first sentence, and the next one if the first is short."""
    first = sources.first_sentence(words)
    rest = words[len(first) + 1 :].strip()
    return f"{first}. {sources.first_sentence(rest)}" if len(first) < SHORT and rest else first


def _chosen(command: str, key: str, declared: sources.Declared) -> list[str]:
    """The class's settings that the page shows."""
    if key == "data" and command in table.OF_DATA:
        return table.OF_DATA[command].split()
    if declared.ours:
        return table.OF_CLASSES.get(declared.node.name, "").split()
    own = [setting.name for setting in declared.own() if setting.name not in FILLED_IN]
    return [*own, *(name for name in USUAL if name not in own)]


def exported(key: str) -> dict[str, sources.Declared]:
    """The package's own classes for --model or --data, by name; none for other settings."""
    package = {"model": "lit_linformer.tasks", "data": "lit_linformer.data"}.get(key)
    return {} if package is None else sources.exported(package)


def find(key: str, path: Any) -> sources.Declared | None:
    """The class that a name of this package or a class path stands for; None if no file defines it."""
    return (exported(key).get(path) or sources.find(path)) if isinstance(path, str) else None


def _declared(key: str, path: Any) -> sources.Declared:
    if (found := find(key, path)) is None:
        raise Unreadable(f"{key} {path}")
    return found


def _columns(lines: list[Line], width: int) -> list[str]:
    """`--name value` with the description beside it, or below if it is long, cut to fit on a screen."""
    left = [_typed(line) for line in lines]
    column = min(max(map(len, left)) + 4, width * 9 // 20 + 2)
    for most in (4, 3, 2):  # lines of a description
        found: list[str] = []
        for line, setting in zip(lines, left, strict=True):
            parts = _wrapped(_told(line, most * (width - column)), width - column)
            beside = parts.pop(0) if len(setting) + 4 <= column and parts else ""
            whole = setting if len(setting) + 2 <= width else f"{setting[: width - 3]}…"
            found.append(f"  {whole}".ljust(column if beside else 0) + beside)
            found += (" " * column + part for part in parts)
        if len(found) < SCREEN:
            break
    return found


def _typed(line: Line) -> str:
    return "--trainer.callbacks+ NAME" if line.name == "trainer.callbacks" else f"--{line.name} {shown(line.value)}"


def _told(line: Line, room: int) -> str:
    """Description, allowed values, and the default if the value differs; the description is cut to the room there is."""
    other = line.default is not None and line.default is not sources.NotGiven and line.value != line.default
    default = f" (default {shown(line.default)})" if other else ""
    if line.name == "trainer.callbacks" and line.value:
        default = f" (now {shown(line.value)})"
    first, _, rest = line.words.rstrip(".").partition(" ")
    words = " ".join([first.lower() if first[1:].islower() or first == "A" else first, rest])
    tail = f"; {line.allowed}{default}" if line.allowed else default
    if len(words + tail) > room - 8 and line.allowed.startswith(NUMBERS):
        tail = default
    return textwrap.shorten(words, max(room - len(tail) - 8, 48), placeholder=" …") + tail


def shown(value: Any) -> str:
    """A value as a user types it; a class by its name."""
    if isinstance(value, list | tuple):
        parts = [shown(one) for one in value]
        return ", ".join(parts) if any(isinstance(one, dict) for one in value) else f"[{','.join(parts)}]"
    if isinstance(value, dict):
        if "class_path" not in value:
            return f"'{yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()}'"
        return str(value["class_path"]).rpartition(".")[2]
    if value is None:
        return "null"
    if value is sources.NotGiven:
        return "…"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'"{text}"' if not text or set(text) & set(" '\"<>|&;()$*?") else text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)
