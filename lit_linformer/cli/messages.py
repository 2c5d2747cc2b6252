"""An error in one line, with the setting that was meant."""

import re
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lit_linformer.cli.quick_checks import nearest
from lit_linformer.utils.configs import config_files
from lit_linformer.utils.errors import user_error


def one_line(error: Exception, argv: list[str]) -> str | None:
    """One line for an error that a user can fix; None for what looks like a bug of ours, whose traceback is worth more."""
    if (told := user_error(error)) is not None:
        return told  # without what follows, which imports Lightning
    message = str(error).strip()
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from omegaconf.errors import OmegaConfBaseException

    from lit_linformer.cli.machines import connection_error

    if line := connection_error(error):
        return line
    if isinstance(error, OmegaConfBaseException):
        if key := re.search(r"Interpolation key '\.*([^']*)' not found", message):
            return f"${{{key[1]}}} in the config names no setting{_meant(key[1], argv)}{_refers(key[1], argv)}"
        return (
            f"a value in the config cannot be read: {message.splitlines()[0]}; allowed: ${{NAME}} for another setting's value"
        )
    if message.endswith("expected one argument") and argv[-1].startswith("-"):
        name = argv[-1].lstrip("-")
        return f"{name} has no value; allowed: {_allowed(name, argv) or 'one'}"
    if isinstance(error, ArgumentError | TypeError) and (line := _parser_error(message, argv)):
        return line
    if "Union subtypes" in message and (refused := _reasons(message)):
        return refused[0]  # the error of a class that the parser was building
    if twice := re.match(r"Found more than one stateful callback of type `(\w+)`", message):
        return f"trainer.callbacks names {twice[1]} twice; allowed: once, for a checkpoint keeps its state by that name"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | MisconfigurationException | ArgumentError | ModuleNotFoundError):
        return " ".join(message.split()) or None
    return None


def _parser_error(message: str, argv: list[str]) -> str | None:
    """jsonargparse's report on a union of classes, reduced to the setting and what is wrong with it."""
    from lit_linformer.cli.class_paths import CLASSES

    unknown = (
        re.search(r"[Oo]ption '([^']+)' is not accepted", message)
        or re.search(r"does not accept option '([^']+)'", message)
        or re.search(r"unrecognized arguments: --([^= \n]+)", message)
    )
    if unknown:
        return f"unknown setting '{unknown[1]}'{_meant(unknown[1], argv)}"
    if broken := re.search(r"Problems parsing config:.*line (\d+), column (\d+)\s*(.*)", message, re.DOTALL):
        return f"a --config file is no valid YAML at line {broken[1]}, column {broken[2]}: {' '.join(broken[3].split())}"
    wrong = re.findall(r"Expected (?:a|an) (.*?)\. Got value: (.*)", message)
    key = re.findall(r'Parser key "([^"]+)"', message)
    if wrong and key:
        name = _full_key(key[-1], argv)
        kind = _allowed(name, argv) or re.sub(r"<class '([^']+)'>", r"\1", wrong[0][0])
        return f"{name} is {wrong[0][1]!r}; allowed: {kind}"
    # The innermost of the unions is told first: what its key was given, and what it may be.
    innermost, _, value = message.partition("Given value: ")
    innermost = re.sub(r'^ "[^"]*":\s*', "", innermost.rpartition("Parser key")[2])
    types = re.findall(r"- Expected a <class '((?!NoneType)[^']+)'>$", innermost, re.MULTILINE)
    if key and value and (types or "Expected a typing.Literal" in innermost):
        name = _full_key(key[-1], argv)
        return f"{name} is {value.splitlines()[0]!r}; allowed: {_allowed(name, argv) or ' or '.join(types)}"
    if key and key[-1] in CLASSES and "Expected a path but" in message:
        return f"{key[-1]} is {value.strip()!r}; allowed: {CLASSES[key[-1]]}"
    if key and key[-1] in CLASSES and (lines := _reasons(innermost)):
        return f"{key[-1]}: {lines[0]}; allowed: {CLASSES[key[-1]]}"
    if key and (lines := _reasons(innermost)):
        return f"{_full_key(key[-1], argv)}: {lines[0]}"
    lines = _reasons(message)
    return f"{key[0]}: {lines[0]}" if key and lines else " ".join(lines[:2]) or None


def _reasons(message: str) -> list[str]:
    """jsonargparse's report without its own frame around what went wrong."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    frame = ("Parser key", "Does not validate", "Subtypes", "Errors:", "Problem", "Given value")
    return [line for line in lines if not line.startswith(frame) and line != "Expected a <class 'NoneType'>"]


def _allowed(name: str, argv: list[str]) -> str | None:
    """What the type of a setting takes, in words; None where it takes an object."""
    from lit_linformer.cli.help import settings_of

    hint = settings_of(argv).get(name)
    words, names = list(dict.fromkeys(_words(hint))), ", ".join(dict.fromkeys(_names(hint)))
    words += [names] if names else []
    return " or ".join(words) if words and None not in words else None


def _names(hint: Any) -> Iterator[str]:
    """The names, and numbers, that a Literal lists, in a union too."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _names(part)


def _words(hint: Any) -> Iterator[str | None]:
    from lit_linformer.model.ranges import OneOf  # with torch, by its package

    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], OneOf):
        yield repr(parts[1])
    elif origin is Annotated:
        (kind,) = _words(parts[0])
        yield f"{kind}, {parts[1]!r}"
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _words(part) if part is not NoneType else ()
    elif origin is Literal:
        return  # of several in a union each name is told once: _names
    elif origin in (list, tuple):
        yield f"a list, each {' or '.join(map(str, _words(parts[0])))}"
    else:
        yield {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint)


def _full_key(key: str, argv: list[str]) -> str:
    """model.lr for what the parser of the model's class calls lr; of several, the one that the command line names."""
    if given := [word[2:] for word in argv if word == f"--{key}" or (word.startswith("--") and word.endswith(f".{key}"))]:
        return given[0]
    return next((name for name in _known_keys(argv) if name == key or name.endswith("." + key)), key)


def _meant(key: str, argv: list[str]) -> str:
    """`; did you mean …?` with the nearest setting."""
    return nearest(key.replace("init_args.", ""), _known_keys(argv))


def _refers(key: str, argv: list[str]) -> str:
    """What takes the value of a setting that is not there: another class, of the user's say, may have no such setting."""
    texts = (Path(file).read_text(encoding="utf-8") for file in config_files(argv))
    found = next((match[1] for text in texts if (match := re.search(rf"(\w+): *\$\{{{re.escape(key)}\}}", text))), None)
    return f" (or give {found}, which refers to it, a value of its own)" if found else ""


def _known_keys(argv: list[str]) -> list[str]:
    from lit_linformer.cli.help import settings_of  # with Lightning, which most messages do without

    return list(settings_of(argv))
