"""LightningCLI, fitted to this project: a run directory by name, checkpoints by `last` and `best`, the command line wins."""

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.multiprocessing import ProcessExitedException

from lit_linformer.callbacks import (
    AtomicCheckpointIO,
    Curves,
    Finite,
    LastCheckpoint,
    LastValidation,
    OwedValidation,
    PredictionWriter,
    Preemption,
    Progress,
    RunResult,
    Throughput,
    best_checkpoint,
    best_of,
)
from lit_linformer.callbacks.owed import finish
from lit_linformer.cli.checks import check_settings
from lit_linformer.cli.class_paths import check_class_paths, class_of
from lit_linformer.cli.closing import closing_lines
from lit_linformer.cli.early import check_early
from lit_linformer.cli.failures import failure
from lit_linformer.cli.loggers import RunLoggers, RunParser
from lit_linformer.cli.machines import check_machine
from lit_linformer.cli.messages import RangesInWords, classes_in_configs
from lit_linformer.data.datamodule import TRAINED
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import checkpoint_path, config_of, lies_in
from lit_linformer.runs.folder import CONFIG, TOKENIZER, Claim, check_name, own_files
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks.pretrained import pretrained_encoder
from lit_linformer.utils import compat
from lit_linformer.utils.configs import check_configs, config_files
from lit_linformer.utils.environment import command_line
from lit_linformer.utils.files import write_text
from lit_linformer.utils.signals import is_first_process

DEFAULT_CLASSES = {"model": "lit_linformer.tasks.MLM", "data": "lit_linformer.data.PretrainingData"}
# What only the data knows.
LINKS = {"data.num_tokens": "model.init_args.vocab_size", "data.num_labels": "model.init_args.num_labels"}


class RunTrainer(Trainer):
    """Lightning's Trainer with the command that needs none, and with signals left to utils/signals.py."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # Where each process starts, one that Lightning forks too.
        compat.own_signal_handlers(self)
        failed = True
        try:
            results = super()._run(*args, **kwargs)
            failed = False
            return results
        except Exception as error:
            if (line := failure(error, self)) is None:
                raise
            raise ValueError(line) from error
        finally:
            for curves in (callback for callback in self.callbacks if isinstance(callback, Curves)):
                curves.close(self, failed)

    @property
    def log_dir(self) -> str:
        """The run's folder; Lightning's would be another one with each logger."""
        return self.default_root_dir

    def _run_stage(self) -> Any:
        results = super()._run_stage()
        if self.state.fn == "fit":
            finish(self)
        return results

    def prepare(self, datamodule: LightningDataModule) -> None:
        """Makes the tokenizer and the token blocks; trains nothing."""
        datamodule.prepare_data()


class RunConfig(SaveConfigCallback):
    """Keeps config and tokenizer in the run directory, the config in each checkpoint, and says what a resumed run changes."""

    claim: Claim | None = None  # on the run's folder, for the process that writes it

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any):
        # What belongs to one start of the run, not to the run: as a --config it must neither delete nor resume anything.
        config = config.clone()
        config.ckpt_path, config.overwrite = None, False
        super().__init__(parser, config, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: model and data may still turn out not to fit, and leave no run behind."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if self.claim is not None:
            self.claim.begin()
        folder, tokenizer = Path(trainer.default_root_dir), getattr(trainer.datamodule, "tokenizer", None)
        write_text(folder / CONFIG, self._text)
        if hasattr(tokenizer, "to_str"):
            write_text(folder / TOKENIZER, tokenizer.to_str())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self._text
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        if hasattr(tokenizer, "to_str"):  # so that the file alone can be fine-tuned
            checkpoint["tokenizer"] = tokenizer.to_str()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" or "config" not in checkpoint or not trainer.is_global_zero:
            return
        earlier = config_of(checkpoint, Path(trainer.ckpt_path or "ckpt_path"), "ckpt_path")
        before, now = (_flatten(config) for config in (earlier, yaml.safe_load(self._text)))
        print(f"resuming at step {checkpoint['global_step']}", flush=True)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                print(f"  {key.replace('.init_args', '')}: {before.get(key)} → {now.get(key)}", flush=True)

    @functools.cached_property
    def _text(self) -> str:  # each checkpoint carries it, and to make it takes longer than to write a small one
        return self.parser.dump(self.config, skip_none=False)


class LinformerCLI(LightningCLI):
    """fit, validate, test, predict and prepare."""

    def __init__(self, argv: list[str]):
        self.argv = argv
        self.claim: Claim | None = None
        jsonargparse.set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                save_config_callback=RunConfig,
                save_config_kwargs={"overwrite": True},
                parser_class=RunParser,
                trainer_class=RunTrainer,
                trainer_defaults={
                    "use_distributed_sampler": False,  # the loader shards by itself, resumably
                    "enable_model_summary": False,
                    "num_sanity_val_steps": -1,  # the untrained model's perplexity, where the curve starts
                    "max_epochs": -1,
                },
                seed_everything_default=0,
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=argv,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
        finally:
            if self.claim is not None:
                self.claim.release()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "prepare": {"datamodule"}}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # For the main parser and each command's. With allow_abbrev --trainer.max_step would silently be max_steps.
        ours = {"parser_mode": "omegaconf+", "exit_on_error": False, "allow_abbrev": False, "formatter_class": RangesInWords}
        return super().init_parser(**{**ours, **kwargs})

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        # Of the command that is asked for: a parser for each of the five would take as long as all else before it starts.
        self._subcommand_parsers, subcommands = {}, parser.add_subcommands()
        name = self.argv[0]
        self._subcommand_parsers[name] = self._prepare_subcommand_parser(RunTrainer, name, **kwargs.get(name, {}))
        subcommands.add_subcommand(name, self._subcommand_parsers[name])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_run_arguments(parser)
        # Not where a file names another class: the defaults of one class would stay as values of the other's arguments.
        named = classes_in_configs(self.argv)
        parser.set_defaults({key: {"class_path": path} for key, path in DEFAULT_CLASSES.items() if key not in named})
        for source, target in LINKS.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        super().parse_arguments(parser, args)
        check_settings(self.config[self.argv[0]])

    def _parse_ckpt_path(self) -> None:
        """Lightning's would let a checkpoint's hyper-parameters overwrite what the command line says."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        monitor, mode = best_of(class_of(config.model.class_path, "model"), config.best.monitor, config.best.mode)
        config.best.monitor, config.best.mode = monitor, mode
        self.as_given = config.clone()
        check_name(config.name)
        # Not written back into the config: with the run's config.yaml as --config, another --name is another folder.
        self.run_dir = Path(config.trainer.default_root_dir or f"runs/{config.name}")
        fits = self.subcommand == "fit" and not config.trainer.fast_dev_run
        self.loggers = RunLoggers(config.trainer.logger if fits else False, self.run_dir, config.name)
        config.trainer.logger = False
        if fits and is_first_process():
            self.claim = Claim(self.run_dir)
        asked = config.ckpt_path if self.subcommand != "prepare" else None
        if self.subcommand != "prepare":
            config.ckpt_path = checkpoint_path(self.subcommand, asked, self.run_dir)
            config.weights_only = True if config.weights_only is None else config.weights_only
        if self.claim is not None and not lies_in(config.ckpt_path, self.run_dir):
            if config.overwrite:
                _keep_sources(config, self.run_dir)
            self.claim.start_anew(config.overwrite, asked == "auto")
        model = config.model.get("init_args", {})
        if model.get("pretrained") or "load_weights" in model:  # what fine-tunes takes its own checkpoint for the pretrained
            _carry_over(config)
        elif self.subcommand == "predict" and (self.run_dir / TOKENIZER).is_file() and "init_args" in config.data:
            config.data.init_args.tokenizer = str(self.run_dir / TOKENIZER)  # the corpus need not be here
        if self.subcommand == "fit" and "encoder" in model and not (model.encoder or model.get("pretrained")):
            raise ValueError(  # before a tokenizer is trained for it
                "model.pretrained is not given; allowed: a run directory or a checkpoint, "
                "or model.encoder with the settings of one to train from scratch"
            )
        if self.subcommand != "prepare":
            check_early(self.subcommand, config)

    def instantiate_classes(self) -> None:
        if self.subcommand != "prepare":
            super().instantiate_classes()
            return
        data = self.config.prepare.data
        self.datamodule = class_of(data.class_path, "data")(**data.get("init_args", {}))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand].trainer
        config.default_root_dir = str(self.run_dir)
        if self.loggers:
            config.logger = DummyLogger()  # until training begins
        config.plugins = [*_listed(config.plugins), AtomicCheckpointIO()]
        best = self.as_given.best
        result = RunResult(best.monitor, best.mode, command_line(self.argv))
        extra = PredictionWriter() if self.subcommand == "predict" else result
        config.callbacks = [*_listed(config.callbacks), extra]
        self.config[self.subcommand] = self.as_given  # what the run directory's config.yaml tells
        trainer = super().instantiate_trainer(**kwargs)
        check_machine(trainer, config.precision)
        for callback in trainer.callbacks:
            if isinstance(callback, RunConfig):
                callback.claim = self.claim
            elif isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run_dir / "checkpoints")  # Lightning's would be another one with each logger
        if self.subcommand == "fit":
            # The folder is cleared first; then points, before others add to the curves; the end of the program after the
            # checkpoints' callbacks.
            first = [callback for callback in trainer.callbacks if isinstance(callback, RunConfig)]
            rest = [callback for callback in trainer.callbacks if callback not in first]
            curves = [Curves(self.loggers.build)] if self.loggers else []
            finite = Finite()
            last = LastValidation(self.as_given.last.validation)
            trainer.callbacks[:] = [*first, last, *curves, finite, *rest, Preemption(finite), OwedValidation()]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "prepare":
            self.datamodule.prepare_data()
            return
        super()._run_subcommand(subcommand)

    def after_fit(self) -> None:
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:
            return
        for line in closing_lines(self.run_dir, self.model, self.datamodule, self.loggers.shown_by()):
            print(line, flush=True)


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """What every command has beside Lightning's own: the run's name and the callbacks that are always there."""
    parser.add_argument("--name", type=str, default="run", help="Name of the run; it lives in runs/NAME.")
    parser.add_argument(
        "--overwrite", type=bool, default=False, help="Let fit delete a run of the same name, when it begins to train."
    )
    parser.add_lightning_class_args(best_checkpoint, "best")
    parser.add_lightning_class_args(LastCheckpoint, "last")  # after best, whose state it keeps
    parser.add_lightning_class_args(Throughput, "throughput")
    parser.add_lightning_class_args(Progress, "progress")  # after throughput, which it shows


def _keep_sources(config: Namespace, root: Path) -> None:
    """ValueError where overwriting would delete what the run is to start from."""
    settings = {f"model.{name}": config.model.get("init_args", {}).get(name) for name in ("pretrained", "teacher")}
    for name, source in (settings | {"ckpt_path": config.ckpt_path}).items():
        if source is not None and Path(source).resolve().is_relative_to(root.resolve()) and any(own_files(root)):
            raise ValueError(f"{name} is {source}, which --overwrite true would delete; allowed: another --name")


def _carry_over(config: Namespace) -> None:
    """What a pretrained model says about the data. A checkpoint of the run itself needs no other one."""
    model, data = config.model.init_args, config.data.get("init_args", Namespace())
    if config.get("ckpt_path"):
        model.pretrained = config.ckpt_path
        if "load_weights" in model:
            model.load_weights = False
    source = read_model(model.pretrained) if model.pretrained else None
    if source is not None and model.encoder:
        pretrained_encoder(source, EncoderConfig(**vars(model.encoder)), None)
    own = (None,) if "load_weights" in model else (None, *TRAINED)  # a new tokenizer would be of no use to old weights
    if data.get("tokenizer") in own and source is not None:
        data.tokenizer = source.tokenizer or data.tokenizer
    if data.get("max_length") is None:
        encoder = source.encoder if source is not None else model.encoder
        data.max_length = None if encoder is None else encoder.max_length


def _listed(one_or_more: Any) -> list:
    if one_or_more is None:
        return []
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def run(argv: list[str]) -> LinformerCLI:
    """Parses and runs a command."""
    # Lightning's advertisements and device lists; its warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # Says which process has ended, before it ends the others.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    for noise in (
        ".*args parameter is intended to run from within Python.*",
        ".*(Checkpoint|Experiment logs) directory .* exists and is not empty.*",
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # of the loss, which nothing changes in place
        ".*Grad strides do not match bucket view strides.*",  # of sizes 1, whose strides mean nothing
        ".*isinstance.treespec, LeafSpec.* is deprecated.*",  # Lightning 2.6 on torch 2.13
    ):
        warnings.filterwarnings("ignore", message=noise)
    if argv[0] != "fit":  # what those callbacks do has its end with training
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
    check_configs(argv)
    check_class_paths(argv, list(config_files(argv)))
    try:
        return LinformerCLI(argv)
    except ProcessExitedException as error:  # of processes that were forked; they have said why
        if error.exit_code <= 0:
            raise
        raise SystemExit(error.exit_code) from error
    finally:
        # Left to the interpreter's end, gloo's threads now and then abort a run that has succeeded (pytorch issue 190489).
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
