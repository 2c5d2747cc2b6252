"""Settings of the commands that are not Lightning's: a table, read by argparse without importing torch.

    SETTINGS = {"lengths": Setting(listed(whole("N", 1)), "n, tokens a sequence", [512, 1024]), "overwrite": Setting(FLAG, "…")}
    settings = parse("benchmark", __doc__, SETTINGS, argv)

The command line: `--lengths 512 1024`, `--lengths=512,1024`, `--lengths [512,1024]`, `--overwrite true` or `--overwrite`.
"""

import argparse
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import yaml

from lit_linformer.utils.errors import SettingError, UserError, meant, without_torch

Range = without_torch("ranges").Range


@dataclass(frozen=True)
class Kind:
    """The values that a setting accepts.

    Args:
        name: the placeholder that --help shows.
        read: (setting, text) → the value; raises ValueError for a bad one.
        several: whether it accepts several words.
        lists: whether each of these may be a list, such as 0,3 or [0, 3].
    """

    name: str
    read: Callable[[str, str], Any] = lambda where, text: text
    several: bool = False
    lists: bool = False


@dataclass(frozen=True)
class Setting:
    """A setting of the table; a default of None leaves the choice to the command."""

    kind: Kind
    help: str
    default: Any = None
    required: bool = False


def parse(command: str, doc: str | None, settings: dict[str, Setting], argv: list[str]) -> dict[str, Any]:
    """{setting: its value or default}. ValueError, in one line, for bad input; --help prints `doc` and exits."""
    needed = "".join(f"--{name} {setting.kind.name} " for name, setting in settings.items() if setting.required)
    head, _, rest = (doc or "").partition("\n\n")  # python -OO has no docstrings
    argv = ["--help" if word == "--help_all" else word for word in argv]  # these commands have one help page
    parser = argparse.ArgumentParser(
        usage=f"python run.py {command} {needed}[--SETTING VALUE …]", description=head, epilog=rest, allow_abbrev=False,
        exit_on_error=False, formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
    )  # fmt: skip
    for name, setting in settings.items():
        told = setting.default in (None, "", []) or "default" in setting.help
        shown = setting.help if told else f"{setting.help} (default {_shown(setting.default)})"
        # A repeated list replaces the earlier one; other repeated words add up.
        words: dict[str, Any] = (
            {"nargs": "+", "action": "store" if setting.kind.lists else "extend"} if setting.kind.several else {}
        )
        words |= {"nargs": "?", "const": "true"} if setting.kind is FLAG else {}
        parser.add_argument(f"--{name}", metavar=setting.kind.name, help=shown.replace("%", "%%"), **words)
    try:
        given, unknown = parser.parse_known_args(_joined(argv, settings))
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").removeprefix("--")
        raise UserError(f"--{name} has no value", settings[name].kind.name) from error
    if unknown:
        word = next((word for word in unknown if word.startswith("--")), unknown[0]).partition("=")[0]
        known = [f"--{name}" for name in settings]
        wrong = f"unknown setting {word!r} of {command}"
        if word[:1] != "-":
            wrong = f"{word!r} is neither a setting of {command} nor the value of one"
        raise UserError(f"{wrong}{meant(word, known)}", ", ".join(known))
    found = {}
    for name, setting in settings.items():
        value = getattr(given, name)
        if value is None and setting.required:
            raise UserError(f"--{name} is not given", f"{setting.kind.name}, {setting.help}")
        found[name] = setting.default if value is None else read(name, setting.kind, value)
    return found


def read(name: str, kind: Kind, words: str | list[str]) -> Any:
    """The value of a setting's words."""
    if not kind.several:
        return kind.read(name, words)  # type: ignore[arg-type]
    parts = [part for word in words for part in word.strip("[]").replace(",", " ").split()] if kind.lists else words
    return [kind.read(name, part) for part in parts] if parts else [kind.read(name, " ".join(words))]


def _joined(argv: list[str], settings: dict[str, Setting]) -> list[str]:
    """argparse accepts a value that begins with a dash only after =, and several values only after a space."""
    kinds = {f"--{name}": setting.kind for name, setting in settings.items()}
    words, left = [], list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        kind = kinds.get(name)
        if kind is None or kind is FLAG:  # what follows a flag need not be its value
            words.append(word)
        elif kind.several:
            words += [name, value] if equals else [word]
        elif not equals and left and left[0] not in kinds:
            words.append(f"{word}={left.pop(0)}")
        else:
            words.append(word)
    return words


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def word(name: str) -> Kind:
    """Any word."""
    return Kind(name)


def mapping(name: str) -> Kind:
    """Settings by name, in YAML: {window: 16}."""
    return Kind(name, _check_mapping)


def several(kind: Kind) -> Kind:
    """Several words of a kind, each taken as it is: --run runs/a runs/b, or --run runs/a --run runs/b."""
    return replace(kind, several=True)


def listed(kind: Kind) -> Kind:
    """Several words of a kind, also as a list: 0 3, or 0,3, or [0, 3]."""
    return replace(kind, several=True, lists=True)


def choice(*allowed: str, name: str = "") -> Kind:
    return Kind(name or "|".join(allowed), partial(check_choice, allowed=allowed))


def number(name: str, least: float | None = None, most: float | None = None, above: float | None = None) -> Kind:
    return Kind(name, partial(check_number, least=least, most=most, above=above))


def whole(name: str, least: int = 0, most: int | None = None) -> Kind:
    return Kind(name, partial(check_number, whole=True, least=least, most=most))


FLAG = Kind("true|false", lambda where, text: check_choice(where, text, ("true", "false")) == "true")


def check_choice(where: str, value: Any, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(repr(one) if "," in one else one for one in allowed)
        raise SettingError(where, value, names, more=meant(str(value), allowed))
    return value


def _check_mapping(where: str, text: str) -> dict[str, Any]:
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        value = yaml.safe_load(text)
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            return value
    raise SettingError(where, text, "settings by name, as '{window: 16}'")


def check_number(
    where: str,
    text: Any,
    whole: bool = False,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> float:
    """The number that ``text`` is; SettingError if it is outside the Range of these bounds."""
    allowed = Range(least=least, above=above, most=most)
    with contextlib.suppress(TypeError, ValueError):
        value = int(text) if whole else float(text)
        if value in allowed:
            return value
    bounds = "" if least is None and above is None else f", {allowed}"
    raise SettingError(where, text, f"a{' whole' * whole} number{bounds}")


def check_device(name: str) -> str:
    """The device for auto, cpu, cuda or cuda:N; ValueError for one that this machine lacks."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    check_choice("device", name, allowed)
    if name in ("auto", "cuda"):
        return "cuda:0" if count else "cpu"
    return name
