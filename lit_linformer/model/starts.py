"""How a learned E is initialised (``projection_init``). To add an initialisation, write a function here and list it below.

Shapes: n = max_length, K = k projected slots, H heads.
"""

import itertools
import math

import torch
from torch import Tensor, nn

from .errors import UserError
from .parts import image_side

Part = tuple[int, int]  # (h, H): the h-th of H heads


def block_mean(width: int, part: Part) -> Tensor:
    """Slot j is the mean of window j."""
    return torch.zeros(width) + 1.0 / width


def split(width: int, part: Part) -> Tensor:
    """Slot j is the mean of a part of window j, a different one for each head."""
    first, after = _share(width, part)
    weights = torch.zeros(width)
    weights[first:after] = 1.0 / (after - first)
    return weights


def strided(width: int, part: Part) -> Tensor:
    """Slot j is one token of window j, the first one of the head's part."""
    weights = torch.zeros(width)
    weights[_share(width, part)[0]] = 1.0
    return weights


def normal(max_length: int, projection_dim: int) -> Tensor:
    """N(0, 1/k), the random projection of Theorem 2."""
    return torch.zeros(projection_dim, max_length).normal_(0.0, 1.0 / math.sqrt(projection_dim))


def xavier(max_length: int, projection_dim: int) -> Tensor:
    """Uniform with gain 1/sqrt(2), as in the authors' released code."""
    return nn.init.xavier_uniform_(torch.zeros(projection_dim, max_length), gain=1.0 / math.sqrt(2.0))


def squares(max_length: int, projection_dim: int) -> Tensor:
    """Slot j is the mean of square j of an image, whose pixels are the tokens; bos and eos, if n includes them, are in none."""
    side, around = image_side(max_length)
    across = math.isqrt(projection_dim)
    square = torch.arange(side) * across // side  # of each row, and of each column
    inside = (square[:, None] * across + square).flatten() == torch.arange(projection_dim)[:, None]  # (K, side²)
    return nn.functional.pad(inside * (projection_dim / side**2), (around, around))


def check_squares(max_length: int, projection_dim: int) -> None:
    """Raises UserError if n tokens are not an image, or k squares do not tile it."""
    side, _ = image_side(max_length)
    counts = [across * across for across in range(1, side + 1) if side % across == 0]
    if projection_dim not in counts:
        what = f"projection_dim (k) is {projection_dim}, but squares do not tile {side} × {side} pixels so"
        raise UserError(what, ", ".join(map(str, counts)), when="with projection_init='squares'")


# Those of a window, (width, part) → (width,), are a convolution's, too; those of a matrix, (n, K) → (K, n), are not.
WINDOW_INITS = {"block_mean": block_mean, "split": split, "strided": strided}
MATRIX_INITS = {"normal": normal, "xavier": xavier, "squares": squares}
PROJECTION_INITS = {**WINDOW_INITS, **MATRIX_INITS}
# Checks for those that do not fit every n and k. Only projections that take a matrix (`fill`) can have these.
FITS = {"squares": check_squares}


def initial_matrix(init: str, max_length: int, projection_dim: int, part: Part = (0, 1)) -> Tensor:
    """An initial E, (K, n), for one head: ``part`` is (its index, their number)."""
    if init in MATRIX_INITS:
        return MATRIX_INITS[init](max_length, projection_dim)
    E = torch.zeros(projection_dim, max_length)
    bounds = [j * max_length // projection_dim for j in range(projection_dim + 1)]  # of windows of nearly equal width
    for row, (start, stop) in zip(E, itertools.pairwise(bounds), strict=True):
        row[start:stop] = WINDOW_INITS[init](stop - start, part)
    return E


def _share(width: int, part: Part) -> tuple[int, int]:
    """A head's part of a window: from its first token up to, but not including, the second number."""
    head, heads = part
    first = head * width // heads
    return first, max(first + 1, (head + 1) * width // heads)
