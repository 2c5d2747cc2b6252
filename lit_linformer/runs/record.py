"""What a run has written into its folder, as far as it exists: config, curve, results; and its status and model in words.

This module does not import torch.
"""

import contextlib
import math
import pickletools
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.runs.folder import BEST, CONFIG, CONVERSION, CURVES, PRUNED, RESULT, TEST, VALIDATE, checkpoints, is_run
from lit_linformer.runs.lock import is_held
from lit_linformer.utils import sources
from lit_linformer.utils.files import read_json, read_rows, value_at

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast, if it was built in
HPARAMS = "hparams.yaml"  # the model's settings, written by a logger
DEEPEST = 3  # folders below runs/ in which runs are looked for


@dataclass
class RunRecord:
    """A run's files, each read at first use. Whatever is missing, incomplete or malformed is empty."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._mapping_of(CONFIG)

    def _mapping_of(self, file: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            return _mapping(yaml.load((self.folder / file).read_text(encoding="utf-8"), Loader))
        return {}

    def setting(self, name: str, otherwise: Any = None) -> Any:
        """A setting of config.yaml, such as model.init_args.lr."""
        found = value_at(self.config, name.split("."))
        return otherwise if found is None else found

    def encoder(self, name: str) -> Any:
        """A setting of the encoder: from the config or, if the run took over a model's encoder, from hparams.yaml."""
        if isinstance(self.setting("model.init_args.encoder"), dict):
            return self.setting(f"model.init_args.encoder.{name}")
        return _mapping(self.hyper_parameters.get("encoder")).get(name)

    @cached_property
    def hyper_parameters(self) -> dict[str, Any]:
        return self._mapping_of(HPARAMS)

    @cached_property
    def curve(self) -> list[dict[str, float]]:
        """A row for each validation."""
        return next((rows for name in CURVES if (rows := read_rows(self.folder / name))), [])

    @cached_property
    def result(self) -> dict[str, Any]:
        """What `fit` writes at its end."""
        return read_json(self.folder / RESULT) or {}

    @cached_property
    def validated(self) -> dict[str, Any]:
        return read_json(self.folder / VALIDATE) or {}

    @cached_property
    def tested(self) -> dict[str, Any]:
        return read_json(self.folder / TEST) or {}

    @cached_property
    def conversion(self) -> dict[str, Any]:
        """What `convert` made the run from (conversion.json); {} for a run that was not converted."""
        return read_json(self.folder / CONVERSION) or {}

    def last(self, name: str, otherwise: Any = None) -> Any:
        """The final value of a number such as step or tokens: from result.json, else from the last validation."""
        found = self.result.get(name)
        return found if found is not None else self.curve[-1].get(name, otherwise) if self.curve else otherwise

    @property
    def monitor(self) -> str:
        """The metric that decides which validation was best."""
        return self.setting("best.monitor", "val/perplexity")

    def best(self) -> tuple[float | None, int | None]:
        """The monitored metric's best value, and its step."""
        if (found := self.result.get("best_metrics", {}).get(self.monitor)) is not None:
            return found, self.result.get("best_step")
        value, step, _ = self.best_checkpoint()
        return (value, step) if math.isfinite(value) else (None, None)

    def best_checkpoint(self) -> tuple[float, int, Path | None]:
        """Metric, step and file of the best validation; (NaN, 0, None) if there is none.

        If a run was restarted from an earlier step, the results of later steps no longer count: only those on the curve do.
        """
        named = [(path, found) for path in checkpoints(self.folder) if (found := BEST.fullmatch(path.name))]
        scored = [(float(found[2]), int(found[1]), path) for path, found in named if found[2] != "nan"]

        def measured(score: float, step: int) -> float | None:
            """The curve's value; the file name has four decimals of a float32, with which small ones would all be 0.0000."""
            rows = (row for row in self.curve if row.get("step") == step)
            values = (row[name] for row in rows for name in (self.monitor, "perplexity") if name in row)
            return next((value for value in values if abs(value - score) <= 1e-4 + 1e-6 * abs(score)), None)

        exact = [(value, step, path) for score, step, path in scored if (value := measured(score, step)) is not None]
        better = max if self.setting("best.mode") == "max" else min
        return better(exact or scored, key=lambda one: one[0], default=(math.nan, 0, None))

    def step(self) -> int | None:
        found = self.result.get("step") or checkpoint_step(self.folder / "checkpoints" / "last.ckpt") or self.last("step")
        return None if found is None else int(found)

    def status(self) -> str:
        """Whether it runs, or how it ended, in words."""
        step, most = self.step(), self.setting("trainer.max_steps")
        end = f" of {most:,}" if isinstance(most, int) and most > 0 else ""
        if is_held(self.folder):
            return f"running, step {step or 0:,}{end}"
        if self.result:
            whole = not end or step is None or step >= most
            return "finished" if whole else f"ended at step {step:,}{end}"
        if self.conversion:
            return "converted"
        if (self.folder / PRUNED).is_file():
            return f"pruned at step {step or 0:,}{end}"
        return f"stopped at step {step:,}{end}" if step else "stopped before its first checkpoint"

    def model(self) -> str:
        """A short description, such as `MLM, linformer, k = 32`."""
        words = [str(self.setting("model.class_path", "")).rpartition(".")[2]]
        words += [str(task)] if (task := self.setting("data.init_args.task")) else []
        if attention := self.encoder("attention"):
            name = str(attention)
            words.append(name.rpartition(".")[2])
            kind = sources.registered("ATTENTIONS").get(name) or sources.find(name)
            slots = kind is None or "projection_dim" in kind.settings()
            words += [f"k = {self.encoder('projection_dim')}"] if slots else []
        elif source := self.conversion.get("from", self.setting("model.init_args.pretrained")):
            words.append(f"from {source}")
        return ", ".join(word for word in words if word)


def of_class(path: Any, name: str) -> bool:
    """Whether a class path, as configs and checkpoints have them, ends in that class's name."""
    return str(path or "").rpartition(".")[2] == name


def of_split(metric: str, split: str) -> bool:
    """Whether a metric is named after a split: val/loss or, in many other projects, val_loss."""
    return metric.startswith((f"{split}/", f"{split}_"))


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def find_runs(source: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one, sorted by name."""
    if is_run(source):
        return [source]
    found: list[Path] = []
    places = [source]
    for _ in range(DEEPEST):
        places = [inner for place in places for inner in _folders(place)]
        found += [place for place in places if is_run(place)]
        places = [place for place in places if place not in found]
    return sorted(found)


def checkpoint_step(path: Path) -> int | None:
    """The optimiser step of a checkpoint, read from its pickle without running it; None: not found."""
    path = path / "meta.pt" if path.is_dir() else path  # where a sharded one has it
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile, KeyError), zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("data.pkl"))
        asked = False
        for operation, argument, _ in pickletools.genops(file.read(name)):
            if argument == "global_step":
                asked = True
            elif asked and isinstance(argument, int) and "PUT" not in operation.name:  # PUT's argument is a memo index
                return argument
    return None


def _folders(place: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [inner for inner in place.iterdir() if inner.is_dir() and not inner.is_symlink() and inner.name[0] != "."]
    return []
