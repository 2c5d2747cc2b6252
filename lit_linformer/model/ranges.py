"""Ranges of numbers, and allowed names, stated where a setting is declared: `lr: Annotated[float, Range(above=0)] = 1e-3`.

`check_ranges` checks values against them. The command line does so before anything is built, and `--help` shows them.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .errors import SettingError

MANY = 2**31 - 1  # the largest count allowed; larger ones would overflow somewhere
PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", type(None): "null"}


@dataclass(frozen=True, repr=False)
class Range:
    """Finite numbers ≥ ``least`` or > ``above``, and ≤ ``most`` or < ``below``; and also those in ``also``.

    ``largest`` is an upper bound that only a typo exceeds: messages mention it only if it is exceeded.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    largest: float = MANY

    def __contains__(self, value: float) -> bool:
        return value in self.also or (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value <= (self.largest if self.most is None else self.most)
        )

    def __repr__(self) -> str:
        return self.words()

    def words(self, value: float = 0) -> str:
        """`0 to 1`, `more than 0`, `1 or more, or -1`: what is allowed, in words, for a user who gave ``value``."""
        most = self.largest if self.most is None and self.below is None and value > self.largest else self.most
        low = f"{self.least:g}" if self.above is None else f"more than {self.above:g}"
        if self.below is not None:
            words = f"at least {low}, less than {self.below:g}" if self.above is None else f"{low}, less than {self.below:g}"
        elif most is not None:
            words = f"{low} to {most:.10g}" if self.above is None else f"{low}, up to {most:.10g}"
        else:
            words = f"{low} or more" if self.above is None else low
        return words + "".join(f", or {number:g}" for number in self.also)


class OneOf(tuple):
    """The names that a setting allows: `mode: Annotated[str, OneOf(("min", "max"))]`."""

    def __repr__(self) -> str:
        return ", ".join(self)


Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
Dropout = Annotated[float, Range(least=0, below=1)]
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]


def check_ranges(prefix: str, declared: Any, values: Mapping[str, Any]) -> None:
    """Raises ValueError for the first of ``values`` that ``declared`` (a function or a class) does not allow.

    Args:
        prefix: what precedes a setting's name on the command line, such as "model."; "" in plain Python.
        declared: the function or dataclass whose annotations count, or a mapping {name: annotation}.
        values: {name: value}, as locals() gives them; names without an annotation are ignored.
    """
    hints = declared if isinstance(declared, Mapping) else get_type_hints(declared, include_extras=True)
    for name, hint in hints.items():
        if name in values:
            _check(f"{prefix}{name}", hint, values[name])


def check_values(prefix: str, declared: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """As ``check_ranges``, and ValueError for a wrong type, such as text for a number: for values that no parser has read."""
    try:
        hints = get_type_hints(declared, include_extras=True)
    except NameError:  # a user's own class, whose annotations are imported for type checkers only
        return
    for name, hint in ((name, hints[name]) for name in values if name in hints):
        plain = _plain(_kinds(hint))
        if not set(plain) <= set(PLAIN):  # lists and the like
            continue
        fitting = isinstance(values[name], (*plain, int) if float in plain else plain)
        if not fitting or (isinstance(values[name], bool) and bool not in plain):
            raise SettingError(f"{prefix}{name}", values[name], " or ".join(PLAIN[kind] for kind in plain))
    check_ranges(prefix, hints, values)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """What a union allows, one by one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _plain(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types themselves, without ranges."""
    return tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)


def _check(where: str, hint: Any, value: Any) -> None:
    kinds = _kinds(hint)
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        numbers = [kind for kind in kinds if get_origin(kind) is Annotated]
        # If both are allowed, a whole number is a count, and 0.5 a share.
        fitting = [kind for kind in numbers if get_args(kind)[0] is type(value)] or numbers
        allowed = [part for kind in fitting for part in get_args(kind)[1:] if isinstance(part, Range)]
        if allowed and value not in allowed[0]:
            raise SettingError(where, value, allowed[0].words(value))
        if isinstance(value, float) and int in (plain := _plain(kinds)) and float not in plain:  # such as 512 / 4
            raise SettingError(where, value, PLAIN[int])
    elif isinstance(value, list | tuple):
        for kind in kinds:
            for item in value if get_origin(kind) in (list, tuple) else ():
                _check(where, get_args(kind)[0], item)
    elif value is None:
        if get_origin(hint) is Annotated:
            raise SettingError(where, None, repr(get_args(hint)[1]))
    elif isinstance(value, str):
        names = [part for kind in kinds for part in get_args(kind) if isinstance(part, OneOf)]
        if names and value not in names[0]:
            raise SettingError(where, value, repr(names[0]))
    else:
        for kind in kinds:
            if is_dataclass(kind):
                check_ranges(f"{where}.", kind, value if isinstance(value, Mapping) else vars(value))
