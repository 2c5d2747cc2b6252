"""Checks numbers before anything is built: no data are prepared for a run that cannot start."""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch import Callback

from lit_linformer.cli.class_paths import class_of
from lit_linformer.cli.help import CALLBACKS
from lit_linformer.model.ranges import Count, Natural, NotNegative, Range, Seed, Share, check_ranges
from lit_linformer.tasks.base import TrainingModule
from lit_linformer.tasks.optim import Optimization
from lit_linformer.utils.errors import SettingError, UserError

OrNoLimit = Annotated[int, Range(least=1, also=(-1,))]
LimitedTo = Count | Annotated[float, Range(above=0, most=1)] | None
# Lightning takes what is outside of these, to fail later with a traceback or to train nothing.
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
TIME = (r"\d+:\d{1,2}:\d{1,2}:\d{1,2}", "days:hours:minutes:seconds, as 00:12:00:00")
TEXTS = {
    "devices": (r"auto|-?\d+|\d+(,\d+)*,?", "auto, how many, or the numbers of some, as 0,3"),
    "max_time": TIME,
    "profiler": ("simple|advanced|pytorch|xla", "simple, advanced, pytorch, xla, or a class_path"),
    "val_check_interval": (rf"-?\d+|{TIME[0]}", f"steps, a share of an epoch, or {TIME[1]}"),
}


def check_settings(config: Namespace) -> None:
    """ValueError, in one line, for the first number of a command's config that is outside what its setting allows."""
    check_ranges("", {"seed_everything": Seed}, {"seed_everything": config.get("seed_everything")})
    if not isinstance(config.trainer, Namespace):
        raise SettingError("trainer", config.trainer, "its settings by name, as max_steps: 100")
    trainer = dict(vars(config.trainer))
    if re.fullmatch(r"-?\d+", str(trainer.get("devices"))):
        trainer["devices"] = int(trainer["devices"])
    check_ranges("trainer.", TRAINER, trainer)
    for key, (pattern, allowed) in TEXTS.items():
        if isinstance(trainer.get(key), str) and not re.fullmatch(pattern, trainer[key].replace(" ", "")):
            raise SettingError(f"trainer.{key}", trainer[key], allowed)
    for key, declared in CALLBACKS.items():
        if key in config:
            check_ranges(f"{key}.", _parameters(declared), dict(vars(config[key])))
    for key in ("model", "data"):
        _check_class(key, config.get(key), key)
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, Namespace) and "class_path" in callback:
            _check_class(callback.class_path.rpartition(".")[2], callback, "trainer.callbacks")


def _check_class(prefix: str, spec: Any, setting: str) -> None:
    """For what a config builds by class_path and init_args."""
    if not isinstance(spec, Namespace) or not isinstance(spec.get("class_path"), str):
        return
    declared = class_of(spec.class_path, setting)
    values = vars(spec.get("init_args", Namespace()))
    for base in reversed(getattr(declared, "__mro__", (declared,))):
        if base is declared or "__init__" in vars(base):  # a subclass hands on what it does not take itself
            parameters = _parameters(base)
            check_ranges(f"{prefix}.", parameters, values)
            for name, hint in parameters.items():
                _check_whole(f"{prefix}.{name}", hint, values.get(name))
    if isinstance(declared, type) and issubclass(declared, TrainingModule):  # which takes them as **optimization
        check_ranges(f"{prefix}.", Optimization, values)


def _check_whole(where: str, hint: Any, value: Any) -> None:
    """What a dataclass itself says of its settings together, under the names that users type."""
    for kind in (hint, *get_args(hint)):
        if is_dataclass(kind) and isinstance(value, Namespace):
            try:
                kind(**vars(value))
            except ValueError as error:
                raise UserError(f"{where}.{error}") from error


def check_once(callbacks: list[Callback]) -> None:
    """UserError for two callbacks of one name that have a state."""
    names = [one.state_key for one in callbacks if type(one).state_dict is not Callback.state_dict]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"trainer.callbacks names {twice[0]} twice", "once, for a checkpoint keeps its state by that name")


def _parameters(declared: Any) -> Mapping[str, Any]:
    """{name: annotation}; nothing for what can't be looked into."""
    try:
        return get_type_hints(declared.__init__ if isinstance(declared, type) else declared, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
