"""Attention to nearby tokens, linear in N: a token attends to its own chunk and to the tokens just before and after it.

Shapes: … batch and heads, N tokens, c chunk size, M = ⌈N/c⌉ chunks, r reach (up to c), S = c + 2 r columns, C channels.

A row of up to c + 2 r tokens is one chunk of all its tokens (c = S = N), where those out of reach are masked, since this takes
fewer operations. So is every row in a program that is exported for any length, which does not know M: N² operations.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .attention import as_bias
from .errors import SettingError
from .parts import exporting


def undivided(length: int, chunk: int, reach: int) -> bool:
    """Whether all tokens of a row of N = ``length`` are one chunk."""
    return exporting() or length <= chunk + 2 * reach


def chunked(x: Tensor, chunk: int, fill: float = 0) -> Tensor:
    """(…, N, C) → (…, M, c, C), padded with ``fill``. Exported for any length, where M is not known: (…, 1, N, C)."""
    if exporting():
        return x.unsqueeze(-3)
    return functional.pad(x, (0, 0, 0, -x.shape[-2] % chunk), value=fill).unflatten(-2, (-1, chunk))


def beside(x: Tensor, fill: float = 0, reach: int | None = None) -> Tensor:
    """(…, M, c, C) → (…, M, S, C): each chunk with the r = ``reach`` rows before and after it; None: r = c, whole chunks.

    A single chunk stays as it is.
    """
    return x if x.shape[-3] == 1 else between(x, fill, reach)


def between(x: Tensor, fill: float = 0, reach: int | None = None) -> Tensor:
    """``beside`` where a single chunk, too, has rows before and after it, of ``fill``."""
    if reach == 0:
        return x
    reach, chunk = x.shape[-2] if reach is None else reach, x.shape[-2]
    x = functional.pad(x, (0, 0, 0, 0, 1, 1), value=fill)
    return torch.cat([x[..., :-2, chunk - reach :, :], x[..., 1:-1, :, :], x[..., 2:, :reach, :]], -2)


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """(…, N, C) → (…, M, C): the rows that ``order`` (…, M) names.

    Copies whole rows. On a CPU this takes a quarter to a half of the time of gather, which copies number by number.
    """
    each = order.shape[:-1]
    first = torch.arange(math.prod(each), device=x.device).view(*each, 1) * x.shape[-2]
    return x.reshape(-1, x.shape[-1]).index_select(0, (first + order).flatten()).view(*order.shape, x.shape[-1])


class Permuted(torch.autograd.Function):
    """``in_order`` where ``order`` names each row once: ``Permuted.apply(x, order, back)``, ``back`` being its inverse.

    The gradient is then a permutation, too. That of ``in_order``, where a row may be named twice, is a sum, which a GPU
    computes number by number, in no fixed order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        return in_order(x, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return Permuted.apply(gradient, back, order), None, None


def columns(length: int, chunk: int, reach: int, device: torch.device | None = None) -> Tensor:
    """(M, c, S) int64: the token in each column of each token; -1 beyond the row's ends and out of reach."""
    place = torch.arange(length, device=device)
    if undivided(length, chunk, reach):
        first = place[:, None] // chunk * chunk
        return torch.where((place >= first - reach) & (place < first + chunk + reach), place, -1)[None]
    found = beside(chunked(place[:, None], chunk, -1), -1, reach)  # (M, S, 1)
    return found.transpose(-1, -2).expand(-1, chunk, -1)


def real_columns(seen: Tensor, mask: Tensor | None) -> Tensor:
    """(M, c, S) of ``columns``, (B, N) bool or None → (1 or B, 1, M, c, S): whether a column is a real token."""
    if mask is None:
        return (seen >= 0)[None, None]
    return (mask[:, seen.clamp(min=0)] & (seen >= 0)).unsqueeze(1)


def near_scores(q: Tensor, k: Tensor, allowed: Tensor, reach: int) -> Tensor:
    """q kᵀ/√d of each token and its S columns, (…, N, S); a large negative number where not ``allowed`` (…, M, c, S)."""
    chunk = allowed.shape[-2]
    scores = chunked(q * q.shape[-1] ** -0.5, chunk) @ beside(chunked(k, chunk), reach=reach).transpose(-1, -2)
    # Not masked_fill, whose backward copies all scores once more: for lookup's shapes 10 ms instead of 2 on a CPU core.
    scores = scores + as_bias(allowed, scores.dtype)
    return scores.flatten(-3, -2)[..., : q.shape[-2], :]


def near_values(weights: Tensor, v: Tensor, chunk: int, reach: int) -> Tensor:
    """Sum of the columns' values, from v (…, N, d), weighted by (…, N, S): (…, N, d)."""
    found = chunked(weights, chunk) @ beside(chunked(v, chunk), reach=reach)
    return found.flatten(-3, -2)[..., : v.shape[-2], :]


def near_maps(weights: Tensor, seen: Tensor) -> Tensor:
    """Weights (…, N, S) of the columns ``seen`` (M, c, S) → weights of all tokens, (…, N, N)."""
    length = weights.shape[-2]
    places = seen.flatten(0, 1)[:length]
    return spread(weights.masked_fill(places < 0, 0.0), places.clamp(min=0), length)


def spread(weights: Tensor, places: Tensor, length: int) -> Tensor:
    """Weights (…, S) of the tokens at positions ``places``, of this shape or expanded to it → weights of all tokens, (…, N)."""
    return weights.new_zeros(*weights.shape[:-1], length).scatter_add(-1, places.expand_as(weights), weights)


def near_flops(length: int, chunk: int, reach: int, width: int) -> int:
    """Operations of ``near_scores`` and ``near_values``; ``width``: channels of all heads together."""
    if undivided(length, chunk, reach):
        return 4 * length * length * width
    return 4 * -(-length // chunk) * chunk * (chunk + 2 * reach) * width


def check_even(name: str, width: int) -> None:
    """Raises ValueError for an odd width in attention_options."""
    if width % 2:
        raise SettingError(f"attention_options.{name}", width, "an even number")
