"""Reading --config files, which are checked strictly before anything else; errors name the file and the line."""

import codecs
import contextlib
import difflib
import itertools
import locale
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.sources import first_sentence

FLAGS = ("--config", "-c")
SETTINGS_FILE = "a file with settings, as conf/quickstart.yaml"
LARGEST = 20_000  # values in a file, with aliases expanded: the longest config here has 60
DEEPEST = 50
OCTAL = re.compile(r"[-+]?0[0-7]+")
TAGS = [f"tag:yaml.org,2002:{kind}" for kind in "null bool int float str seq map timestamp merge value".split()]


class _Dumper(yaml.SafeDumper):
    """Quotes text that is a number in YAML 1.2, which the parser reads, such as the name 1e-3.

    Writes an Enum's member as its value: Lightning's Timer has one, Interval.step, as a default.
    """


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as the parser does."""


for one in (_Dumper, _Loader):
    one.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+"), list("-+0123456789"))
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def as_yaml(content: Any) -> str:
    """Settings as the text of a --config file, from which they are read back unchanged."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def config_files(argv: list[str]) -> Iterator[str]:
    """The values of --config and -c on a command line."""
    words = _split(argv)
    yield from (value for flag, value in itertools.pairwise([*words, ""]) if flag in FLAGS)


def config_contents(argv: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, its settings) of each --config; a file without settings is left out, since ``check_configs`` refuses it."""
    for file in config_files(argv):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            content = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
            if isinstance(content, dict):
                yield file, content


def configs_first(argv: list[str]) -> list[str]:
    """The same command line with its --config before all other settings, which override them wherever they stand."""
    words, files, others = iter(_split(argv)), [], []
    for word in words:
        if word in FLAGS:
            files += [word, *itertools.islice(words, 1)]
        else:
            others.append(word)
    return [*others[:1], *files, *others[1:]]


def _split(argv: list[str]) -> list[str]:
    starts = tuple(f"{flag}=" for flag in FLAGS)
    return [part for word in argv for part in (word.split("=", 1) if word.startswith(starts) else [word])]


@dataclass(frozen=True)
class Head:
    """What the comment at the top of a config file says: its first sentence, what it costs, and which command reads it."""

    sentence: str
    cost: str
    command: str


def head(path: str | Path) -> Head:
    """Reads `# A sentence.`, `# Cost: …`, up to the next line that begins a paragraph, and the first command line."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    paragraphs: list[str] = []
    for line in (line.removeprefix("#").removeprefix(" ") for line in lines):
        if not paragraphs or line.startswith(("Cost: ", " ")) or paragraphs[-1].startswith(" "):
            paragraphs.append(line)
        else:
            paragraphs[-1] += f" {line}"
    cost = next((text.removeprefix("Cost: ") for text in paragraphs if text.startswith("Cost: ")), "")
    command = re.search(r"run\.py (\w+)", " ".join(paragraphs))
    sentence = first_sentence(paragraphs[0] if paragraphs else "").rstrip(":")
    return Head(sentence, first_sentence(cost), command[1] if command else "fit")


def check_configs(argv: list[str]) -> None:
    """Raises ValueError, in one line, for a --config that is not a file of settings, each of them once, or nested too deep."""
    for setting, value in itertools.pairwise(["", *argv]):
        if _depth(value) > DEEPEST:
            raise SettingError(setting.lstrip("-"), value[:20], "less", more=f"…, nested deeper than {DEEPEST} levels")
    for name in config_files(argv):
        if not name or name.startswith("--"):
            raise UserError("--config has no value", SETTINGS_FILE)
        text, encoding = read_config(Path(name)), codecs.lookup(locale.getpreferredencoding(False)).name
        if not text.isascii() and encoding != "utf-8":  # in which the parser opens files
            what = f"{name} has characters beyond ASCII, which this locale reads as {encoding}"
            raise UserError(what, "PYTHONUTF8=1 before the command, or a locale in UTF-8")


# The command that reads a file with this key at its top.
COMMANDS = {"axes": "grid", "space": "tune --space", "trainer": "fit", "model": "fit", "data": "fit"}


def check_command(path: Path, keys: Iterable[str], command: str, what: str) -> None:
    """Raises UserError for a file of another command, recognised by its keys."""
    of = [COMMANDS[key] for key in keys if key in COMMANDS]
    if of and command not in of:
        raise UserError(f"{path} is a file for `{of[0]}`", what)


def _similar(path: Path) -> str:
    """`; did you mean 'conf/quickstart.yaml'?`: a config of the same name in another folder, or of a similar one."""
    files = {str(file.with_suffix("")): file for file in (*Path("conf").rglob("*.yaml"), *path.parent.glob("*.yaml"))}
    alike = [name for name, file in files.items() if file.name == path.name]
    near = difflib.get_close_matches(str(path).removesuffix(path.suffix), alike or files, 1, 0.0 if alike else 0.6)
    return f"; did you mean '{files[near[0]]}'?" if near else ""


def read_config(path: Path, what: str = SETTINGS_FILE) -> str:
    """The text of a file that holds a YAML mapping; ValueError or OSError if it does not."""
    if not path.is_file():
        if (run := path / "config.yaml").is_file():
            raise SettingError("config", str(path), str(run), more=", which is no file")
        raise SettingError("config", str(path), what, more=f", which is no file{_similar(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        if _depth(text) > DEEPEST:
            raise RecursionError
        node = yaml.compose(text, yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#x}", what) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = _reason(text.splitlines(), mark.line) or " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise UserError(f"{path} is no valid YAML at line {mark.line + 1}, column {mark.column + 1}: {reason}", what) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}", what) from error
    except RecursionError as error:
        raise UserError(f"{path} is nested deeper than {DEEPEST} levels", what) from error
    if node is None:
        raise UserError(f"{path} is empty", what)
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value[:40]!r}"
        raise UserError(f"{path} is {kind}", what)
    _measure(node, path, {}, 0)
    return text


def _reason(lines: list[str], at: int) -> str:
    """The reason in plain words, if the indentation or a colon is wrong; "" otherwise."""
    line = lines[at] if at < len(lines) else ""
    above = [place for place in range(at) if lines[place].strip() and not lines[place].lstrip().startswith("#")]
    if not line.strip():
        return ""
    if line.startswith("\t"):
        return "it begins with a tab; YAML is indented with spaces"
    deeps = [len(text) - len(text.lstrip(" ")) for text in (line, *(lines[place] for place in above))]
    if above and deeps[0] > deeps[-1] and re.match(r"\s*[\w.-]+:\s+[^\s#|>&]", lines[above[-1]]):
        return f"{line.strip()!r} is indented deeper than line {above[-1] + 1}, which has a value already"
    if above and re.match(r"\s*[\w.-]+:(\s|$)", line) and deeps[0] not in deeps[1:] and deeps[0] < deeps[-1]:
        return f"{line.strip()!r} is indented as no line above it is"
    if re.match(r"\s*[\w.-]+:\s+[^'\"{[|>].*:\s", line):
        return f"{line.strip()!r} has a second colon; a text with one needs quotes"
    return ""


def _depth(text: str) -> int:
    """The deepest nesting of brackets, in which YAML's reader takes quadratic time."""
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _measure(node: yaml.Node, path: Path, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for with its aliases expanded; each node is visited once."""
    if id(node) in known:
        return known[id(node)]
    if depth > DEEPEST:
        raise UserError(f"{path} is nested deeper than {DEEPEST} levels at line {node.start_mark.line + 1}", "less")
    known[id(node)] = LARGEST + 1  # an alias within its own anchor never ends
    if node.tag not in TAGS:
        raise UserError(f"{path} has the tag {node.tag!r} at line {node.start_mark.line + 1}", "plain YAML")
    children = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, path)
        children = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    elif node.tag.endswith((":int", ":float")) and ":" in node.value:
        read = f"at line {node.start_mark.line + 1}, which YAML reads as {yaml.safe_load(node.value):,}"
        raise UserError(f"{path} has {node.value} {read}", f'"{node.value}", in quotes')
    elif OCTAL.fullmatch(node.value) and node.tag.endswith(":int") and (read := yaml.safe_load(node.value)) != int(node.value):
        what = f"{path} has {node.value} at line {node.start_mark.line + 1}, which YAML reads as {read}, in base 8"
        raise UserError(what, f'{int(node.value)}, or "{node.value}", in quotes')
    elif node.value.count("${") > node.value.count("}"):
        raise UserError(f"{path} opens a ${{ at line {node.start_mark.line + 1} and does not close it", "${NAME}")
    size = 1 + sum(_measure(child, path, known, depth + 1) for child in children)
    if size > LARGEST:
        raise UserError(
            f"{path} holds more than {LARGEST} values at line {node.start_mark.line + 1} with its aliases written out", "fewer"
        )
    known[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode, path: Path) -> None:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{path} has a key that is no name at line {line}", "the name of a setting")
        if key.value in seen:
            raise UserError(f"{path} names {key.value!r} twice, at lines {seen[key.value]} and {line}", "once")
        if key.value == "class_path" and not value.tag.endswith(":str"):
            raise UserError(f"{path} gives a class_path that is no name at line {line}", "package.module.Class")
        if key.value == "init_args" and value.tag.endswith(":null"):
            raise UserError(f"{path} has nothing under init_args at line {line}", "settings by name, or no init_args at all")
        seen[key.value] = line
