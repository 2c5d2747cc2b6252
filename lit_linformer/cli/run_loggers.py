"""trainer.logger on the command line and in files: Lightning's loggers or your own, writing to the run folder."""

import inspect
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lit_linformer.callbacks.curves import Identities
from lit_linformer.callbacks.loggers import Settings, writer_of
from lit_linformer.cli.class_paths import class_of
from lit_linformer.cli.given import as_list

DEFAULT_LOGGER = Namespace(class_path=f"{TensorBoardLogger.__module__}.TensorBoardLogger", init_args=Namespace(save_dir=None))


class RunParser(LightningArgumentParser):
    """Makes a logger's save_dir optional; it is the run folder by default."""

    def add_class_arguments(self, class_type: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        logger = isinstance(class_type, type) and issubclass(class_type, Logger)
        place = inspect.signature(class_type).parameters.get("save_dir") if logger else None
        if place is None or place.default is not inspect.Parameter.empty:
            return super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        kwargs["skip"] = {*(kwargs.get("skip") or ()), "save_dir"}
        added = super().add_class_arguments(class_type, nested_key, *args, **kwargs)
        key = f"{nested_key}.save_dir" if nested_key else "save_dir"
        self.add_argument(f"--{key}", type=str | None, default=None, help="Where it writes; null: the run's folder.")
        return [*added, key]


class RunLoggers:
    """The loggers of a run, built when it begins to train.

    Args:
        given: trainer.logger as it was parsed: None or True for TensorBoard, False for no logger.
        folder: the run folder.
        name: the run's name.

    Raises ValueError, in one line, for a logger whose package is not installed.
    """

    def __init__(self, given: Any, folder: Path, name: str) -> None:
        specs = as_list(DEFAULT_LOGGER if given in (None, True) else given or None)
        self._chosen = [(class_of(spec.class_path, "trainer.logger"), spec) for spec in specs]
        for kind, _ in self._chosen:
            writer_of(kind)
        self._folder, self._name = folder, name

    def __len__(self) -> int:
        return len(self._chosen)

    def build(self, known: Identities) -> list[Logger]:
        left = {kind: list(found) for kind, found in known.items()}
        earlier = [(left.get(kind.__name__) or [None]).pop(0) for kind, _ in self._chosen]
        return [
            kind(**self._settings(kind, spec, identity), **(spec.get("dict_kwargs") or {}))
            for (kind, spec), identity in zip(self._chosen, earlier, strict=True)
        ]

    def shown_by(self) -> list[str]:
        """The commands that show the loggers' curves."""
        lines = (writer_of(kind).shown_by(self._settings(kind, spec), self._folder) for kind, spec in self._chosen)
        return [line for line in lines if line is not None]

    def _settings(self, kind: type[Logger], spec: Namespace, earlier: str | None = None) -> Settings:
        given = spec.get("init_args", Namespace()).as_dict()
        return writer_of(kind).settings(given, self._folder, self._name, earlier)
