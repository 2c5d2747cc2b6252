"""The Nyströmformer's attention. Shapes as in attention.py; here the K slots are landmarks."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import ATTENTIONS, Attention, as_bias
from .parts import at_least_float32, without_autocast
from .projection import check_dims, longer_dims
from .projections import Mean, check_windows, window_counts
from .ranges import Count

if TYPE_CHECKING:
    from .encoder import EncoderConfig


@ATTENTIONS.add("nystrom")
class NystromAttention(Attention):
    """softmax(q K̃ᵀ/√d) A⁺ softmax(Q̃ kᵀ/√d) v with A = softmax(Q̃ K̃ᵀ/√d): the Nyström method (Xiong et al., 2021).

    Q̃ and K̃, the landmarks, are the means of queries and keys over K windows of n/K tokens. A⁺ is the pseudo-inverse, by the
    paper's iteration (equation 12):

        Z ← ¼ Z (13 I - A Z (15 I - A Z (7 I - A Z))),   from Z = Aᵀ / (‖A‖₁ ‖A‖∞)

    Each matrix has its own norms (the paper's code takes the largest in the batch), so that rows do not affect each other. A
    window without a real token is not a landmark: it has the identity's row and column in A, which the iteration keeps apart
    from the rest, and no token sees it. The local convolution serves as the paper's skip connection. O(N K + K³) in time.

    Args:
        hidden_size, …: as Attention's.
        projection_dim: K, the landmarks; divides n.
        iterations: steps towards A⁺.
    """

    title, rotary, settings = "Nyströmformer", True, ("projection_dim",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        projection_dim: int,
        *settings: Any,
        iterations: Count = 6,
        **more: Any,
    ):
        super().__init__(hidden_size, num_heads, max_length, *settings, **more)
        self.projection_dim, self.iterations = projection_dim, iterations
        self.landmarks = Mean(max_length=max_length, projection_dim=projection_dim, channels=hidden_size // num_heads)

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        check_dims(config)
        for dim in config.projection_dims:
            check_windows("attention", config.attention, config.max_length, dim)

    @classmethod
    def arguments(cls, config: "EncoderConfig", layer: int) -> dict[str, Any]:
        return super().arguments(config, layer) | {"projection_dim": config.projection_dims[layer]}

    @classmethod
    def lengthened(cls, config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
        return longer_dims(config, max_length, how)

    @classmethod
    def details(cls, config: "EncoderConfig") -> list[str]:
        return [f"k = {config.projection_dim}"]

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) and (B, N) bool or None → (B, N, D), and, if asked for, the product of the three matrices (B, H, N, N)."""
        q, k, v = self.heads(x)
        if attention_mask is not None:
            q, k, v = (part.masked_fill(~attention_mask[:, None, :, None], 0.0) for part in (q, k, v))
        mean_q, mean_k = self.landmarks(q, attention_mask), self.landmarks(k, attention_mask)
        there = window_counts(self.landmarks, q, attention_mask)[:, None] > 0  # (1 or B, 1, K)
        real = None if attention_mask is None else as_bias(attention_mask[:, None, None], q.dtype)
        of_landmarks, reading = self.attend(mean_q, k, v, real, need_weights)
        with without_autocast(x.device):
            inverse = self._inverse(mean_q, mean_k, there)
        # No bias if all landmarks are there: the fastest kernels take none.
        full = attention_mask is None and x.shape[1] == self.max_length
        among = None if full else as_bias(there[:, :, None], q.dtype)
        context, writing = self.attend(q, mean_k, inverse.to(of_landmarks.dtype) @ of_landmarks, among, need_weights)
        maps = None if writing is None or reading is None else writing @ inverse.to(writing.dtype) @ reading
        return self.output(context, x, attention_mask), maps

    def _inverse(self, q: Tensor, k: Tensor, there: Tensor) -> Tensor:
        """A⁺ for landmarks q and k (B, H, K, d), where ``there`` (1 or B, 1, K): (B, H, K, K), at least float32."""
        q, k = at_least_float32(q), at_least_float32(k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + as_bias(there[:, :, None], q.dtype)
        one = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
        A = torch.where(there[..., None], scores.softmax(-1), one)
        norms = A.sum(-2).amax(-1) * A.sum(-1).amax(-1)
        Z = A.transpose(-1, -2) / norms[..., None, None]
        for _ in range(self.iterations):
            AZ = A @ Z
            Z = Z @ (13 * one - AZ @ (15 * one - AZ @ (7 * one - AZ))) / 4
        return Z

    def flops(self, length: int, shared: nn.Module | None = None) -> int:
        K, D = self.projection_dim, self.hidden_size
        inverse = 8 * self.iterations * K**3 * self.num_heads
        return self.linear_flops(length, length) + 8 * K * length * D + 4 * K * K * D + inverse
