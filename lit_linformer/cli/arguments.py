"""What every command's parser has: the arguments beside Lightning's own, and the classes that config files name."""

import importlib
import re
import textwrap
from pathlib import Path

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from lit_linformer.callbacks import LastCheckpoint, Progress, Throughput, best_checkpoint
from lit_linformer.cli.often_changed import RUN
from lit_linformer.utils.configs import config_files


class RangesInWords(DefaultHelpFormatter):
    """`type: float (more than 0)` for what jsonargparse calls `type: Annotated[float, more than 0]`, classes by their names."""

    def format_help(self) -> str:
        text = re.sub(r"Annotated\[(\w+),(\s+)([^][]*)\]", r"\1\2(\3)", super().format_help())
        return re.sub(r"( *)(\S[^\n]*)?,(\s+)known\s+subclasses:([^)]*)\)", _names_alone, text)


def _names_alone(found: re.Match[str]) -> str:
    """The names of the classes for their paths, each of which `python run.py list` tells more about."""
    names = [path.rpartition(".")[2] for path in "".join(found[4].split()).split(",")]
    before = f"{found[1]}{found[2] or ''}, or one of"
    indent = " " * min(len(found[1]), 24)
    return "\n".join(
        textwrap.wrap(f"{before.strip()} {', '.join(names)})", 79, initial_indent=indent, subsequent_indent=indent)
    )


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """What every command has in addition to Lightning's own: the run's name and the callbacks that are always there."""
    for name in ("name", "overwrite"):
        default, words = RUN[name]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=words)
    parser.add_lightning_class_args(best_checkpoint, "best")
    parser.add_lightning_class_args(LastCheckpoint, "last")  # after best, whose state it keeps
    parser.add_lightning_class_args(Throughput, "throughput")
    parser.add_lightning_class_args(Progress, "progress")  # after throughput, which it shows


def classes_in_configs(argv: list[str]) -> dict[str, str]:
    """{"model": class path, "data": class path}, as far as the --config files name them."""
    found = {}
    for value in config_files(argv):
        if not Path(value).is_file():
            continue
        try:
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue
        for key in ("model", "data"):
            section = content.get(key) if isinstance(content, dict) else None
            path = section.get("class_path") if isinstance(section, dict) else None
            if isinstance(path, str) and _is_class(path):
                found[key] = path
    return found


def _is_class(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        return isinstance(getattr(importlib.import_module(module), name, None), type)
    except (ImportError, ValueError):
        return False
