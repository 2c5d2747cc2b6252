"""The settings that --config files and a command line give, read without the parser, for pages that must appear at once.

Settings that the parser would refuse are accepted here.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from lit_linformer.utils.configs import check_configs, config_contents, config_files, configs_first

REFERENCE = re.compile(r"\$\{([^}]*)\}")
CLOCK = re.compile(r"[1-9]\d*(:\d+)+")  # YAML reads 1:30:00 as 5,400, in base 60, but not 01:30:00
CLASSES = ("model", "data")
TEXTS = ("data.text", "data.text_pair")
KINDS = ("model.encoder.attention", "model.encoder.projection")
CLASS = ("class_path", "init_args", "dict_kwargs")
OPTIONS = tuple(f"{kind}_options" for kind in KINDS)  # which depend on the kind


def given_settings(argv: list[str]) -> dict[str, Any]:
    """{setting: value}, later values overriding earlier ones, spelt as on the command line: model.lr; model for the class path.

    Raises ValueError, in one line, for a --config that is not a settings file.
    """
    check_configs(argv)
    found: dict[str, Any] = {}
    for _, key, value in walk(argv):
        _put(found, key, value)
    return {key: _resolved(value, found) for key, value in found.items()}


def for_parser(argv: list[str]) -> list[str]:
    """The command line in the parser's order: --config, the classes of model and data, then all other settings.

    Classes that no file names come before --config. Options of an attention or projection that is replaced are reset."""
    words = configs_first(argv)
    at = 1 + 2 * len([*config_files(argv)])
    named = {key for _, content in config_contents(argv) for key, value in content.items() if names_class(value)}
    ahead, classes, others = _classes_apart(words[at:], named)
    words[at:] = _dashes_joined([*classes, *others])
    for files, name in sorted(_outdated(argv), reverse=True):
        words[1 + 2 * files : 1 + 2 * files] = [f"--{name}", "{}"]
    words[1:1] = ahead
    return [_as_meant(*pair) for pair in itertools.pairwise(["", *words])]


def names_class(section: Any) -> bool:
    """Whether a file's section for the model or the data names the class; that of an overlay does not."""
    return isinstance(section, str) or (isinstance(section, dict) and "class_path" in section)


def _classes_apart(words: list[str], named: set[str]) -> tuple[list[str], list[str], list[str]]:
    """Words that name the class of model or data if no file does so, those that replace a file's class, and all others."""
    left, ahead, classes, others = list(words), [], [], []
    while left:
        word = left.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.removesuffix(".class_path")
        if not word.startswith("--") or name not in CLASSES:
            others.append(word)
            continue
        found = classes if name in named else ahead
        found.append(word)
        if not equals and left and not left[0].startswith("--"):
            found.append(left.pop(0))
    return ahead, classes, others


def _dashes_joined(words: list[str]) -> list[str]:
    """--model.shift=-1e-3 for --model.shift -1e-3, which argparse takes for an option, unlike -0.001; --name=-x, too."""
    joined: list[str] = []
    for word in words:
        value = word.startswith("-") and not word.startswith("--") and word not in ("-c", "-h")
        if value and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def walk(argv: list[str]) -> Iterator[tuple[str, str, Any]]:
    """(file, key at its top, value) of the --config files, then ("", setting, value) of the command line's other words.

    The value is None for options that ``for_parser`` resets, at the point where it does.
    """
    outdated = [*_outdated(argv)]
    sections = [(file, content.items()) for file, content in config_contents(argv)]
    for number, (file, pairs) in enumerate([*sections, ("", _typed_values(argv))]):
        yield from (("", name, None) for before, name in outdated if before == number)
        yield from ((file, str(key), value) for key, value in pairs)


def _typed_values(argv: list[str]) -> Iterator[tuple[str, Any]]:
    """(setting, its value as YAML reads it, or True if it has none) of a command line, without --config."""
    for name, text in typed_words(argv):
        yield name, True if text is None else text if _is_text(name, text) else as_read(text)


def typed_words(argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """(setting, its text, or None if it has none) of a command line, without --config, and without .init_args in names."""
    for word, following in itertools.zip_longest(argv, argv[1:]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in ("--config", "--help", "--help_all", "--print_config"):
            missing = following is None or following.startswith("--")
            yield name[2:].replace(".init_args", ""), value if equals else None if missing else following


def stray_words(argv: list[str]) -> Iterator[str]:
    """Words that are neither a setting nor the value after one."""
    for before, word in itertools.pairwise(argv):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            yield word


def one_dash(argv: list[str]) -> Iterator[str]:
    """Names with one dash, as in `-ckpt_path last`, which the parser reads as `-c kpt_path`."""
    for word in _dashes_joined(argv):
        name = word.partition("=")[0]
        if name.startswith("-") and not name.startswith("--") and name not in ("-c", "-h"):
            yield name


def as_list(value: Any) -> list[Any]:
    """The values of a setting that takes one or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def beside_class_path(value: Any) -> str | None:
    """A key beside class_path, or init_args, of one or several classes as a file has them."""
    return next((str(key) for one in as_list(value) if isinstance(one, dict) for key in one if key not in CLASS), None)


def as_clock(text: str) -> str:
    """1:30:00 as 01:30:00, which YAML reads as text; any other text as it is."""
    return f"0{text}" if CLOCK.fullmatch(text) else text


def _outdated(argv: list[str]) -> Iterator[tuple[int, str]]:
    """(--config files before it, options) for each file, or command line, that replaces the kind that has these options."""
    given: dict[str, Any] = {}
    for before, content in enumerate([*(content for _, content in config_contents(argv)), dict(_typed_values(argv))]):
        new: dict[str, Any] = {}
        for key, value in content.items():
            _put(new, str(key), value)
        for kind, options in zip(KINDS, OPTIONS, strict=True):
            replaced = kind in new and kind in given and new[kind] != given[kind]
            if replaced and any(name.startswith(options) for name in given):
                yield before, options
                given = {name: value for name, value in given.items() if not name.startswith(options)}
        given |= new


def _as_meant(name: str, word: str) -> str:
    """Rewrites what the parser would misread: a text "Note: <mask>", a pattern "# ", a time 1:00:00, null for options."""
    option, equals, value = word.partition("=")
    if not equals or not option.startswith("--"):
        option, value = name, word
    if _is_text(option[2:], value):
        value = re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)  # a shell's ${HOME} refers to no setting
        if value.startswith("#") or isinstance(as_read(value), dict | list):
            value = json.dumps([value])
    elif option[2:] == "data.document_start" and value.startswith("#") and as_read(value) is None:
        value = f"^{value}"
    elif option[2:] in OPTIONS and value == "null":  # which jsonargparse refuses within the encoder
        value = "{}"
    else:
        value = as_clock(value)
    return f"{option}={value}" if option != name else value


def _is_text(name: str, value: str) -> bool:
    """Whether a setting's value is taken literally: texts to predict, unless they are a list."""
    return name in TEXTS and value != "null" and not value.startswith("[")


def as_read(text: str) -> Any:
    """What YAML makes of a word; the word itself if it is not valid YAML, such as an unclosed bracket."""
    if CLOCK.fullmatch(text):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text


def _put(found: dict[str, Any], key: str, value: Any) -> None:
    key = key.replace(".init_args", "")
    if key.endswith(".class_path") and key.removesuffix(".class_path") in CLASSES:
        key = key.removesuffix(".class_path")
    section = key.partition(".")[0]
    if key.endswith("+"):  # one more
        found[key[:-1]] = [*as_list(found.get(key[:-1])), *as_list(value)]
    elif key in CLASSES and isinstance(value, str):
        if value != found.get(key, value):  # references to other settings do not survive a change of class
            for name in [name for name, old in found.items() if name.startswith(f"{key}.") and REFERENCE.search(str(old))]:
                del found[name]
        found[key] = value
    elif not isinstance(value, dict) or key.count(".") > 2 or key in OPTIONS:
        for name in [name for name in found if (value is None or key in OPTIONS) and name.startswith(f"{key}.")]:
            del found[name]
        found[key] = value
    elif key in CLASSES or (value.get("class_path") is None and (section in CLASSES or key == section)):
        if value.get("class_path") is not None:
            _put(found, key, value["class_path"])
        arguments = value.get("init_args")
        for name, inner in {**value, **(arguments if isinstance(arguments, dict) else {})}.items():
            if name not in ("class_path", "init_args"):
                _put(found, f"{key}.{name}", inner)
    else:
        found[key] = value


def _resolved(value: Any, found: dict[str, Any]) -> Any:
    """The value with ${model.init_args.lr} replaced by that setting's value, if it has one."""
    for _ in range(5):  # references to references …
        if not isinstance(value, str) or not (inner := REFERENCE.search(value)):
            break
        name = inner[1].replace(".init_args", "")
        if name not in found:
            break
        value = found[name] if inner[0] == value else value.replace(inner[0], str(found[name]))
    return value
