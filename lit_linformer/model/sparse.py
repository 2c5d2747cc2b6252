"""The Sparse Transformer's attention: nearby tokens, and every l-th one. Shapes as in attention.py and chunks.py."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import ATTENTIONS, Attention, as_bias, check_halves, softmax
from .chunks import chunked, columns, near_flops, near_scores, near_values, real_columns
from .parts import exporting
from .projection import real_tokens
from .ranges import Count

if TYPE_CHECKING:
    from .encoder import EncoderConfig


@ATTENTIONS.add("sparse")
class SparseAttention(Attention):
    """softmax(q_i k_tᵀ/√d) v_t over t in S_h(i), the strided pattern of the Sparse Transformer (Child et al., 2019, 4.2):

        S_h(i) = {t : |i - t| ≤ r}      in the first half of the heads, and
        S_h(i) = {t : t ≡ i (mod l)}    in the second, so that two layers reach every token.

    The paper's patterns are causal, with r = l near √n; a layer with heads of both kinds is one of its three variants (5.2).
    The cost is O(N (r + N/l)), or N √N with both near √n: a baseline that is not quite linear.

    Args:
        hidden_size, …: as Attention's; num_heads even.
        stride: l; None: the whole number nearest to √n.
        reach: r, tokens to each side; None: l.
    """

    title, rotary = "Sparse Transformer", True

    def __init__(self, *shape: Any, stride: Count | None = None, reach: Count | None = None, **more: Any):
        super().__init__(*shape, **more)
        check_halves("sparse", self.num_heads)
        self.stride, self.reach = _pattern(self.max_length, stride, reach)

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        check_halves(config.attention, config.num_heads)

    @classmethod
    def lengthened(cls, config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
        options = config.attention_options or {}
        stride, reach = _pattern(config.max_length, options.get("stride"), options.get("reach"))
        return {"attention_options": options | {"stride": stride, "reach": reach}}

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) and (B, N) bool or None → (B, N, D), and the maps (B, H, N, N) if asked for."""
        q, k, v = self.heads(x)
        if need_weights or exporting():
            context, maps = self.attend(q, k, v, self._all_pairs(q, attention_mask), need_weights)
            return self.output(context, x, attention_mask), maps
        (near_q, far_q), (near_k, far_k), (near_v, far_v) = (part.chunk(2, dim=1) for part in (q, k, v))
        context = torch.cat(
            [self._near(near_q, near_k, near_v, attention_mask), self._strided(far_q, far_k, far_v, attention_mask)], 1
        )
        return self.output(context, x, attention_mask), None

    def _near(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The first half of the heads, q, k, v (B, H/2, N, d): chunks of r, with both chunks beside them."""
        seen = columns(q.shape[2], self.reach, self.reach, q.device)  # (M, c, S), c = r, S = 3 r
        count, chunk = seen.shape[:2]
        place = torch.arange(count * chunk, device=q.device).view(count, chunk, 1)
        allowed = real_columns(seen, mask) & ((seen - place).abs() <= self.reach)
        weights = softmax(near_scores(q, k, allowed, self.reach))
        return near_values(functional.dropout(weights, self.dropout, self.training), v, chunk, self.reach)

    def _strided(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The second half of the heads, q, k, v (B, H/2, N, d): tokens grouped by position modulo l, (B, H/2, l, ⌈N/l⌉, d)."""
        heads, length = q.shape[1:3]
        bias = None
        if mask is not None or length % self.stride:
            real = chunked(real_tokens(q, mask)[:, None, :, None], self.stride).transpose(-3, -2).mT  # (1 or B, 1, l, 1, ⌈N/l⌉)
            bias = as_bias(real, q.dtype).expand(-1, heads, -1, -1, -1).flatten(1, 2)
        # Groups become heads, since torch's fused kernels take four dimensions.
        q, k, v = (chunked(part, self.stride).transpose(-3, -2).flatten(1, 2) for part in (q, k, v))
        context, _ = self.attend(q, k, v, bias)
        return context.unflatten(1, (heads, -1)).transpose(-3, -2).flatten(2, 3)[:, :, :length]

    def _all_pairs(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """The same as a bias for all pairs of tokens, (1 or B, H, N, N): for the maps and for export, with N² operations."""
        place = torch.arange(q.shape[2], device=q.device)
        apart = place - place[:, None]
        halves = apart.abs() <= self.reach, apart % self.stride == 0
        allowed = torch.cat([half.expand(self.num_heads // 2, -1, -1) for half in halves])
        return as_bias(allowed if mask is None else allowed & mask[:, None, None], q.dtype)

    def flops(self, length: int, shared: nn.Module | None = None) -> int:
        each = -(-length // self.stride)
        of_heads = near_flops(length, self.reach, self.reach, 1) + 4 * self.stride * each**2
        return self.linear_flops(length, length) + of_heads * self.hidden_size // 2


def _pattern(max_length: int, stride: int | None, reach: int | None) -> tuple[int, int]:
    """l and r, from n and the settings."""
    stride = min(max_length, stride or round(math.sqrt(max_length)))
    return stride, min(max_length, reach or stride)
