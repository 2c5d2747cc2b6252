"""Slots, plus the windows that matter most. Shapes as in attention.py; c = n/k tokens per window, b of k windows."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention import ATTENTIONS, as_bias
from .chunks import in_order
from .errors import SettingError
from .parts import exporting
from .projection import Projection, real_tokens
from .projections import Mean, check_windows, window_counts, windows
from .ranges import Count
from .slots_and_tokens import Seen, SlotsAndTokens

if TYPE_CHECKING:
    from .encoder import EncoderConfig

BEST = 2  # windows by default


@ATTENTIONS.add("coarse")
class CoarseAttention(SlotsAndTokens):
    """The Linformer's attention and, in the same softmax, the tokens of the b windows that best match the query's own window.

        softmax([q K̄ᵀ ; q K_Wᵀ] / √d) [V̄ ; V_W],   W = the b windows with the largest q̄ · k̄

    q̄ and k̄ are the means of queries and keys over windows of n/k tokens. Coarse to fine as in MRA-2 (Zeng et al., 2022) and
    NSA (Yuan et al., 2025): distant text is seen as slots, from any projection, and what matters most token by token. The
    choice of windows has no gradient. The cost is b n/k columns for each token in addition to K, and K² pairs of windows.

    Args:
        hidden_size, …: as LinformerAttention's; projection_dim must divide n.
        best: b, at most k.
    """

    title = "Linformer, coarse to fine"

    def __init__(self, *shape: Any, best: Count = BEST, **more: Any):
        super().__init__(*shape, **more)
        check_best(best, self.projection_dim)
        self.best, channels = best, self.hidden_size // self.num_heads
        self.means = Mean(max_length=self.max_length, projection_dim=self.projection_dim, channels=channels)

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        super().check(config)
        for dim in config.projection_dims:
            check_windows("attention", config.attention, config.max_length, dim)
            check_best((config.attention_options or {}).get("best", BEST), dim)

    def see(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, need_weights: bool) -> Seen:
        length = q.shape[2]
        chosen, real = self._chosen(q, k, attention_mask)
        if need_weights or exporting():
            return self._to_all(q, k, chosen, attention_mask), lambda weights: weights @ v, lambda weights: weights
        found_k, found_v = (_gathered(self._windows(part, 0.0), chosen) for part in (k, v))  # (B, H, K, b c, d)
        there = _gathered(real[:, None, :, :, None], chosen).transpose(-1, -2)  # (B, H, K, 1, b c)
        scores = self._windows(q, 0.0) @ found_k.transpose(-1, -2) * q.shape[-1] ** -0.5 + as_bias(there, q.dtype)

        def read(weights: Tensor) -> Tensor:
            return (self._windows(weights, 0.0) @ found_v).flatten(2, 3)[:, :, :length]

        return scores.flatten(2, 3)[:, :, :length], read, lambda weights: weights

    def _windows(self, x: Tensor, fill: float) -> Tensor:
        """(..., N, C) → (..., K, c, C)."""
        return windows(self.means, x, fill, more=self.projection_dim)

    @torch.no_grad()
    def _chosen(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The b best windows for each window, (B, H, K, b) int64; and which tokens of the windows are real, (1 or B, K, c)."""
        q = q if mask is None else q.masked_fill(~mask[:, None, :, None], 0.0)
        mean_q, mean_k = self.means(q, mask), self.means(k, mask)
        there = window_counts(self.means, q, mask) > 0  # (1 or B, K)
        scores = mean_q @ mean_k.transpose(-1, -2) + as_bias(there[:, None, None], q.dtype)
        return scores.topk(self.best, -1).indices, self._windows(real_tokens(q, mask)[..., None], False)[..., 0]

    def _to_all(self, q: Tensor, k: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
        """The same scores for all pairs of tokens, (B, H, N, N): for the maps and for export, with N² operations."""
        best = torch.zeros(*chosen.shape[:-1], self.projection_dim, dtype=torch.bool, device=q.device).scatter(-1, chosen, True)
        window = torch.arange(q.shape[2], device=q.device) // (self.max_length // self.projection_dim)
        allowed = best[:, :, window][..., window]
        allowed = allowed if mask is None else allowed & mask[:, None, None]
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + as_bias(allowed, q.dtype)

    def token_flops(self, length: int) -> int:
        exactly = 4 * self.max_length * self.best * (self.max_length // self.projection_dim)  # rows are padded to n
        return (exactly + 2 * self.projection_dim**2) * self.hidden_size

    def fixed_flops(self, length: int, shared: Projection | None = None) -> int:
        coarse = 2 * self.projection_dim**2 * self.hidden_size  # no gradient passes through the choice at all
        return super().fixed_flops(length, shared) + 2 * coarse


def _gathered(x: Tensor, chosen: Tensor) -> Tensor:
    """The ``chosen`` windows (B, H, K, b) of x (1 or B, 1 or H, K, c, C): (B, H, K, b c, C)."""
    batch, heads, count, best = chosen.shape
    flat = x.expand(batch, heads, -1, -1, -1).flatten(3)
    return in_order(flat, chosen.flatten(2)).unflatten(2, (count, best)).unflatten(-1, x.shape[-2:]).flatten(3, 4)


def check_best(best: int, projection_dim: int) -> None:
    """Raises ValueError for more windows than there are."""
    if best > projection_dim:
        raise SettingError("attention_options.best", best, f"up to projection_dim = {projection_dim}, the windows")
