"""Reads and checks a space file; cli/tune.py describes the format."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.runs.folder import check_name
from lit_linformer.studies.grid.file import OURS
from lit_linformer.utils.arguments import check_choice, check_number
from lit_linformer.utils.configs import check_command, read_config
from lit_linformer.utils.errors import SettingError, UserError

KEYS = ["name", "trials", "space", "first", "pruner", "prune_after"]
PRUNERS = ("median", "halving", "none")


@dataclass(frozen=True)
class Axis:
    """A setting and the values to search: between two numbers, or a list of words.

    Args:
        setting: as on the command line, without its dashes.
        ends: the smallest and the largest value; whole numbers if both are written as such.
        log: whether to search on a log scale.
        choices: the values instead of ends, as typed on the command line.
        first: values that the user chose to try first.
    """

    setting: str
    ends: tuple[float, float] | None = None
    log: bool = False
    choices: tuple[str, ...] = ()
    first: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        return self.ends is not None and all(isinstance(end, int) for end in self.ends)

    def word(self, value: Any) -> str:
        """A value as typed on the command line: floats with four digits, but those of ``first`` with all."""
        return f"{value:.4g}" if isinstance(value, float) and value not in self.first else str(value)

    def read(self, where: str, text: str) -> Any:
        """A value that the user chose; UserError if it is outside the space."""
        if self.ends is None:
            return check_choice(where, text, self.choices)
        return check_number(where, text, whole=self.whole, least=self.ends[0], most=self.ends[1])

    def told(self) -> str:
        """The values as written in the file."""
        if self.ends is None:
            return f"[{', '.join(self.choices)}]"
        return f"{{{'log' if self.log else 'range'}: [{self.ends[0]:g}, {self.ends[1]:g}]}}"


@dataclass(frozen=True)
class Space:
    """A space file.

    Args:
        first: values of some settings to try before any others.
        prune_after: how many trials must have finished before the median pruner ends one.
    """

    name: str
    axes: tuple[Axis, ...]
    trials: int
    first: tuple[dict[str, Any], ...]
    pruner: str
    prune_after: int


def read_space(path: Path, name: str | None, trials: int | None) -> Space:
    """Reads a space file; UserError for anything that can be checked without a model."""
    # Every scalar stays text: 1e-3 and on are passed on as typed.
    what = "a space file, as conf/tune/lr.yaml"
    spec = yaml.load(read_config(path, what), yaml.BaseLoader)
    check_command(path, spec, "tune --space", what)
    for key in spec:
        check_choice("space", key, KEYS)
    given = spec.get("space")
    if not isinstance(given, dict) or not given:
        raise SettingError("space", given, "settings and their values, as {model.lr: {log: [1e-4, 1e-2]}}")
    axes = {setting: _axis(setting, value) for setting, value in given.items()}
    first = spec.get("first") or []
    if not isinstance(first, list) or not all(isinstance(values, dict) for values in first):
        raise SettingError("first", first, "a list of settings and values, as [{model.lr: 1e-3}]")
    for values in first:
        for setting in values:
            check_choice("first", setting, axes)
    chosen = [{key: axes[key].read(f"first {key}", text) for key, text in values.items()} for values in first]
    tried = {key: tuple(values[key] for values in chosen if key in values) for key in axes}
    return Space(
        name=check_name(name if name is not None else spec.get("name") or path.stem),
        axes=tuple(replace(axis, first=tried[key]) for key, axis in axes.items()),
        trials=trials if trials is not None else int(check_number("trials", spec.get("trials", "20"), whole=True, least=1)),
        first=tuple(chosen),
        pruner=check_choice("pruner", spec.get("pruner", "median"), PRUNERS),
        prune_after=int(check_number("prune_after", spec.get("prune_after", "4"), whole=True, least=1)),
    )


def _axis(setting: str, value: Any) -> Axis:
    if f"--{setting}" in (*OURS, "--config") or setting.startswith("-"):
        raise UserError(f"space holds {setting}", f"settings of a run, without dashes, but for {', '.join(OURS)}")
    where = f"space {setting}"
    if isinstance(value, list) and value:
        words = tuple(one if isinstance(one, str) else _flow(one) for one in value)
        if len(set(words)) < len(words):
            raise UserError(f"{where} is [{', '.join(words)}]", "each value once")
        return Axis(setting, choices=words)
    kind, ends = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind not in ("log", "range") or not isinstance(ends, list) or len(ends) != 2:
        raise UserError(f"{where} is {_flow(value)}", "{log: [LEAST, MOST]}, {range: [LEAST, MOST]} or a list of values")
    whole = all(isinstance(end, str) and re.fullmatch(r"-?\d+", end) for end in ends)
    low, high = (int(end) if whole else check_number(where, end) for end in ends)
    if not low < high or (kind == "log" and low <= 0):
        raise UserError(f"{where} is {_flow(value)}", f"the smaller number first{', above 0' if kind == 'log' else ''}")
    return Axis(setting, (low, high), kind == "log")


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip().replace("'", "")
