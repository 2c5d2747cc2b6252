"""Classes that a command line or a config names: found, or refused in one line that says why, before jsonargparse sees them."""

import difflib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger

from lit_linformer import data, tasks
from lit_linformer.model.registry import Registry, UnknownKind
from lit_linformer.utils.errors import SettingError

BASES = {"model": LightningModule, "data": LightningDataModule, "trainer.callbacks": Callback, "trainer.logger": Logger}
OURS = {"model": tasks, "data": data}
# What they are made of, where Lightning's type says it in the language of types.
CLASSES = {
    "model": f"{', '.join(tasks.TASKS)}, or the class path of a LightningModule, as my_ideas.Denoising",
    "data": f"{', '.join(data.__all__)}, or the class path of a LightningDataModule, as my_ideas.Sequences",
}


def check_class_paths(argv: list[str], files: list[str]) -> None:
    """ValueError for the first class that cannot be imported or is not there.

    Args:
        argv: the command's words.
        files: its --config files.
    """
    for setting, path in (*classes_in_words(argv), *(found for file in files for found in _in_file(file))):
        if path.isidentifier():
            _check_name(setting, path)
        elif all(part.isidentifier() for part in path.split(".")) and not Path(path).is_file():  # a file of settings
            class_of(path, setting)


def class_of(path: str, setting: str) -> type:
    """The class; ValueError for a module that fails, and tells how, for a class that is not there or is of another kind."""
    try:
        return Registry(setting, BASES[setting]).find(path)
    except UnknownKind as error:
        raise SettingError(setting, path, _allowed(setting), error.more) from error


def _check_name(setting: str, name: str) -> None:
    ours = getattr(OURS.get(setting), "__all__", ())
    if name in ours:
        getattr(OURS[setting], name)  # jsonargparse finds by name what has been imported
        return
    known = {*ours, *(kind.__name__ for kind in _subclasses(BASES[setting]))}
    if name in known or name.lower() in ("true", "false", "null", "none"):
        return
    near = difflib.get_close_matches(name, sorted(known), 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise SettingError(setting, name, _allowed(setting), more=meant)


def _allowed(setting: str) -> str:
    base = BASES[setting].__name__
    return CLASSES.get(setting, f"the name of a {base} that is built in, or the class path of one, as my_module.My{base}")


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def classes_in_words(argv: list[str]) -> Iterator[tuple[str, str]]:
    """(setting, class path or name) of a command line."""
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        option, given, value = word.partition("=")
        setting = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
        if option.startswith("--") and setting in BASES:
            yield setting, value if given else following


def _in_file(file: str) -> Iterator[tuple[str, str]]:
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return  # another's error
    for setting in BASES:
        found: Any = content
        for key in setting.split("."):
            found = found.get(key, found.get(f"{key}+")) if isinstance(found, dict) else None
        for spec in found if isinstance(found, list) else [found]:
            path = spec.get("class_path") if isinstance(spec, dict) else spec
            if isinstance(path, str):
                yield setting, path
