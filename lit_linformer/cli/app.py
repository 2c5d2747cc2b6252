"""LightningCLI adapted to this project: run folders by name, checkpoints `last` and `best`, the command line overrides all."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonargparse
import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.multiprocessing import ProcessExitedException

from lit_linformer.callbacks import (
    AtomicCheckpointIO,
    Averaging,
    Curves,
    EvaluationWriter,
    Finite,
    LastValidation,
    Owed,
    PredictionWriter,
    Preemption,
    Resuming,
    RunResult,
    TrimMemory,
    best_of,
)
from lit_linformer.callbacks.header import wrapped
from lit_linformer.cli.carried import carry_over, evaluated, load_exported
from lit_linformer.cli.checks import check_callbacks, check_early, check_settings, takes_encoder
from lit_linformer.cli.class_paths import check_class_paths, class_of
from lit_linformer.cli.closing import closing_lines
from lit_linformer.cli.defaults import DEFAULT_CLASSES, TRAINER_DEFAULTS
from lit_linformer.cli.given import as_list, for_parser, given_settings, typed_words
from lit_linformer.cli.help import RangesInWords, add_run_arguments
from lit_linformer.cli.ignored import warn_ignored
from lit_linformer.cli.machine import check_machine, check_processes, slurm_in_words
from lit_linformer.cli.quick_checks import no_encoder
from lit_linformer.cli.refused import refused, unwrapped
from lit_linformer.cli.run_config import RunConfig
from lit_linformer.cli.run_loggers import DEFAULT_LOGGER, RunLoggers, RunParser
from lit_linformer.cli.trainer import RunTrainer
from lit_linformer.data.summary import data_rows
from lit_linformer.runs.checkpoints import checkpoint_path, lies_in
from lit_linformer.runs.folder import CONFIG, Claim, check_name, check_writable, own_files
from lit_linformer.runs.place import given_run, own_folder, run_folder, seen_from
from lit_linformer.utils.configs import as_yaml
from lit_linformer.utils.environment import command_line
from lit_linformer.utils.errors import SettingError, UserError, user_error
from lit_linformer.utils.signals import is_first_process

# Settings that only the data can supply.
LINKS = {"data.num_tokens": "model.init_args.vocab_size", "data.num_labels": "model.init_args.num_labels"}


class LinformerCLI(LightningCLI):
    """fit, validate, test, predict and prepare."""

    def __init__(self, argv: list[str]):
        self.argv = argv
        self.claim: Claim | None = None
        jsonargparse.set_dumper("yaml", as_yaml)
        jsonargparse.set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                save_config_callback=RunConfig,
                parser_class=RunParser,
                trainer_class=RunTrainer,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=for_parser(argv),
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
        # For the main parser and each command's. With allow_abbrev, --trainer.max_step would silently set max_steps.
        ours = {"parser_mode": "omegaconf+", "exit_on_error": False, "allow_abbrev": False, "formatter_class": RangesInWords}
        return super().init_parser(**{**ours, **kwargs})

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        # Only the parser of the given command: building all five would take as long as the rest of the startup.
        self._subcommand_parsers, subcommands = {}, parser.add_subcommands()
        name = self.argv[0]
        self._subcommand_parsers[name] = self._prepare_subcommand_parser(RunTrainer, name, **kwargs.get(name, {}))
        subcommands.add_subcommand(name, self._subcommand_parsers[name])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_run_arguments(parser)
        # Only if no class is named: else the default class's values would remain as arguments of the named one.
        named = given_settings(self.argv)
        parser.set_defaults({key: {"class_path": path} for key, path in DEFAULT_CLASSES.items() if key not in named})
        if any(name == "trainer.logger+" for name, _ in typed_words(self.argv)):  # which adds one to what a run has
            parser.set_defaults({"trainer.logger": [DEFAULT_LOGGER]})
        for source, target in LINKS.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        try:
            super().parse_arguments(parser, args)
        except Exception as error:
            if user_error(error) is not None:
                raise
            raise refused(error, self.argv, self._subcommand_parsers[self.argv[0]]) from error
        check_settings(self.config[self.argv[0]])

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning's lets a checkpoint's hyper-parameters override the command line."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        monitor, mode = best_of(class_of(config.model.class_path, "model"), config.best.monitor, config.best.mode)
        config.best.monitor, config.best.mode = monitor, mode
        self.as_given = config.clone()
        if self.subcommand == "predict":
            config.trainer.use_distributed_sampler = False  # each process predicts everything, and the first one writes it
        self.evaluated = evaluated(self.subcommand, self.argv, config)
        check_name(config.name)
        # Not written back into the config: the run's config.yaml with another --name must mean another folder.
        begun, own = given_run(self.argv)
        own = own and config.name == self.as_given.name  # else it is named after the model that is evaluated
        self.run_dir = begun if own else run_folder(config.name, config.trainer.default_root_dir)
        if begun is not None:
            for one in (config,) if own else (config, self.as_given):  # a new run's config.yaml will lie elsewhere
                seen_from(begun, one.model.get("init_args", Namespace()))
                seen_from(begun, one.data.get("init_args", Namespace()))
        fits = self.subcommand == "fit" and not config.trainer.fast_dev_run
        self.logs = config.trainer.logger is not False
        self.loggers = RunLoggers(config.trainer.logger if fits else False, self.run_dir, config.name)
        config.trainer.logger = False
        if fits and is_first_process():
            self.claim = Claim(self.run_dir)
        if self.subcommand not in ("fit", "prepare") and not config.trainer.fast_dev_run:
            check_writable(self.run_dir)
        asked = config.ckpt_path
        if self.subcommand != "prepare":
            if self.evaluated is None or config.ckpt_path:
                config.ckpt_path = checkpoint_path(self.subcommand, config.ckpt_path, self.run_dir)
            if config.weights_only is False:
                raise SettingError("weights_only", False, "true: what else a checkpoint holds may run code when it is loaded")
            config.weights_only = True
        elif config.ckpt_path is not None:
            raise SettingError("ckpt_path", config.ckpt_path, "null, since no model is read", when="with prepare")
        if self.claim is not None and not lies_in(config.ckpt_path, self.run_dir):
            if config.overwrite:
                _keep_sources(config, self.run_dir)
            self.claim.start_anew(config.overwrite, asked == "auto")
        carry_over(self.subcommand, self.argv, config)
        if self.subcommand == "prepare":
            return
        model, kind = config.model.get("init_args", {}), class_of(config.model.class_path, "model")
        if "encoder" in model and takes_encoder(kind) and not (model.encoder or model.get("pretrained")):
            run = own_folder(Path(config.ckpt_path).parent.parent / CONFIG) if config.ckpt_path else None
            raise no_encoder("load_weights" in model, run)  # before a tokenizer is trained for it
        check_early(self.subcommand, config)
        if self.subcommand == "fit":
            warn_ignored(self.argv, config.model)

    def instantiate_classes(self) -> None:
        if self.subcommand != "prepare":
            try:
                with _data_by_name():
                    super().instantiate_classes()
            except Exception as error:
                raise unwrapped(error) from None
            if self.subcommand == "predict" and not _predicts(type(self.model)):
                raise UserError(f"model is {type(self.model).__name__}", "a class with predict_step", when="with predict")
            if self.evaluated is not None and not self.config_init[self.subcommand].ckpt_path:
                load_exported(self.model, self.evaluated)
            return
        data = self.config.prepare.data
        self.datamodule = class_of(data.class_path, "data")(**data.get("init_args", {}))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand].trainer
        config.default_root_dir = str(self.run_dir)
        if self.logs:
            config.logger = DummyLogger()  # until training begins, or throughout where nothing is written
        config.plugins = [*as_list(config.plugins), AtomicCheckpointIO()]
        best = self.as_given.best
        result = RunResult(best.monitor, best.mode, command_line(self.argv))
        written = {"predict": [PredictionWriter()], "fit": [result]}.get(self.subcommand, [result, EvaluationWriter()])
        config.callbacks = [*as_list(config.callbacks), TrimMemory(), *written]
        resumes = self.subcommand == "fit" and self.config_init[self.subcommand].ckpt_path is not None
        check_callbacks(config.callbacks, self.model, resumes)
        self.config[self.subcommand] = self.as_given  # what the run folder's config.yaml holds
        try:
            with slurm_in_words():
                trainer = super().instantiate_trainer(**kwargs)
        except RuntimeError as error:
            if "more than one stateful callback" not in str(error):
                raise
            kept = f"trainer.callbacks has a ModelCheckpoint with monitor {best.monitor}, as the run has one itself"
            raise UserError(kept, "--best.keep N, which keeps the N best") from error
        if not isinstance(trainer.profiler, PassThroughProfiler) and trainer.profiler.filename is None:
            trainer.profiler.dirpath, trainer.profiler.filename = self.run_dir, "profile"  # fit-profile.txt, not the log
        check_processes(trainer)
        check_machine(trainer, config.precision)
        for callback in trainer.callbacks:
            if isinstance(callback, RunConfig):
                callback.claim = self.claim
            elif isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run_dir / "checkpoints")  # Lightning's default depends on the logger
        if self.subcommand == "fit":
            # RunConfig clears the folder first; Averaging updates before checkpoints are saved, Timer acts before the last
            # validation, Curves before others add points; Preemption ends the program after the checkpoint callbacks.
            first = [one for kind in (RunConfig, Averaging, Timer) for one in trainer.callbacks if isinstance(one, kind)]
            rest = [callback for callback in trainer.callbacks if callback not in first]
            curves = [Curves(self.loggers.build)] if self.loggers else []
            finite = Finite()
            last = LastValidation(self.as_given.last.validation)
            trainer.callbacks[:] = [*first, Resuming(), last, *curves, finite, *rest, Preemption(finite), Owed()]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "prepare":
            cache = Path(getattr(self.datamodule, "cache_dir", None) or ".")
            before = _prepared(cache)
            self.datamodule.prepare_data()
            for label, told in wrapped(data_rows(self.datamodule, None)):
                print(f"{label}{told}")
            if not hasattr(self.datamodule, "cache_dir"):
                print(f"done: {type(self.datamodule).__name__} keeps no prepared files")
                return
            made = sorted(_prepared(cache) - before)
            print(f"done: {cache} now has {', '.join(made)}" if made else f"done: all of it was there already, in {cache}")
            return
        super()._run_subcommand(subcommand)

    def after_fit(self) -> None:
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:
            return
        validates = self.trainer.limit_val_batches != 0
        for line in closing_lines(self.run_dir, self.model, self.datamodule, self.loggers.shown_by(), validates):
            print(line, flush=True)


@contextmanager
def _data_by_name() -> Iterator[None]:
    """Shortens str(data), which jsonargparse's messages contain: it would build all loaders before there are rows, or fail."""
    told = LightningDataModule.__str__
    LightningDataModule.__str__ = object.__repr__
    try:
        yield
    finally:
        LightningDataModule.__str__ = told


def _predicts(model: type) -> bool:
    return any(getattr(model, name) is not getattr(LightningModule, name) for name in ("predict_step", "forward"))


def _prepared(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*-*") if path.is_dir()}


def _keep_sources(config: Namespace, root: Path) -> None:
    """Raises ValueError if overwriting would delete what the run starts from."""
    settings = {f"model.{name}": config.model.get("init_args", {}).get(name) for name in ("pretrained", "teacher")}
    for name, source in (settings | {"ckpt_path": config.ckpt_path}).items():
        if isinstance(source, str) and Path(source).resolve().is_relative_to(root.resolve()) and any(own_files(root)):
            raise SettingError(name, Path(source), "another --name", more=", which --overwrite true would delete")


def run(argv: list[str]) -> LinformerCLI:
    """Parses and runs a command."""
    # Hides Lightning's advertisements and device lists; its warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # Shows which process has ended, before it ends the others.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    # Shows what a LearningRateFinder has chosen.
    logging.getLogger("lightning.pytorch.tuner").setLevel(logging.INFO)
    for noise in (
        ".*args parameter is intended to run from within Python.*",
        ".*(Checkpoint|Experiment logs) directory .* exists and is not empty.*",
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # the loss, which nothing changes in place
        ".*Grad strides do not match bucket view strides.*",  # in dimensions of size 1, whose strides mean nothing
        ".*smaller than the logging interval.*",  # batches of an epoch: steps are counted across epochs
        ".*is supported for historical reasons but its usage is discouraged.*",  # precision=16
        ".*isinstance.treespec, LeafSpec.* is deprecated.*",  # Lightning 2.6 on torch 2.13
        r"Total length of `list` across ranks is zero",  # of a validation that is not asked for; the data's summary says so
        r"Glyph \d+ .* missing from font",  # of a label in a figure, as an emoji
        r"(?s).*(JsonargparseDeprecationWarning|deprecated in v4.49.0 and will be removed in v5)",  # caused by Lightning 2.6
    ):
        warnings.filterwarnings("ignore", message=noise)
    if argv[0] != "fit":  # those callbacks act only in training
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
    check_class_paths(argv)
    try:
        return LinformerCLI(argv)
    except ProcessExitedException as error:  # of forked processes, which have said why
        if error.exit_code <= 0:
            raise
        raise SystemExit(error.exit_code) from error
    finally:
        # If left to the interpreter's shutdown, gloo's threads sometimes abort a successful run (pytorch issue 190489).
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
