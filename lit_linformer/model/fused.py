"""Slots and nearby tokens in fused kernels: torch's FlexAttention, which torch.compile makes for a GPU. Shapes as in chunks.py.

Written out, the scores of every token's K + S columns are stored, read and stored again: on a GPU most of such a layer's time.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .parts import exporting

BLOCK = 128  # rows and columns of a block of scores, which is computed whole or not at all


def fuses(x: Tensor, dropout: float, need_weights: bool) -> bool:
    """Whether ``attend`` is to be used: in what is compiled for a GPU, where neither weights nor dropout are asked for."""
    return x.is_cuda and torch.compiler.is_compiling() and not exporting() and not dropout and not need_weights


def attend(
    q: Tensor,
    slots: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
    bias: Tensor | None,
    strength: Tensor | None,
    near: BlockMask,
) -> Tensor:
    """softmax([q K̄ᵀ/√d + bias ; q Kᵀ/√d + strength]) [V̄ ; V], of the tokens those that ``near`` allows: (B, H, N, d).

    Two softmaxes, each of its own columns, weighted by the sums that they were divided by.

    Args:
        q, tokens: (B, H, N, d); slots: (B, H, K, d).
        bias: of slots, (1 or B, 1 or H, 1, K) or None; has no gradient.
        strength: (H,) or None.
    """
    of_slots, slot_sum = flex_attention(q, *slots, score_mod=_added(q, slots[0], bias), return_lse=True)
    of_tokens, token_sum = flex_attention(q, *tokens, block_mask=near, return_lse=True)
    more = token_sum - slot_sum if strength is None else token_sum + strength[:, None] - slot_sum
    share = more.sigmoid()[..., None]  # of tokens; 0 where there are none
    return (of_slots + share * (of_tokens - of_slots)).to(q.dtype)


def _added(q: Tensor, slot_k: Tensor, bias: Tensor | None) -> Callable | None:
    if bias is None:
        return None
    whole = bias[:, :, 0].expand(q.shape[0], q.shape[1], slot_k.shape[2])

    def added(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return score + whole[row, head, slot]

    return added


def band(length: int, chunk: int, reach: int, allowed: Callable, device: torch.device) -> BlockMask:
    """Of tokens in their chunk of c and r to each side of it those that ``allowed(row, head, query, key)`` says: O(N)."""
    first = torch.arange(0, length, BLOCK, device=device)  # of each block
    last = (first + BLOCK - 1).clamp(max=length - 1)
    low, high = first // chunk * chunk - reach, (last // chunk + 1) * chunk + reach
    seen = (last >= low[:, None]) & (first < high[:, None])  # (blocks of queries, blocks of keys)
    order = seen.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    counts = seen.sum(-1, dtype=torch.int32)

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = query // chunk * chunk
        return (key >= start - reach) & (key < start + chunk + reach) & allowed(row, head, query, key)

    return BlockMask.from_kv_blocks(
        counts[None, None], order[None, None], BLOCK_SIZE=BLOCK, mask_mod=near, seq_lengths=(length, length)
    )
