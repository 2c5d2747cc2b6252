"""Labels: what a file holds → class number or value."""

import json
import math
import re
from collections.abc import Iterable

from lit_linformer.data.finetuning.text_tasks import TextTask
from lit_linformer.utils.errors import SettingError


def label_of(value, task: TextTask) -> int | float | None:
    """Class number, or value of a regression; None where there is no label: nothing, an empty cell, or -1 as on the hub."""
    if value is None or value == "":
        return None
    return _number(value, task.label_range) if task.labels is None else _class(value, task.labels)


def as_list(names: Iterable[str]) -> str:
    """The names of classes as data.labels takes them, with quotes around what YAML would read as something else."""
    plain = re.compile(r"(?!(?:yes|no|on|off|true|false|null|y|n)$)[a-z][\w /-]*", re.IGNORECASE)
    return f"[{','.join(name if plain.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in names)}]"


def _class(value, labels: tuple[str, ...]) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    if text in labels:
        return labels.index(text)
    if isinstance(value, bool):
        text = str(int(value))
    allowed = ", ".join(map(repr, labels))
    # Names that are numbers themselves, stars from 1 to 5 say: a 0 is then none of them, not the first one.
    if not any(_is_integer(label) for label in labels):
        if _is_integer(text) and -1 <= int(text) < len(labels):
            return int(text) if int(text) >= 0 else None
        allowed += f", or their numbers 0 to {len(labels) - 1} (-1: no label)"
    elif text == "-1":
        return None
    raise SettingError("label", value, allowed)


def _number(value, allowed: tuple[float, float] | None) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if allowed is None:
        if not math.isfinite(number):
            raise SettingError("label", value, "a finite number (give data.labels for names of classes)")
        return number
    if number == -1:
        return None
    if not allowed[0] <= number <= allowed[1]:
        raise SettingError("label", value, f"a number from {allowed[0]:g} to {allowed[1]:g}")
    return number


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
