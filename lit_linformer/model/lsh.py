"""The Reformer's attention. Shapes as in attention.py and chunks.py; R rounds, b = p² buckets; S = 2 c columns."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import ATTENTIONS, Attention, as_bias, split_heads
from .chunks import Permuted, beside, check_even, chunked, near_flops, near_scores, near_values, undivided
from .parts import exporting, without_autocast
from .ranges import Range

if TYPE_CHECKING:
    from .encoder import EncoderConfig

ITSELF = -1e4  # added to a token's score for itself, so that it attends to itself only if there is no other


@ATTENTIONS.add("lsh")
class LshAttention(Attention):
    """softmax(q_i k_tᵀ/√d) v_t over the tokens t whose hash is that of i, as in the Reformer (Kitaev et al., 2020).

    Keys are normalised queries: k = √d q/‖q‖. In each round a token's hash is its bucket h(q) = argmax [q R ; -q R], with a
    random R. Tokens are sorted by bucket, then by position, and P_r(i) holds those of i's bucket in its chunk of c and in half
    a chunk on each side (in the paper, which is causal, in the chunk before). The softmax is over the union of all rounds'
    P_r(i): if N_it rounds hold t, each counts exp(q_i k_t/√d - log N_it) (equation 7). A token attends to itself only if it
    has no other to attend to.

    As the authors do for long rows, a bucket is a pair of hashes with p values each, b = p² about 2 n/c, so that hashing does
    not cost N²: O(N (c + √n)). R is drawn once and kept in the state dict (theirs is drawn anew at each step), so that the same
    weights always give the same output.

    Args:
        hidden_size, …: as Attention's.
        rounds: R; each has 2 c columns.
        chunk: c, even.
    """

    title, rotary = "Reformer", True
    rotations: Tensor

    def __init__(
        self,
        *shape: Any,
        rounds: Annotated[int, Range(least=1, most=64)] = 2,
        chunk: Annotated[int, Range(least=2, most=2**12)] = 32,
        **more: Any,
    ):
        super().__init__(*shape, **more)
        check_even("chunk", chunk)
        del self.key
        self.rounds, self.chunk = rounds, chunk
        self.each = 2 * math.ceil(math.sqrt(2 * math.ceil(self.max_length / chunk)) / 2)  # p
        width = self.hidden_size // self.num_heads
        self.register_buffer("rotations", torch.randn(self.num_heads, width, rounds, 2, self.each // 2))

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        check_even("chunk", (config.attention_options or {}).get("chunk", 2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.check_length(x)
        q, v = (split_heads(linear(x), self.num_heads) for linear in (self.queries, self.value))
        return q, _normalised(q), v

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) and (B, N) bool or None → (B, N, D), and the maps (B, H, N, N) if asked for."""
        q, k, v = self.heads(x)
        hashes = self._hashes(q.detach(), attention_mask)
        if need_weights or exporting():
            context, maps = self.attend(q, k, v, self._all_pairs(hashes, q.dtype), need_weights)
            return self.output(context, x, attention_mask), maps
        reach, length, places = self.chunk // 2, x.shape[1], hashes[..., 1]
        order = places.argsort(-1)  # (B, H, R, N)
        q, v, all_rounds = (
            Permuted.apply(part.unsqueeze(2).expand(-1, -1, self.rounds, -1, -1), order, places)
            for part in (q, v, hashes.transpose(2, 3).flatten(3))
        )
        allowed, bias = self._columns(all_rounds, q.dtype)
        scores = near_scores(q, _normalised(q), allowed, reach)
        scores = scores + bias.flatten(-3, -2)[..., :length, :]
        weights = scores.softmax(-1)
        highest, at = scores.max(-1, keepdim=True)
        total = highest - weights.gather(-1, at).log()  # logsumexp of the scores, which would be slow: so many are far below
        weights = functional.dropout(weights.to(v.dtype), self.dropout, self.training)
        found = near_values(weights, v, allowed.shape[-2], reach)
        found, total = (Permuted.apply(part, places, order) for part in (found, total))
        share = total.softmax(2)  # each round's share of the softmax over all
        return self.output((share.to(found.dtype) * found).sum(2), x, attention_mask), None

    def _hashes(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Each token's bucket and sorted position in each round, (B, H, R, N, 2) int64; padding comes last."""
        with without_autocast(q.device):
            turned = torch.einsum("bhnd,hdrfp->bhrnfp", q.to(self.rotations.dtype), self.rotations)
        first, second = torch.cat([turned, -turned], -1).argmax(-1).unbind(-1)
        bucket = first * self.each + second
        if mask is not None:
            bucket = bucket.masked_fill(~mask[:, None, None], self.each**2)
        length = q.shape[2]
        by_place = (bucket * length + torch.arange(length, device=q.device)).argsort(-1)
        return torch.stack([bucket, by_place.argsort(-1)], -1)

    def _together(self, own: Tensor, other: Tensor) -> Tensor:
        """Whether a token's P_r contains another one; tokens are (…, 2) of ``_hashes``."""
        first, reach = own[..., 1] // self.chunk * self.chunk, self.chunk // 2
        near = (other[..., 1] >= first - reach) & (other[..., 1] < first + self.chunk + reach)
        return near & (own[..., 0] == other[..., 0]) & (own[..., 0] < self.each**2)

    def _columns(self, hashes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All hashes (B, H, R, N, 2 R), sorted → (B, H, R, M, c, S): what is in P_r, and the bias, -log N_it, with ITSELF."""
        reach = self.chunk // 2
        length = hashes.shape[3]
        size = length if undivided(length, self.chunk, reach) else self.chunk
        own = chunked(hashes, size, self.each**2)
        other = beside(own, self.each**2, reach)
        own, other = (part.unflatten(-1, (self.rounds, 2)) for part in (own, other))
        together = self._together(own.unsqueeze(-3), other.unsqueeze(-4))  # (B, H, R, M, c, S, R)
        column = torch.arange(other.shape[-3], device=hashes.device)
        itself = column == (other.shape[-3] - size) // 2 + column[:size, None]
        bias = ITSELF * itself - together.sum(-1).clamp(min=1).to(dtype).log()
        return together.diagonal(dim1=2, dim2=-1).movedim(-1, 2), bias

    def _all_pairs(self, hashes: Tensor, dtype: torch.dtype) -> Tensor:
        """The same as a bias for all pairs of tokens, (B, H, N, N): for the maps and for export, with N² operations."""
        union = self._together(hashes.unsqueeze(-2), hashes.unsqueeze(-3)).any(2)
        return as_bias(union, dtype) + ITSELF * torch.eye(hashes.shape[3], dtype=dtype, device=hashes.device)

    def flops(self, length: int, shared: nn.Module | None = None) -> int:
        near = self.rounds * near_flops(length, self.chunk, self.chunk // 2, self.hidden_size)
        return self.linear_flops(length, 0) + 2 * length * self.hidden_size**2 + self._hash_flops(length) + near

    def fixed_flops(self, length: int, shared: nn.Module | None = None) -> int:
        return 2 * self._hash_flops(length)  # no gradient passes through a hash at all

    def _hash_flops(self, length: int) -> int:
        return 2 * length * self.hidden_size * self.rounds * self.each


def _normalised(q: Tensor) -> Tensor:
    """√d q/‖q‖, (…, N, d)."""
    return functional.normalize(q, dim=-1) * math.sqrt(q.shape[-1])
