"""Errors that the user can fix, and their one-line messages: `lr is -1; allowed: more than 0`."""

import difflib
from collections.abc import Iterable
from typing import Any

LONGEST = 200  # characters of a text in a message: a cell of a table may hold a document


class UserError(ValueError):
    """A mistake that the user can fix: ``what`` is wrong, and what is ``allowed`` instead, if that is known.

    Args:
        what: such as `train.csv, line 3 has 4 fields`.
        allowed: such as `2, as its first line`.
        when: the condition under which that is allowed, such as `with projection='gated'`.
    """

    of_all_processes = False  # True: every process raises it, and the first one prints it

    def __init__(self, what: str, allowed: str = "", when: str = ""):
        super().__init__(what, allowed, when)  # args, from which pickle recreates the error in another process
        self.what, self.allowed, self.when = what, allowed, when

    def __str__(self) -> str:
        when = f" {self.when}" if self.when else ""
        return f"{self.what}; allowed{when}: {self.allowed}" if self.allowed else self.what


class SettingError(UserError):
    """A setting has a value that is not allowed.

    Args:
        setting: its name, as the user types it.
        value: the value it was given.
        allowed: the allowed values, in words.
        more: what is wrong with the value, with a leading comma, such as `, which is no file`.
        when: as for UserError.
    """

    def __init__(self, setting: str, value: Any, allowed: str, more: str = "", when: str = ""):
        super().__init__(f"{setting} is {shown(value)}{more}", allowed, when)
        self.args = setting, value, allowed, more, when
        self.setting, self.value, self.more = setting, value, more


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def meant(word: Any, known: Iterable[str], before: str = "") -> str:
    """`; did you mean 'lookup'?`: the closest known name, prefixed with ``before``; "" if none is close."""
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f"; did you mean '{before}{near[0]}'?" if near else ""


def shown(value: Any) -> str:
    """A value as typed on the command line; text in quotes, so that an empty one is visible, and at most LONGEST characters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return repr(shortened(value)) if isinstance(value, str) else str(value)


def shortened(text: str) -> str:
    """At most LONGEST characters of a text, and … if it has more."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
