"""Slots and some of the tokens in one softmax: the base of window, coarse and lookup. Shapes as in attention.py; S columns."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .attention import as_bias, softmax, split_heads, zero_pads
from .chunks import spread
from .linformer import LinformerAttention
from .projection import Projection

if TYPE_CHECKING:
    from .encoder import EncoderConfig

Pair = tuple[Tensor, Tensor]
# Scores of each token's columns, (B, H, N, S); functions from their weights to the output, (B, H, N, d), and to maps.
Seen = tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Chosen(NamedTuple):
    """R tokens of each row that all its tokens see, as they see slots."""

    places: Tensor  # (B, R): their positions
    there: Tensor  # (B, R) bool: a row may have fewer

    def beside(self, slots: Pair, tokens: Pair, bias: Tensor | None) -> tuple[Pair, Tensor]:
        """Appends the chosen tokens to the slots.

        Keys and values of slots (B, H, K, d), of tokens (B, H, N, d), and the slots' bias → keys and values of slots and
        chosen tokens, (B, H, K + R, d), and their bias, (B, 1 or H, 1, K + R).
        """
        k, v = (torch.cat([slot, self._of(part)], 2) for slot, part in zip(slots, tokens, strict=True))
        missing = as_bias(self.there, k.dtype)[:, None, None]
        before = k.new_zeros(1, 1, 1, slots[0].shape[2]) if bias is None else bias
        heads = before.shape[1]
        return (k, v), torch.cat([before.expand(k.shape[0], -1, -1, -1), missing.expand(-1, heads, -1, -1)], -1)

    def _of(self, tokens: Tensor) -> Tensor:
        return tokens.gather(2, self.places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3]))

    def merged(self, maps: Tensor) -> Tensor:
        """Maps of slots, chosen tokens and all tokens, (B, H, N, K + R + N) → of slots and all tokens, (B, H, N, K + N)."""
        chosen, length = self.places.shape[-1], maps.shape[-2]
        of_slots, of_chosen, of_tokens = maps.split([maps.shape[-1] - chosen - length, chosen, length], -1)
        return torch.cat([of_slots, of_tokens + spread(of_chosen, self.places[:, None, None], length)], -1)


class SlotsAndTokens(LinformerAttention):
    """softmax([q K̄ᵀ ; q K_tᵀ] / √d) [V̄ ; V_t]: K̄ and V̄ are the slots, of any projection, K_t and V_t tokens.

    A subclass defines which tokens in ``see``, and their cost in ``token_flops``.
    """

    rotary = True
    sees_tokens = True  # whether this layer sees more than slots

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        return config.projection_dims[layer] + length

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: Projection | None = None,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As LinformerAttention's; chosen: tokens that all others see, too. Maps: slots, then tokens, (B, H, N, K + N)."""
        if not self.sees_tokens:
            return super().forward(x, attention_mask, need_weights, shared)
        self.check_length(x)
        q = split_heads(self.queries(x), self.num_heads)
        slots, (k, v) = self.keys_and_values(x, attention_mask, shared)
        bias = self.slot_bias(x, attention_mask, shared, q.dtype)
        if chosen is not None:
            slots, bias = chosen.beside(slots, (k, v), bias)
        to_slots = self.slot_scores(q, slots[0], bias)
        to_tokens, read, to_maps = self.see(q, k, v, attention_mask, need_weights)
        weights = softmax(torch.cat([to_slots, to_tokens], -1))
        sizes = [to_slots.shape[-1], to_tokens.shape[-1]]
        of_slots, of_tokens = functional.dropout(weights, self.dropout, self.training).split(sizes, -1)
        output = self.output(of_slots @ slots[1] + read(of_tokens), x, attention_mask)
        if not need_weights:
            return output, None
        of_slots, of_tokens = weights.split(sizes, -1)
        maps = torch.cat([of_slots, to_maps(of_tokens)], -1)
        return output, maps if chosen is None else chosen.merged(maps)

    def see(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, need_weights: bool) -> Seen:
        """What each token sees besides the slots (``Seen``); q, k, v of all tokens, (B, H, N, d), k and v zero at padding."""
        raise NotImplementedError

    def keys_and_values(self, x: Tensor, attention_mask: Tensor | None, shared: Projection | None) -> tuple[Pair, Pair]:
        """Keys and values of the slots, (B, H, K, d) each, and of all tokens, (B, H, N, d) each."""
        k, v = (split_heads(zero_pads(part, attention_mask), self.num_heads) for part in self.of_tokens(x))
        if self.compress_first:
            return super().compress(x, attention_mask, shared), (k, v)
        return self.project(k, v, x, attention_mask, shared), (k, v)

    def of_tokens(self, x: Tensor) -> Pair:
        """Keys and values of all tokens, (B, N, D) each."""
        return self.keys(x), self.value(x)

    def slot_scores(self, q: Tensor, slot_k: Tensor, bias: Tensor | None) -> Tensor:
        """q kᵀ/√d + bias for the slots, (…, N, K)."""
        scores = q * q.shape[-1] ** -0.5 @ slot_k.transpose(-1, -2)
        return scores if bias is None else scores + bias

    def compress(self, x: Tensor, attention_mask: Tensor | None = None, shared: Projection | None = None) -> Pair:
        """Keys and values of the slots, followed by those of all tokens if tokens are seen, (B, H, K or K + N, d) each."""
        if not self.sees_tokens:
            return super().compress(x, attention_mask, shared)
        k, v = (torch.cat(pair, 2) for pair in zip(*self.keys_and_values(x, attention_mask, shared), strict=True))
        return k, v

    def matrix(self, x: Tensor, shared: Projection | None = None) -> Tensor | None:
        """The matrix E of the keys and, if tokens are seen, below it a row for each token."""
        E = super().matrix(x, shared)
        if E is None or not self.sees_tokens:
            return E
        tokens = torch.eye(x.shape[1], dtype=E.dtype, device=E.device)
        return torch.cat([E, tokens.expand(*E.shape[:-2], -1, -1)], -2)

    def flops(self, length: int, shared: Projection | None = None) -> int | None:
        counted = LinformerAttention.flops(self, length, shared)
        if counted is None or not self.sees_tokens:
            return counted
        all_tokens = 4 * length * self.hidden_size**2 if self.compress_first else 0  # W_K and W_V, besides those for the slots
        return counted + all_tokens + self.token_flops(length)

    fixed_flops = LinformerAttention.fixed_flops  # not inherited by a class that overrides forward

    def token_flops(self, length: int) -> int:
        """Operations on the tokens that are seen, in a row of N = ``length`` tokens, apart from the linear layers."""
        raise NotImplementedError
