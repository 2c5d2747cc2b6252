"""What a command's settings are, every one: for --help_all, and for messages that name one of them."""

import inspect
from typing import Any

from jsonargparse import ArgumentParser

from lit_linformer.cli.arguments import RangesInWords, add_run_arguments, classes_in_configs
from lit_linformer.cli.class_paths import class_of
from lit_linformer.cli.given import given_settings
from lit_linformer.cli.often_changed import DEFAULT_CLASSES, RUN, TRAINER_DEFAULTS
from lit_linformer.cli.short_help import exported
from lit_linformer.cli.trainer import RunTrainer
from lit_linformer.model import EncoderConfig
from lit_linformer.utils import compat


def settings_help(argv: list[str]) -> str:
    """The settings of command ``argv[0]``, those of the classes that its --config files name included."""
    given = given_settings(argv)
    named = {key: given[key] for key in DEFAULT_CLASSES if isinstance(given.get(key), str)}
    own = {key: exported(key)[name].path for key, name in named.items() if name in exported(key)}
    parser = _settings_parser(argv, {**named, **own})
    parser.usage = f"python run.py {argv[0]} --config FILE [--config OVERLAY …] [--SETTING VALUE …]"
    first = "The defaults are those of the classes; --help shows the values that the configs give.\n\n"
    return first + parser.format_help()


def settings_of(argv: list[str], **classes: str) -> dict[str, Any]:
    """{setting: its type} of a command line, every one of Lightning's too; ``classes``: of the model or data, by class path."""
    actions = compat.actions(_settings_parser(argv, classes))
    return {action.dest: compat.type_of(action) or action.type for action in actions}


def known_keys(argv: list[str]) -> list[str]:
    return [action.dest for action in compat.actions(_settings_parser(argv))]


def _settings_parser(argv: list[str], classes: dict[str, str] | None = None) -> Any:
    """A parser that is only looked at: unlike the real one it knows the arguments of the model's and the data's class."""

    class SettingsParser(ArgumentParser):
        def add_lightning_class_args(self, lightning_class: Any, key: str) -> None:
            self.add_class_arguments(lightning_class, key) if inspect.isclass(lightning_class) else (
                self.add_function_arguments(lightning_class, key)
            )

    parser = SettingsParser(add_help=False, description=None, formatter_class=RangesInWords)
    parser.add_argument("--config", help="YAML file; a later one overrides an earlier one.")
    parser.add_argument("--ckpt_path", help=RUN["ckpt_path"][1])
    parser.add_argument("--seed_everything", type=int, default=RUN["seed_everything"][0], help=RUN["seed_everything"][1])
    add_run_arguments(parser)
    for key, path in {**DEFAULT_CLASSES, **classes_in_configs(argv), **(classes or {})}.items():
        settings = class_of(path, key)
        optional = inspect.signature(settings).parameters.get("encoder")
        if optional is None or optional.default is not None:
            parser.add_class_arguments(settings, key)
            continue
        # Where the encoder may be left out, jsonargparse takes its settings but would not list them.
        parser.add_class_arguments(settings, key, skip={"encoder"})
        parser.add_class_arguments(EncoderConfig, f"{key}.encoder")
    parser.add_class_arguments(RunTrainer, "trainer")
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    return parser
