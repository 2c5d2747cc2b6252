"""All settings of a command: those added to Lightning's own, --help_all, and types for error messages."""

import inspect
import re
import textwrap
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from lit_linformer import callbacks
from lit_linformer.cli.class_paths import classes_given
from lit_linformer.cli.defaults import ALWAYS_THERE, RUN, TRAINER_DEFAULTS
from lit_linformer.cli.trainer import RunTrainer
from lit_linformer.model import EncoderConfig
from lit_linformer.utils import compat

CALLBACKS = {key: getattr(callbacks, path.rpartition(".")[2]) for key, path in ALWAYS_THERE.items()}


def settings_help(argv: list[str]) -> str:
    """The settings of command ``argv[0]``, including those of the classes that its --config files name."""
    parser = _settings_parser(argv)
    parser.usage = f"python run.py {argv[0]} --config FILE [--config OVERLAY …] [--SETTING VALUE …]"
    first = "The defaults are those of the classes; --help shows the values that the configs give.\n\n"
    return first + parser.format_help()


def settings_of(argv: list[str]) -> dict[str, Any]:
    """{setting: its type} of a command line, including all of Lightning's."""
    return types_of(_settings_parser(argv))


def types_of(parser: ArgumentParser) -> dict[str, Any]:
    """{setting: its type} of a parser."""
    actions = (action for action in compat.actions(parser) if not action.dest.endswith(".help"))
    return {action.dest: compat.type_of(action) or action.type for action in actions}


def _settings_parser(argv: list[str]) -> Any:
    """A parser that parses nothing: unlike the real one it knows the arguments of the model's and the data's class."""

    class SettingsParser(ArgumentParser):
        def add_lightning_class_args(self, lightning_class: Any, key: str) -> None:
            add = self.add_class_arguments if inspect.isclass(lightning_class) else self.add_function_arguments
            add(lightning_class, key)

    parser = SettingsParser(add_help=False, description=None, formatter_class=RangesInWords)
    parser.add_argument("--config", help="YAML file; a later one overrides an earlier one.")
    parser.add_argument("--ckpt_path", help=RUN["ckpt_path"][1])
    parser.add_argument("--seed_everything", type=int, default=RUN["seed_everything"][0], help=RUN["seed_everything"][1])
    add_run_arguments(parser)
    for key, settings in classes_given(argv).items():
        optional = inspect.signature(settings).parameters.get("encoder")
        if optional is None or optional.default is not None:
            parser.add_class_arguments(settings, key)
            continue
        # If the encoder is optional, jsonargparse takes its settings but would not list them.
        parser.add_class_arguments(settings, key, skip={"encoder"})
        parser.add_class_arguments(EncoderConfig, f"{key}.encoder")
    parser.add_class_arguments(RunTrainer, "trainer")
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    return parser


class RangesInWords(DefaultHelpFormatter):
    """`type: float (more than 0)` for what jsonargparse calls `type: Annotated[float, more than 0]`, classes by their names."""

    def format_help(self) -> str:
        text = re.sub(r"Annotated\[(\w+),(\s+)([^][]*)\]", r"\1\2(\3)", super().format_help())
        return re.sub(r"( *)(\S[^\n]*)?,(\s+)known\s+subclasses:([^)]*)\)", _names_alone, text)


def _names_alone(found: re.Match[str]) -> str:
    """Class names instead of class paths; `python run.py list` tells more about each."""
    names = [path.rpartition(".")[2] for path in "".join(found[4].split()).split(",")]
    before = f"{found[1]}{found[2] or ''}, or one of"
    indent = " " * min(len(found[1]), 24)
    return "\n".join(
        textwrap.wrap(f"{before.strip()} {', '.join(names)})", 79, initial_indent=indent, subsequent_indent=indent)
    )


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """Adds what every command has besides Lightning's arguments: the run's name and the callbacks that are always there."""
    for name in ("name", "overwrite"):
        default, words = RUN[name]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=words)
    for key, declared in CALLBACKS.items():
        parser.add_lightning_class_args(declared, key)
