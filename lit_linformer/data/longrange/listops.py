"""ListOps: expressions such as [MAX 2 9 [MIN 4 7 ] 0 ], whose value, 0 to 9, is to be told (Nangia and Bowman, 2018).

Made by the grammar of Long Range Arena (Tay et al., 2021): the root, and each argument, is an operator with probability
1/4, else a digit; an operator has 2 to 10 arguments; there are up to 10 levels; expressions of 501 to 1,999 tokens are kept.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lit_linformer.data.reading import text_lines
from lit_linformer.utils.errors import SettingError, UserError

OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda numbers: int(np.median(numbers)),
    "[SM": lambda numbers: sum(numbers) % 10,
}
CLOSE = "]"
SYMBOLS = (*map(str, range(10)), *OPERATORS, CLOSE)
OPERATOR_SHARE, LEVELS, MOST_ARGUMENTS = 0.25, 10, 10
LONGER_THAN, SHORTER_THAN = 500, 2000

_NUMBER = {symbol: number for number, symbol in enumerate(SYMBOLS)}


def expression(chance: Callable[[], float]) -> np.ndarray:
    """Numbers of SYMBOLS, (L,) uint8: the first expression drawn that is neither too short nor too long.

    chance: gives a number from at least 0, less than 1, whenever it is called.
    """
    while True:
        tokens, missing = [], []  # arguments that each open operator still lacks
        while len(tokens) < SHORTER_THAN:
            if len(missing) < LEVELS - 1 and chance() <= OPERATOR_SHARE:
                tokens.append(10 + int(4 * chance()))
                missing.append(2 + int((MOST_ARGUMENTS - 1) * chance()))
                continue
            tokens.append(int(10 * chance()))
            while missing:
                missing[-1] -= 1
                if missing[-1]:
                    break
                missing.pop()
                tokens.append(_NUMBER[CLOSE])
            if not missing:
                break
        if not missing and LONGER_THAN < len(tokens) < SHORTER_THAN:
            return np.array(tokens, np.uint8)


def value(tokens: np.ndarray) -> int:
    """What an expression comes to; of an even number of arguments the median is rounded down, and SM is the sum modulo 10.

    Raises ValueError where it is none.
    """
    open_: list[list[int]] = [[]]
    for token in tokens.tolist():
        if token == _NUMBER[CLOSE]:
            if len(open_) == 1 or len(open_[-1]) == 1:
                raise ValueError("it has a bracket too many, or an operator without arguments")
            operator, *arguments = open_.pop()
            token = OPERATORS[SYMBOLS[operator]](arguments)
        elif token >= 10:
            open_.append([token])
            continue
        open_[-1].append(token)
    if len(open_) > 1 or len(open_[0]) != 1:
        raise ValueError("it lacks a bracket" if len(open_) > 1 else "it is not one expression")
    return open_[0][0]


def row(split: str, number: int) -> tuple[list[np.ndarray], int]:
    """([tokens], value), a function of the row's number and the split."""
    tokens = expression(random.Random(f"0 {split} {number}").random)
    return [tokens], value(tokens)


def read(files: list[Path]) -> Iterator[tuple[list[np.ndarray], int]]:
    """The same of the authors' file, of which a split has one: Source, with round brackets, and Target."""
    path, *others = files
    if others:
        there = " and ".join(each.name for each in files)
        raise SettingError("data.source", path.parent, "one file for each split", more=f", where {there} are of one split")
    for number, line, _ in text_lines(path, "data.source"):
        source, tab, target = line.partition("\t")
        if number == 1 and (source, target) == ("Source", "Target"):
            continue
        words = source.replace("(", " ").replace(")", " ").split()
        try:
            tokens = np.array([_NUMBER[word] for word in words], np.uint8)
            if not tab or target not in SYMBOLS[:10]:
                raise ValueError(f"its target is {target!r}")
            if value(tokens) != int(target):
                raise ValueError(f"it comes to {value(tokens)}, not {target}")
        except (KeyError, ValueError) as error:
            wrong = f"it has {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"data.source: {path}:{number} is no row of ListOps: {wrong}",
                f"an expression of {' '.join(SYMBOLS)}, a tab, its value, 0 to 9",
            ) from error
        yield [tokens], int(target)
