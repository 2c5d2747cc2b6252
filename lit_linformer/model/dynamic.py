"""A projection computed from the input. Shapes as in projection.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import merge_heads
from .projection import PROJECTIONS, Projection, as_column


@PROJECTIONS.add("dynamic")
class Dynamic(Projection):
    """E = softmax_n(x W_P)ᵀ, the Long-Short Transformer's dynamic projection (Zhu et al., 2021, section 3.2).

    W_P is (D, K), or (D, H K) if each head has its own projection; the softmax is over the row's N real tokens, so that each
    slot is a mean of them, weighted by their content. x is the layer's input. O(N K D) with one E for all heads, H times that
    with one E for each head.

    Args:
        shape: as Projection's; init and noise have no effect.
    """

    settings = ()

    def __init__(self, **shape: Any):
        super().__init__(**shape)
        # No bias: the softmax over tokens would cancel it.
        self.scores = nn.Linear(self.hidden_size, (self.num_heads or 1) * self.projection_dim, bias=False)

    @classmethod
    def weighs_tokens(cls, options: dict[str, Any]) -> bool:
        return True

    def weights(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """E of each row of x, (B, N, D): (B, K, N) or (B, H, K, N)."""
        scores = self.scores(x)  # (B, N, H K)
        if mask is not None:
            scores = scores.masked_fill(~as_column(mask, x), torch.finfo(scores.dtype).min / 2)
        E = scores.softmax(-2).to(x.dtype).transpose(-1, -2)
        return E if self.num_heads is None else E.unflatten(1, (self.num_heads, -1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes E from the very x that is compressed; an encoder calls ``for_input`` instead."""
        return self.for_input(x if self.num_heads is None else merge_heads(x), mask)(x, mask)

    def for_input(self, x: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        E = self.weights(x, mask)
        return lambda z, mask: (E if E.dim() == z.dim() else E[:, None]) @ z

    def mass(self, x: Tensor, mask: Tensor | None) -> None:
        """None: every slot is a mean of real tokens."""

    def flops(self, length: int, width: int) -> int:
        return 2 * self.projection_dim * length * width

    def weights_flops(self, length: int) -> int:
        return 2 * self.projection_dim * length * (self.num_heads or 1) * self.hidden_size

    def matrix(self, x: Tensor) -> Tensor:
        return self.weights(x, None)[0]
