"""Finds the setting that the parser has refused, and says what its type accepts.

The parser's messages are not read: their wording may change, and for a setting that accepts several types they explain each.
Instead each given setting is tried by itself; the first one whose type does not accept the value is reported.
"""

import json
import re
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from lit_linformer.cli.class_paths import BASE_OF, BASES, NAMED, NO_CLASS, OURS, find_class, kinds
from lit_linformer.cli.given import (
    REFERENCE,
    TEXTS,
    as_clock,
    as_list,
    as_read,
    beside_class_path,
    given_settings,
    stray_words,
    typed_words,
)
from lit_linformer.cli.help import settings_of, types_of
from lit_linformer.cli.quick_checks import nearest
from lit_linformer.model.errors import shown
from lit_linformer.model.ranges import OneOf
from lit_linformer.utils import compat
from lit_linformer.utils.configs import config_files
from lit_linformer.utils.errors import SettingError, UserError

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping, as {name: value}",
    timedelta: "a duration, as 0:30:00",
}
BUILT = {*BASE_OF} - {*OURS}  # settings besides model and data whose classes have settings of their own
Types = dict[str, Any]


def refused(error: Exception, argv: list[str], parser: Any) -> UserError:
    """The error to raise for what a command's ``parser`` has raised; in the parser's own words if no setting is found."""
    types = types_of(parser) | settings_of(argv) | dict.fromkeys(OURS)  # all settings of these two are listed as well
    built: dict[str, list[tuple[str, dict[str, Any]]]] = {}  # {setting: [(class path, its settings)]}, for those in BUILT
    files = [word for file in config_files(argv) for word in ("--config", file)]
    given = given_settings(argv)
    nulls = {name for name, value in given.items() if value is None}
    for name, value in given_settings(files).items():
        if told := _refused(name, value, types) or _no_reference(name, given.get(name, value), types, nulls):
            return told
        if name in BUILT:
            if beside := beside_class_path(value):
                return _beside(name, beside)
            built[name] = list(_classes(value))
    for name, text in typed_words(argv):
        setting, added = name.removesuffix("+"), name.endswith("+")
        within = next((one for one in built if setting.startswith(f"{one}.")), None)
        if within is not None and built[within]:
            built[within][-1][1][setting.removeprefix(f"{within}.").removeprefix("init_args.")] = text
        elif text is None:
            none = UserError(f"{setting} has no value", allowed(types.get(setting)) or "one")
            return none if _section(setting, types) else _unknown(setting, types) or none
        elif setting in BUILT and (found := _found(setting, text)):
            if beside := beside_class_path(as_read(text)):
                return _beside(setting, beside)
            built[setting] = [*(built.get(setting, []) if added else []), *found]
        elif told := _refused(setting, text, types):
            return told
        elif added and setting in types and "list" not in str(types[setting]).lower():
            return UserError(f"--{name} adds to a list, but {setting} has one value", f"--{setting} VALUE")
    for setting, specs in built.items():
        for path, values in specs:
            if told := _refused_within(setting, path, values):
                return told
    for name, text in typed_words(argv):
        if text is not None and name not in TEXTS and REFERENCE.search(text):
            return SettingError(name, text, "a value of its own, since ${NAME} is read in files alone")
    for name, _ in typed_words(argv):
        owner = _owner(name, types)
        if owner not in ("", name) and str(given.get(owner)).islower():  # trainer.strategy ddp, whose class has settings
            return UserError(f"{name} is a setting of a class, and {owner} is {given[owner]!r}", f"--{owner} CLASS before it")
    for word in stray_words(argv):
        meant = f"; did you mean '--{word}'?" if word in types else ""
        return UserError(f"{word!r} is neither a setting nor the value of one{meant}", "--SETTING VALUE")
    return UserError(" ".join(str(error).split()))


def unwrapped(error: Exception) -> Exception:
    """The error that a class has raised, without the errors that the parser, which builds it, has wrapped around it."""
    inner: BaseException | None = error
    while inner is not None:
        *_, (frame, _) = traceback.walk_tb(inner.__traceback__)
        if isinstance(inner, Exception) and not frame.f_globals["__name__"].startswith("jsonargparse"):
            return inner
        inner = inner.__cause__
    return error


def _refused(name: str, value: Any, types: Types) -> UserError | None:
    """The error for one setting; None if its type accepts the value, or if it belongs to a class."""
    if (name in BASES and str(value).lower() not in NO_CLASS) or (name in NAMED and isinstance(value, dict)):
        read = as_read(value) if isinstance(value, str) else value
        if read == [] and name not in OURS:  # no callback, no logger
            return None
        paths = [path for path, _ in _classes(read)]
        unknown = [path for path in paths if not (find_class(path, name) or Path(path).is_file())]
        return None if paths and not unknown else SettingError(name, unknown[0] if unknown else value, kinds(name))
    section = _section(name, types)
    if section is not None and types.get(name) is None:
        settings = value in (None, "null") or isinstance(value, dict)
        return None if settings else SettingError(name, value, f"its settings by name, as {section}")
    if told := _unknown(name, types):
        return told
    if (owner := _owner(name, types)) != name and owner in BUILT - {*NAMED}:
        return UserError(f"{name} is given, but {owner} names no class", f"--{owner} CLASS before it")
    if owner != name and "class path" in (allowed(types[owner]) or "class path"):  # settings of that class, if it names one
        return None
    if owner != name:  # lr: {value: 1} in a file, too
        inner = {name.removeprefix(f"{owner}."): as_read(value) if isinstance(value, str) else value}
        name, value = owner, inner
    if REFERENCE.search(str(value)) or takes(types[name], value) or not (words := allowed(types[name])):
        return None
    read = as_read(value) if isinstance(value, str) else value
    if "text" not in words or isinstance(read, str):
        return SettingError(name, value, words)
    more = f", which YAML reads as {shown(read)}" if read is not value else ""
    words += ", in quotes where YAML reads it as something else"
    if words.startswith("a list") and isinstance(value, str) and (plain := re.fullmatch(r"\[([^\[\]\"'{}]*)\]", value)):
        parts = [part.strip() for part in plain[1].split(",")]
        words += f", here '{json.dumps(parts, ensure_ascii=False)}'"
    return SettingError(name, value, words, more)


def _section(name: str, types: Types) -> str | None:
    """A setting below that name, if there is one."""
    return next((one for one in types if one.startswith(f"{name}.")), None)


def _owner(name: str, types: Types) -> str:
    """The setting itself, or the one that it lies within; "": neither exists."""
    while name and name not in types:
        name = name.rpartition(".")[0]
    return name


def _unknown(name: str, types: Types) -> UserError | None:
    """The error for a name that is no setting, and does not lie within one that may have others below it."""
    owner = _owner(name, types)
    if owner and (owner == name or types[owner] is not None):
        return None
    return UserError(f"unknown setting '{name}'{nearest(name, list(types))}")


def _refused_within(setting: str, path: str, values: dict[str, Any]) -> UserError | None:
    """The error for the settings of a class that a setting names, such as a callback."""
    if (found := find_class(path, setting)) is None:
        return None
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_class_arguments(found)
    types = {f"{found.__name__}.{key}": hint for key, hint in types_of(parser).items()}
    for name, value in values.items():
        if told := _refused(f"{found.__name__}.{name}", value, types):
            return told
    for action in compat.actions(parser):
        if action.required and action.dest not in values:
            name = f"{found.__name__}.{action.dest}"
            return UserError(f"{name} is not given", allowed(types[name]) or "what its class says")
    return None


def _no_reference(name: str, value: Any, types: Types, nulls: set[str]) -> UserError | None:
    """The error for a ${setting} that does not exist: another class may not have it, or it lies within a null."""
    for to in REFERENCE.findall(str(value)):
        setting = to.replace(".init_args", "")
        if null := next((one for one in nulls if setting.startswith(f"{one}.")), None):
            return UserError(f"{name} refers to {setting}, and {null} is null", f"a value of its own, --{name} VALUE")
        if ":" not in to and not to.startswith(".") and setting not in types:
            own = f" (or give {name}, which refers to it, a value of its own)"
            return UserError(f"${{{to}}} in the config names no setting{nearest(setting, list(types))}{own}")
    return None


def _classes(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in as_list(value):
        path = one.get("class_path") if isinstance(one, dict) else one
        if isinstance(path, str):
            yield path, dict((one.get("init_args") or {}) if isinstance(one, dict) else {})


def _found(setting: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The classes that a word names, or describes as a file would; none if one of them does not exist."""
    found = list(_classes(as_read(text)))
    return found if all(find_class(path, setting) for path, _ in found) else []


def _beside(setting: str, key: str) -> UserError:
    return UserError(f"{setting} has {key} beside class_path", "under init_args")


def takes(hint: Any, value: Any) -> bool:
    """Whether the parser would accept a value for this type; text is read as YAML, as on a command line."""
    if hint is None or (not isinstance(hint, type) and get_origin(hint) is None):
        return True
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--value", type=hint)
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # a class's argument is read as YAML whatever its type
        value = as_read(value)
    try:
        if isinstance(value, str):
            parser.parse_args([f"--value={as_clock(value)}"])
        else:
            parser.parse_object({"value": value})
    except Exception:
        return False
    return True


def allowed(hint: Any) -> str | None:
    """What a type accepts, in words; None if it accepts an object."""
    words, names = list(dict.fromkeys(_in_words(hint))), ", ".join(dict.fromkeys(_names(hint)))
    words += [names] if names else []
    return ", or ".join(words) if words and None not in words else None


def _names(hint: Any) -> Iterator[str]:
    """The names and numbers that a Literal lists, also within a union."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _names(part)


def _in_words(hint: Any) -> Iterator[str | None]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], OneOf):
        yield repr(parts[1])
    elif origin is Annotated:
        (kind,) = _in_words(parts[0])
        yield f"{kind}, {parts[1]!r}"
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _in_words(part) if part is not NoneType else ()
    elif origin is Literal:
        return  # _names has these, each name of a union once
    elif origin in (list, tuple):
        yield f"a list, each {' or '.join(map(str, _in_words(parts[0])))}"
    elif isinstance(origin or hint, type):
        yield WORDS.get(origin or hint) or f"the class path of a {(origin or hint).__name__}"
    else:
        yield None
