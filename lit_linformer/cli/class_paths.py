"""Finds the classes that a command line or a config names, or says in one line why not, before jsonargparse sees them."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lightning.pytorch import Callback, LightningDataModule, LightningModule, loggers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from lit_linformer import data, tasks
from lit_linformer.cli.defaults import DEFAULT_CLASSES
from lit_linformer.cli.given import as_list, given_settings, walk
from lit_linformer.cli.short_help import exported
from lit_linformer.model.registry import Registry, UnknownKind
from lit_linformer.utils.errors import SettingError, UserError, meant

BASES = {"model": LightningModule, "data": LightningDataModule, "trainer.callbacks": Callback, "trainer.logger": Logger}
NAMED = {"trainer.strategy": Strategy, "trainer.profiler": Profiler}  # which may also be a name that is no class, such as ddp
BASE_OF = BASES | NAMED
OURS = {"model": tasks, "data": data}
NO_CLASS = ("none", "null", "true", "false")  # as a file has them, and as they are typed
LOGGERS = ", ".join(sorted(set(loggers.__all__) - {"Logger"}))
# What these settings allow, in words instead of Lightning's types.
CLASSES = {
    "model": f"{', '.join(tasks.TASKS)}, or the class path of a LightningModule, as my_ideas.Denoising",
    "data": f"{', '.join(data.__all__)}, or the class path of a LightningDataModule, as my_ideas.Sequences",
    "trainer.logger": f"the name of a Logger that is built in ({LOGGERS}), or the class path of one, as my_module.MyLogger",
    "trainer.callbacks": "the name of a Callback that is built in (`python run.py list callbacks` shows ours), or the "
    "class path of one, as my_module.MyCallback",
}


def check_class_paths(argv: list[str]) -> None:
    """Raises ValueError for the first class of a command line or its --config files that is not found or fails to import."""
    for setting, path in (pair for _, key, value in walk(argv) for pair in _named(key, value)):
        if path.isidentifier():
            _check_name(setting, path)
        elif _is_path(path):
            _check_typed(class_of(path, setting), setting)


def classes_given(argv: list[str]) -> dict[str, type]:
    """{"model": class, "data": class}: the classes that the command line or its --config files name, or the default ones."""
    found, settings = {}, given_settings(argv)
    for key, default in DEFAULT_CLASSES.items():
        name = settings[key] if isinstance(settings.get(key), str) else default
        own = exported(key).get(name)
        path = name if own is None else own.path
        found[key] = class_of(path if _is_path(path) else default, key)
    return found


def class_of(path: str, setting: str) -> type:
    """The class; ValueError if its module fails to import, with the reason, or if it does not exist or is of another kind."""
    try:
        return Registry(setting, BASE_OF[setting]).find(path)
    except UnknownKind as error:
        raise SettingError(setting, path, kinds(setting), error.more) from error


def _check_typed(kind: type, setting: str) -> None:
    """Raises UserError for a subclass of ours that takes a group of settings, such as encoder, without its type."""
    parameters = inspect.signature(kind.__init__).parameters
    for base in (base for base in kind.__mro__ if base.__module__.startswith("lit_linformer.")):
        for name, hint in get_type_hints(base.__init__).items():
            group = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
            if group is not None and name in parameters and parameters[name].annotation is inspect.Parameter.empty:
                typed = f"{name}: {group.__name__} | None = None, as in {base.__name__}"
                raise UserError(f"{setting}.{name} has no type in {kind.__module__}.{kind.__qualname__}", typed)


def _check_name(setting: str, name: str) -> None:
    # find_class imports what it finds, and jsonargparse finds imported classes by name.
    if find_class(name, setting) is None and name.lower() not in NO_CLASS:
        known = {*getattr(OURS.get(setting), "__all__", ()), *(kind.__name__ for kind in _subclasses(BASES[setting]))}
        raise SettingError(setting, name, kinds(setting), more=meant(name, sorted(known)))


def kinds(setting: str) -> str:
    """What is allowed for a setting that names a class, in words."""
    base = BASE_OF[setting].__name__
    return CLASSES.get(setting, f"the name of a {base} that is built in, or the class path of one, as my_module.My{base}")


def find_class(name: str, setting: str) -> type | None:
    """The class that a class path or a short name stands for; None if there is none."""
    if name.isidentifier():
        if name in getattr(OURS.get(setting), "__all__", ()):
            return getattr(OURS[setting], name)
        return next((kind for kind in _subclasses(BASE_OF[setting]) if kind.__name__ == name), None)
    with contextlib.suppress(UserError):
        return class_of(name, setting)
    return None


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _named(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """(setting, class path or name) of each class under a key: model: …, trainer: {callbacks: …}, trainer.callbacks+: …"""
    key = key.removesuffix("+").removesuffix(".class_path")
    if key in BASES:
        for spec in as_list(value):
            path = spec.get("class_path") if isinstance(spec, dict) else spec
            if isinstance(path, str):
                yield key, path
    elif isinstance(value, dict) and any(setting.startswith(f"{key}.") for setting in BASES):
        for inner, one in value.items():
            yield from _named(f"{key}.{inner}", one)


def _is_path(path: str) -> bool:
    """Whether this is a class path, not the path of a settings file."""
    return "." in path and all(part.isidentifier() for part in path.split(".")) and not Path(path).is_file()
