"""Settings of a command that is no Trainer's: `--KEY VALUE …`, checked one by one, without importing torch."""

import contextlib
import difflib
import math
from typing import Any

MANY = 2**31 - 1  # what a count may be at most; larger ones overflow somewhere below


def help_shown(argv: list[str], usage: str, settings: dict[str, tuple], width: int, doc: str) -> bool:
    """Prints a command's help if it is asked for. settings: {key: (kind, …, help)}; width: columns before the helps."""
    if not {"-h", "--help"} & set(argv):
        return False
    lines = "".join(f"  {'--' + key + ' ' + kind:<{width}}{what}\n" for key, (kind, *_, what) in settings.items())
    print(f"usage: python run.py {usage}\n\n{lines}\n{doc}", end="")
    return True


def parse(command: str, settings: dict[str, tuple[str, str]], argv: list[str]) -> dict[str, list[str]]:
    """{key: its values in their order}; ValueError for a word that is none of the settings, {key: (kind, help)}."""
    given: dict[str, list[str]] = {}
    words = iter(argv)
    for word in words:
        key, equals, value = word.partition("=")
        if key[:2] != "--" or key[2:] not in settings:
            allowed = [f"--{name}" for name in settings]
            raise ValueError(f"unknown setting {key!r} of {command}{meant(key, allowed)}; allowed: {', '.join(allowed)}")
        value = value if equals else next(words, None)
        if value is None:
            raise ValueError(f"{key} has no value; allowed: {settings[key[2:]][0]}")
        given.setdefault(key[2:], []).append(value)
    return given


def check_choice(where: str, value: Any, allowed: Any) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{where} is {value!r}{meant(str(value), allowed)}; allowed: {', '.join(allowed)}")
    return value


def meant(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_number(where: str, text: Any, whole: bool = False, least: float = -math.inf, most: float = MANY) -> float:
    """The number that is meant, finite and from least to most (a whole one from 0 on if least is not given)."""
    least = max(least, 0) if whole else least
    with contextlib.suppress(TypeError, ValueError):
        value = int(text) if whole else float(text)
        if math.isfinite(value) and least <= value <= most:
            return value
    words = "" if least == -math.inf else f", {least:g} or more" if most == MANY else f", {least:g} to {most:.10g}"
    raise ValueError(f"{where} is {text!r}; allowed: a{' whole' * whole} number{words}")


def whole_numbers(where: str, text: str | None) -> list[int] | None:
    """Those of 0,3, of "0 3" or of [0, 3], in order and each once; None where the setting is not given."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        found = sorted({int(word) for word in text.strip("[]").replace(",", " ").split()})
        if found and found[0] >= 0 and found[-1] <= MANY:
            return found
    raise ValueError(f"{where} is {text!r}; allowed: whole numbers from 0, as 0,3")


def device(name: str) -> str:
    """The device meant by auto, cpu, cuda or cuda:N; ValueError for one that is not here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    check_choice("device", name, allowed)
    if name in ("auto", "cuda"):
        return "cuda:0" if count else "cpu"
    return name
