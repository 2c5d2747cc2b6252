"""Slots, and beside them the tokens round about. Shapes as in attention.py and chunks.py; w window, here S = 2 w."""

from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import ATTENTIONS, log_mass, merge_heads, split_heads, zero_pads
from .chunks import check_even, columns, near_flops, near_maps, near_scores, near_values, real_columns
from .linformer import LinformerAttention, with_tokens
from .projection import Projection
from .ranges import Range

if TYPE_CHECKING:
    from .encoder import EncoderConfig

Window = Annotated[int, Range(least=2, most=2**16)]


@ATTENTIONS.add("window")
class WindowAttention(LinformerAttention):
    """The Linformer's attention with the Long-Short Transformer's window (Zhu et al., 2021, section 3) in the same softmax.

        softmax([q K̄ᵀ ; q K_wᵀ] / √d) [V̄ ; V_w]

    K̄ and V̄ are the slots, of any projection, K_w and V_w the 2 w tokens of the query's own window of w and of w/2 on each side.
    With ``dual_norm`` (DualLN) keys and values of tokens pass through one LayerNorm, those of slots through another: averaged
    over many tokens these start far smaller. With projection=dynamic, sharing=heads, order=project_first, dual_norm=True it is
    the paper's model. Linear in N: 2 w columns beside K.

    Args:
        hidden_size, …: as LinformerAttention's.
        window: w, even.
        dual_norm: whether there are the two LayerNorms.
    """

    title = "Linformer with window"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        projection_dim: int,
        *settings: Any,
        window: Window = 32,
        dual_norm: bool = False,
        **more: Any,
    ):
        super().__init__(hidden_size, num_heads, max_length, projection_dim, *settings, **more)
        check_even("window", window)
        self.window = window
        self.token_norm, self.slot_norm = (nn.LayerNorm(hidden_size) if dual_norm else None for _ in range(2))

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        super().check(config)
        check_even("window", (config.attention_options or {}).get("window", 2))

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        return config.projection_dims[layer] + length

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: Projection | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As LinformerAttention's. Maps are of slots, then of tokens: (B, H, N, K + N)."""
        self.check_length(x)
        q = split_heads(self.query(x), self.num_heads)
        slots, (k, v) = self._keys_and_values(x, attention_mask, shared)
        to_slots = q @ slots[0].transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.mass_bias and (mass := self.projections(shared)[0].mass(x, attention_mask)) is not None:
            to_slots = to_slots + log_mass(mass, q.dtype)
        seen = columns(x.shape[1], self.window, self.window // 2, x.device)
        to_tokens = near_scores(q, k, real_columns(seen, attention_mask), self.window, self.window // 2)
        weights = torch.cat([to_slots, to_tokens], -1).softmax(-1)
        of_slots, of_tokens = functional.dropout(weights, self.dropout, self.training).split(
            [to_slots.shape[-1], to_tokens.shape[-1]], -1
        )
        context = of_slots @ slots[1] + near_values(of_tokens, v, self.window, self.window // 2)
        maps = None
        if need_weights:
            K = to_slots.shape[-1]
            maps = torch.cat([weights[..., :K], near_maps(weights[..., K:], seen)], -1)
        return self.output(context, x, attention_mask), maps

    def _keys_and_values(
        self, x: Tensor, attention_mask: Tensor | None, shared: Projection | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of the slots, (B, H, K, d) each, and of all tokens, (B, H, N, d) each."""
        tokens = (_normed(linear(x), self.token_norm) for linear in (self.key, self.value))
        k, v = (split_heads(zero_pads(part, attention_mask), self.num_heads) for part in tokens)
        if self.compress_first:
            slots = super().compress(x, attention_mask, shared)
        else:
            slots = self.project(k, v, x, attention_mask, shared)
        if self.slot_norm is not None:
            of_k, of_v = (split_heads(self.slot_norm(merge_heads(part)), self.num_heads) for part in slots)
            slots = of_k, of_v
        return slots, (k, v)

    def compress(
        self, x: Tensor, attention_mask: Tensor | None = None, shared: Projection | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots, and all tokens' after them, (B, H, K + N, d) each."""
        k, v = (torch.cat(pair, 2) for pair in zip(*self._keys_and_values(x, attention_mask, shared), strict=True))
        return k, v

    def matrix(self, x: Tensor, shared: Projection | None = None) -> Tensor | None:
        """E, of keys, and a row for each token."""
        return with_tokens(super().matrix(x, shared), x)

    def flops(self, length: int, shared: Projection | None = None) -> int | None:
        counted = LinformerAttention.flops(self, length, shared)
        all_tokens = 4 * length * self.hidden_size**2 if self.compress_first else 0  # W_K and W_V, beside those of the slots
        near = near_flops(length, self.window, self.window // 2, self.hidden_size)
        return None if counted is None else counted + all_tokens + near

    def fixed_flops(self, length: int, shared: Projection | None = None) -> int:
        return LinformerAttention.fixed_flops(self, length, shared)


def _normed(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    return x if norm is None else norm(x)
