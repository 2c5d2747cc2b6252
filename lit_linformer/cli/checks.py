"""Checks a run's settings before anything is built, and before its data are prepared, which may take hours.

Numbers and names by their types and ranges; then whether this model and Trainer can run here (machine.py).
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import StrategyRegistry

from lit_linformer.callbacks import LastCheckpoint
from lit_linformer.cli.class_paths import class_of
from lit_linformer.cli.given import as_list
from lit_linformer.cli.help import CALLBACKS
from lit_linformer.cli.machine import check_machine, check_processes, slurm_in_words
from lit_linformer.data.datamodule import check_global_batch, check_limit
from lit_linformer.model.ranges import Count, Natural, NotNegative, Range, Seed, Share, check_ranges
from lit_linformer.runs.record import of_class
from lit_linformer.tasks.base import TrainingModule, encoder_of
from lit_linformer.tasks.data_fits import check_row_length
from lit_linformer.tasks.optim import Optimization, check_shardable, endless
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.quiet import quiet

OrNoLimit = Annotated[int, Range(least=1, also=(-1,))]
LimitedTo = Count | Annotated[float, Range(above=0, most=1)] | None
# Lightning accepts values outside these ranges, then fails with a traceback or trains nothing.
TRAINER = {
    "devices": OrNoLimit,
    "num_nodes": Count,
    "fast_dev_run": Natural,
    "max_epochs": OrNoLimit | None,
    "min_epochs": Natural | None,
    "max_steps": OrNoLimit,
    "min_steps": Natural | None,
    "limit_train_batches": LimitedTo,
    "limit_val_batches": Natural | Share | None,
    "limit_test_batches": LimitedTo,
    "limit_predict_batches": LimitedTo,
    "overfit_batches": Natural | Share,
    "val_check_interval": LimitedTo,
    "check_val_every_n_epoch": Count | None,
    "num_sanity_val_steps": Annotated[int, Range(least=0, also=(-1,))] | None,
    "log_every_n_steps": Count | None,
    "accumulate_grad_batches": Count,
    "gradient_clip_val": NotNegative | None,
    "reload_dataloaders_every_n_epochs": Natural,
}
TIME = (r"\d+:\d\d:\d\d:\d\d", "days:hours:minutes:seconds, as 00:12:00:00")
TEXTS = {
    "devices": (r"auto|-?\d+|\d+(,\d+)*,?", "auto, how many, or the numbers of some, as 0,3"),
    "max_time": TIME,
    "profiler": ("simple|advanced|pytorch|xla", "simple, advanced, pytorch, xla, or a class_path"),
    "val_check_interval": (rf"-?\d+|{TIME[0]}", f"steps, a share of an epoch, or {TIME[1]}"),
}
UNITS = {"weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds"}
PLAIN = (bool, int, float, str, type(None))
# Of the thirty strategies that Lightning knows by name, those that are not another strategy with an option set.
STRATEGIES = "auto, ddp, ddp_fork, deepspeed, or the class path of one"
REFUSED = {
    "fsdp": "whose flattened weights look like biases and would not decay (conf/trainer/fsdp.yaml shards each matrix as it is)",
    "ddp_spawn": "whose processes know nothing of the command line",
}
# Callbacks of Lightning's that do not work with what every run has: why, and what does.
NOT_HERE: dict[type[Callback], tuple[str, str]] = {
    BatchSizeFinder: ("whose trials count as the run's first start", "data.batch_size N"),
    GradientAccumulationScheduler: (
        "but the learning rate's schedule, and resuming, need steps of equally many rows",
        "data.global_batch_size or trainer.accumulate_grad_batches",
    ),
    StochasticWeightAveraging: ("whose averages are not in the best checkpoint", "Averaging"),
}


def check_settings(config: Namespace) -> None:
    """Raises ValueError, in one line, for the first value in a command's config that its setting does not allow."""
    check_ranges("", {"seed_everything": Seed}, {"seed_everything": config.get("seed_everything")})
    if not isinstance(config.trainer, Namespace):
        raise SettingError("trainer", config.trainer, "its settings by name, as max_steps: 100")
    trainer = {**vars(config.trainer), "devices": _devices(config.trainer)}
    check_ranges("trainer.", TRAINER, trainer)
    for key, (pattern, allowed) in TEXTS.items():
        if isinstance(trainer.get(key), str) and not re.fullmatch(pattern, trainer[key].replace(" ", "")):
            raise SettingError(f"trainer.{key}", trainer[key], allowed)
        if isinstance(trainer.get(key), dict) and not trainer[key].keys() <= UNITS:
            raise SettingError(f"trainer.{key}", trainer[key], allowed)
    every, epochs = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch", 1)
    if epochs is None and isinstance(every, float):
        allowed = "training batches, a whole number"
        raise SettingError("trainer.val_check_interval", every, allowed, when="with trainer.check_val_every_n_epoch null")
    for unit in ("epochs", "steps"):
        least, most = trainer.get(f"min_{unit}"), trainer.get(f"max_{unit}")
        if least and most not in (None, -1) and least > most:
            raise SettingError(f"trainer.min_{unit}", least, f"up to trainer.max_{unit} = {most}")
    for key, declared in CALLBACKS.items():
        if key in config:
            if not isinstance(config[key], Namespace):
                raise SettingError(key, config[key], "its settings by name")
            check_ranges(f"{key}.", _parameters(declared), dict(vars(config[key])))
    for key in ("model", "data"):
        _check_class(key, config.get(key), key)
    for callback in as_list(trainer.get("callbacks")):
        if isinstance(callback, Namespace) and "class_path" in callback:
            _check_class(callback.class_path.rpartition(".")[2], callback, "trainer.callbacks")


def _devices(trainer: Namespace) -> Any:
    """trainer.devices, as a number if it is one: the parser leaves a typed number as text."""
    devices = trainer.get("devices")
    return int(devices) if re.fullmatch(r"-?\d+", str(devices)) else devices


def _check_class(prefix: str, spec: Any, setting: str) -> None:
    """As ``check_settings``, for a class that a config builds from class_path and init_args."""
    if not isinstance(spec, Namespace) or not isinstance(spec.get("class_path"), str):
        return
    declared = class_of(spec.class_path, setting)
    values = vars(spec.get("init_args", Namespace()))
    for base in reversed(declared.__mro__):
        if base is declared or "__init__" in vars(base):  # a subclass passes on what it does not take itself
            parameters = _parameters(base)
            check_ranges(f"{prefix}.", parameters, values)
            for name, hint in parameters.items():
                _check_whole(f"{prefix}.{name}", hint, values.get(name))
                if hint is str and name in values and values[name] is None and _default(base, name) is not None:
                    raise SettingError(f"{prefix}.{name}", None, "text")  # the parser accepts null in a class's settings
    if issubclass(declared, TrainingModule):  # which takes them as **optimization
        check_ranges(f"{prefix}.", Optimization, values)


def _check_whole(where: str, hint: Any, value: Any) -> None:
    """Lets a dataclass check its settings together; errors use the names that users type."""
    for kind in (hint, *get_args(hint)):
        if is_dataclass(kind) and isinstance(value, Namespace):
            try:
                kind(**vars(value))
            except ValueError as error:
                raise UserError(f"{where}.{error}") from error


def check_callbacks(callbacks: list[Callback], model: LightningModule, resumes: bool) -> None:
    """Raises UserError for callbacks that do not work here.

    These are two stateful ones of one name, those of NOT_HERE, a second progress bar or LastCheckpoint, one that freezes or
    prunes what the model does not have, and a finder in a run that resumes.
    """
    names = [one.state_key for one in callbacks if type(one).state_dict is not Callback.state_dict]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"trainer.callbacks names {twice[0]} twice", "once, since a checkpoint keeps its state by that name")
    for kind, (why, instead) in NOT_HERE.items():
        if any(isinstance(one, kind) for one in callbacks):
            raise SettingError("trainer.callbacks", kind.__name__, instead, more=f", {why}")
    if encoder_of(model) is not None and any(isinstance(one, ModelPruning) for one in callbacks):
        why = ", which prunes a module's weights in its forward, and E is read without one"
        raise SettingError("trainer.callbacks", "ModelPruning", "torch.nn.utils.prune on a trained model", more=why)
    if any(isinstance(one, BackboneFinetuning) for one in callbacks) and not hasattr(model, "backbone"):
        why = f", and {type(model).__name__} has no `backbone`"
        raise SettingError("trainer.callbacks", "BackboneFinetuning", "none; in fine-tuning --model.trained_layers N", more=why)
    if resumes and any(isinstance(one, LearningRateFinder) for one in callbacks):
        # It saves and restores a checkpoint of its own, after which Lightning has forgotten the run's.
        why = ", which would begin at step 0 with the checkpoint's weights"
        raise SettingError("trainer.callbacks", "LearningRateFinder", "none; what it found is a setting", why, "with ckpt_path")
    if any(type(one) is LastCheckpoint for one in callbacks):
        raise UserError("trainer.callbacks names LastCheckpoint, which every run has", "--last.every_n_steps N")
    if bars := [type(one).__name__ for one in callbacks if isinstance(one, ProgressBar)]:
        raise UserError(f"trainer.callbacks names {bars[0]}", "one progress bar, Progress, whose settings are --progress.*")


def _default(declared: type, name: str) -> Any:
    """A parameter's default; in a user's own class it may be None, whatever the annotation says."""
    return getattr(inspect.signature(declared.__init__).parameters.get(name), "default", None)


def _parameters(declared: Any) -> Mapping[str, Any]:
    """{name: annotation}; empty if the annotations can't be resolved."""
    try:
        return get_type_hints(declared.__init__ if isinstance(declared, type) else declared, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def check_early(subcommand: str, config: Namespace) -> None:
    """Raises ValueError, in one line, for settings that would otherwise be refused only after the data were prepared."""
    trainer = config.trainer
    _check_names(trainer)
    for name, instead in {
        "progress_bar": "--progress.every_n_steps N prints fewer lines",
        "checkpointing": "--trainer.fast_dev_run true keeps nothing",
    }.items():
        if trainer[f"enable_{name}"] is False:  # Lightning would refuse it later, naming settings that the user has not given
            raise SettingError(f"trainer.enable_{name}", False, f"null; {instead}")
    built, devices = _built(trainer), _devices(trainer)
    if not trainer.plugins:  # which may number the processes in a way of their own
        check_processes(built)
    if isinstance(devices, int) and devices > built.num_devices:  # Lightning would use one
        raise SettingError("trainer.devices", devices, f"{built.num_devices}", when=f"with trainer.strategy {trainer.strategy}")
    check_machine(built, trainer.precision)
    if subcommand == "validate" and trainer.limit_val_batches == 0:  # as a run's config may have it
        raise SettingError("trainer.limit_val_batches", 0, "null, or more than 0", when="with validate")
    if subcommand == "fit":
        _check_training(config, built)


def _built(trainer: Namespace) -> Trainer:
    """A Trainer of these settings, as far as they are plain values; UserError instead of Lightning's own errors."""
    own = ("logger", "enable_checkpointing", "enable_model_summary", "callbacks", "plugins", "profiler")
    plain = {key: value for key, value in vars(trainer).items() if isinstance(value, PLAIN) and key not in own}
    plain["devices"] = trainer.devices  # a list of numbers, too
    try:
        with quiet(), slurm_in_words():  # the Trainer that trains prints the same about the machine
            return Trainer(**plain, logger=False, enable_checkpointing=False, enable_model_summary=False)
    except TypeError as error:
        if "CPUAccelerator" not in str(error):
            raise
        raise SettingError("trainer.devices", _devices(trainer), "auto, or how many processes", when="on a CPU") from error


def _check_training(config: Namespace, built: Trainer) -> None:
    """As ``check_early``, for settings of training; ``built``: a Trainer of them."""
    trainer, model, processes = config.trainer, config.model, built.num_devices * built.num_nodes
    if trainer.precision == "16-true":
        why = ", in which AdamW's second moments of small gradients are 0"
        raise SettingError("trainer.precision", "16-true", "32-true, 16-mixed, bf16-mixed, bf16-true", why, "with fit")
    if isinstance(trainer.val_check_interval, str) and processes > 1:
        # Each process reads its own clock, and would wait for the others in a validation that they have not begun.
        allowed = "steps or a share of an epoch, on which several processes agree"
        raise SettingError("trainer.val_check_interval", trainer.val_check_interval, allowed)
    strategy = trainer.strategy if isinstance(trainer.strategy, Namespace) else Namespace()
    if strategy.get("init_args.static_graph") and trainer.accumulate_grad_batches > 1:  # an assertion of torch's own
        accumulates = f"with trainer.accumulate_grad_batches {trainer.accumulate_grad_batches}"
        raise SettingError("trainer.strategy.static_graph", True, "false", when=accumulates)
    settings, data = (vars(part.get("init_args", Namespace())) for part in (model, config.data))
    each = trainer.accumulate_grad_batches
    tells = hasattr(class_of(config.data.class_path, "data"), "rows_per_step")  # a user's own may use the names otherwise
    if tells and isinstance(trainer.strategy, str) and data.get("global_batch_size") and data.get("batch_size"):
        check_global_batch(data["global_batch_size"], data["batch_size"], processes, each)
        each = data["global_batch_size"] // (data["batch_size"] * processes)
    check_limit(trainer, each)
    rows, longest = data.get("max_length"), getattr(settings.get("encoder"), "max_length", None)
    if isinstance(rows, int) and isinstance(longest, int):
        check_row_length(rows, longest, windows="max_windows" in data)
    kind = class_of(model.class_path, "model")
    if not issubclass(kind, TrainingModule):
        return
    schedule = settings.get("schedule", "constant")
    if schedule != "constant" and (built.max_steps, built.max_epochs) == (-1, -1):
        raise endless(schedule, -1)
    if strategy.get("class_path", "").endswith(("ModelParallelStrategy", "ShardedStrategy")):
        check_shardable(settings.get("optimizer"))
    kind.check_early(settings)


def takes_encoder(declared: type) -> bool:
    """Whether a class's ``encoder`` is an EncoderConfig, or not annotated; a user's own may be anything."""
    hint = _parameters(declared).get("encoder")
    return hint is None or "EncoderConfig" in str(hint)


def _check_names(trainer: Namespace) -> None:
    """Raises SettingError for names that Lightning would refuse in its own words, and for strategies refused here."""
    accelerators = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if isinstance(trainer.accelerator, str):
        if trainer.accelerator not in accelerators:
            raise SettingError("trainer.accelerator", trainer.accelerator, ", ".join(sorted(accelerators)))
        gpus = {"cuda": (CUDAAccelerator,), "mps": (MPSAccelerator,), "gpu": (CUDAAccelerator, MPSAccelerator)}
        if (kinds := gpus.get(trainer.accelerator)) and not any(kind.is_available() for kind in kinds):
            raise SettingError(
                "trainer.accelerator", trainer.accelerator, "auto, cpu", more=", which this machine lacks", when="here"
            )
    if isinstance(trainer.strategy, str) and trainer.strategy not in {"auto", *StrategyRegistry.available_strategies()}:
        raise SettingError("trainer.strategy", trainer.strategy, STRATEGIES)
    named = trainer.strategy if isinstance(trainer.strategy, str) else ""
    if isinstance(trainer.strategy, Namespace) and of_class(trainer.strategy.get("class_path"), "FSDPStrategy"):
        named = "fsdp"
    for name, why in REFUSED.items():
        if named.startswith(name):
            raise SettingError("trainer.strategy", named, STRATEGIES, more=f", {why}")
    if trainer.gradient_clip_algorithm not in (None, "norm", "value"):
        raise SettingError("trainer.gradient_clip_algorithm", trainer.gradient_clip_algorithm, "norm, value")
