"""What a command's settings are: for --help, and for messages that name one of them."""

import inspect
from typing import Any

from jsonargparse import ArgumentParser

from lit_linformer.cli.arguments import DEFAULT_CLASSES, RangesInWords, add_run_arguments, classes_in_configs
from lit_linformer.cli.class_paths import class_of
from lit_linformer.cli.trainer import RunTrainer
from lit_linformer.model import EncoderConfig
from lit_linformer.utils import compat

# Of the Trainer's fifty, those that are often changed; `--help_all` lists every one.
TRAINER_SETTINGS = (
    "accelerator devices num_nodes strategy precision max_steps max_epochs accumulate_grad_batches gradient_clip_val "
    "val_check_interval check_val_every_n_epoch limit_val_batches num_sanity_val_steps log_every_n_steps callbacks logger "
    "fast_dev_run overfit_batches profiler default_root_dir"
).split()


def settings_help(argv: list[str]) -> str:
    """The settings of command ``argv[0]``, those of the classes that its --config files name included."""
    parser = _settings_parser(argv)
    parser.usage = f"python run.py {argv[0]} --config FILE [--config OVERLAY …] [--SETTING VALUE …]"
    return parser.format_help()


def settings_of(argv: list[str], **classes: str) -> dict[str, Any]:
    """{setting: its type} of a command line, every one of Lightning's too; ``classes``: of the model or data, by class path."""
    actions = compat.actions(_settings_parser(argv, classes, everything=True))
    return {action.dest: compat.type_of(action) or action.type for action in actions}


def known_keys(argv: list[str]) -> list[str]:
    return [action.dest for action in compat.actions(_settings_parser(argv))]


def _settings_parser(argv: list[str], classes: dict[str, str] | None = None, everything: bool = False) -> Any:
    """A parser that is only looked at: unlike the real one it knows the arguments of the model's and the data's class."""

    class SettingsParser(ArgumentParser):
        def add_lightning_class_args(self, lightning_class: Any, key: str) -> None:
            self.add_class_arguments(lightning_class, key) if inspect.isclass(lightning_class) else (
                self.add_function_arguments(lightning_class, key)
            )

    parser = SettingsParser(add_help=False, description=None, formatter_class=RangesInWords)
    parser.add_argument("--config", help="YAML file; a later one overrides an earlier one.")
    parser.add_argument("--ckpt_path", help="Checkpoint: a file, last, best, or auto (last if there is one).")
    parser.add_argument("--seed_everything", type=int, default=0, help="Seed of weights, order, masks and dropout.")
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
    hidden = set(inspect.signature(RunTrainer.__init__).parameters) - set(TRAINER_SETTINGS) - {"self"}
    parser.add_class_arguments(RunTrainer, "trainer", skip=set() if everything else hidden)
    return parser
