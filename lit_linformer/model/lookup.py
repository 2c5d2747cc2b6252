"""Slots, plus the tokens that have the same neighbour. Shapes as in attention.py; c chunk size, M = ⌈N/c⌉, G head groups."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .attention import ATTENTIONS, check_halves, merge_heads, softmax, split_heads
from .chunks import Permuted, beside, chunked, in_order, near_flops, near_scores, near_values, spread, undivided
from .errors import SettingError, UserError
from .parts import exporting
from .projection import Projection
from .ranges import Count, Range, check_ranges
from .slots_and_tokens import Chosen, SlotsAndTokens
from .window import WindowAttention

if TYPE_CHECKING:
    from .encoder import EncoderConfig

LONG = 8192  # tokens; longer rows are computed two heads at a time, to save memory
NONE = 2**31  # instead of the id of a neighbour that does not exist: larger than any id


class Neighbours(NamedTuple):
    """The tokens of each row sorted by the id of their left neighbour, and of their right one, and so on to the ``distance``-th
    on either side, so in G = 2 · distance orders; ties by position."""

    order: Tensor  # (B, G, N): which token is at each sorted position
    back: Tensor  # (B, G, N): the sorted position of each token
    same: Tensor  # (B, G, M, c, S): which tokens of its own chunk and of the two beside it a token may attend to


@ATTENTIONS.add("lookup")
class LookupAttention(WindowAttention):
    """The Linformer's attention, which in some layers also looks up where else in the row a token's neighbour occurs.

    In one softmax, for token i of head h, over the slots j and the tokens t of N_h(i),

        Σ exp(q_i·k̄_j / √d) v̄_j + Σ exp(q_i·k_t / √d + b_h) v_t,   divided by the sum of all these weights,

    where N_h(i) holds the tokens t ≠ i whose left neighbour is the same token as i's, or, in the second half of the heads,
    whose right neighbour is. To copy a masked word, a Transformer has to learn to find these tokens (docs/LOG.md); uniform
    attention to them is an n-gram head (Akyürek et al., 2024, arXiv 2401.12973). They are found as in Reformer (Kitaev et al.,
    2020), with the neighbour's id in place of a hash: tokens are sorted by it, and each attends within its chunk of c and the
    two beside it, so to at least the c nearest ones on each side. Linear in N: 3 c columns in addition to K. Which tokens have
    a neighbour in common is read from the ids; which of them matter is learnt.

    Args:
        hidden_size, …: as LinformerAttention's.
        looks_up: whether this layer looks up; ``from_config`` sets it in the last layer and each ``every``-th one before it.
        every: how many layers apart those that look up are.
        chunk: c.
        strength: initial value of b_h, which is learnt.
        distance: with 2 a quarter of the heads each looks up by the left neighbour, the right one, and the two tokens beyond
            them, and so on; num_heads a multiple of G = 2 · distance.
        window: w, even: the other layers are ``WindowAttention`` with this window; 0: they see slots alone.
        rare: R: in each layer that sees tokens, all tokens also see the R rarest ones of the row, as they see slots; of equal
            ids only the first. A high id counts as rare, since tokenizers number tokens from frequent to rare. A row with
            fewer different ids has all of them seen.
    """

    title, rotary = "Linformer with lookup", True

    def __init__(
        self,
        *shape: Any,
        looks_up: bool,
        every: Count = 2,
        chunk: Annotated[int, Range(least=1, most=2**12)] = 16,
        strength: Annotated[float, Range(least=-100, most=100)] = 2.0,
        distance: Annotated[int, Range(least=1, most=2**6)] = 1,
        window: Annotated[int, Range(least=0, most=2**16)] = 0,
        rare: Annotated[int, Range(least=0, most=2**16)] = 0,
        **more: Any,
    ):
        super().__init__(*shape, window=window, **more)
        _check_heads("lookup", self.num_heads, distance)
        self.looks_up, self.sees_tokens, self.chunk, self.rare = looks_up, looks_up or window > 0, chunk, rare
        self.distance, self.groups = distance, 2 * distance
        self.strength = nn.Parameter(torch.full((self.num_heads,), float(strength))) if looks_up else None

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        super().check(config)
        _check_heads(config.attention, config.num_heads, _option(cls, config, "distance"))

    @classmethod
    def arguments(cls, config: "EncoderConfig", layer: int) -> dict[str, Any]:
        every = _option(cls, config, "every")
        return super().arguments(config, layer) | {"looks_up": (config.num_layers - 1 - layer) % every == 0}

    def of_ids(self, config: "EncoderConfig", input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
        given: dict[str, Any] = {"neighbours": neighbours(input_ids, attention_mask, self.chunk, self.distance)}
        return given | ({"chosen": rarest(input_ids, attention_mask, self.rare)} if self.rare else {})

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        seen = cls.arguments(config, layer)["looks_up"] or _option(cls, config, "window")
        return config.projection_dims[layer] + (length if seen else 0)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: Projection | None = None,
        neighbours: Neighbours | None = None,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As LinformerAttention's; neighbours, chosen: from ``of_ids``. Maps: of slots, then of tokens, (B, H, N, K + N)."""
        if (self.looks_up and neighbours is None) or (self.rare and chosen is None):
            raise UserError(
                "attention is lookup, which needs the ids: pass neighbours=lookup.neighbours(input_ids, mask, chunk, distance) "
                "and, with an option rare, chosen=lookup.rarest(input_ids, mask, rare)"
            )
        if not self.looks_up or neighbours is None:
            return super().forward(x, attention_mask, need_weights, shared, chosen)
        self.check_length(x)
        q, (slots, (k, v)) = self.queries(x), self.keys_and_values(x, attention_mask, shared)
        bias = self.slot_bias(x, attention_mask, shared, q.dtype)
        if chosen is not None:
            slots, bias = chosen.beside(slots, (k, v), bias)
        slot_k, slot_v = (part.unflatten(1, (self.groups, -1)) for part in slots)  # (B, G, H/G, K + R, d)
        q, k, v = (self._sorted(part, neighbours) for part in (q, merge_heads(k), merge_heads(v)))
        bias = None if bias is None else bias.expand(-1, self.num_heads, -1, -1).unflatten(1, (self.groups, -1))
        strength = self.strength.to(q.dtype).view(1, self.groups, -1, 1, 1)
        parts, same = (q, k, v, slot_k, slot_v, strength, bias), neighbours.same[:, :, None]
        if need_weights or exporting() or x.shape[1] <= LONG:  # one exported program serves every length
            context, weights = self._attend(*parts, same)
        else:  # one head of each group at a time; their weights are recomputed in the backward pass, as in fused attention
            attend: Callable = self._attend
            if torch.is_grad_enabled():
                attend = partial(checkpoint, self._attend, use_reentrant=False)
            by_head = ([None if part is None else part[:, :, head : head + 1] for part in parts] for head in range(q.shape[2]))
            found = [attend(*these, same)[0] for these in by_head]
            context, weights = torch.cat(found, 2), None
        context = Permuted.apply(context.transpose(2, 3).flatten(3), neighbours.back, neighbours.order)  # (B, G, N, D/G)
        context = split_heads(context.transpose(1, 2).flatten(2), self.num_heads)
        maps = self._maps(weights, neighbours, chosen) if need_weights and weights is not None else None
        return self.output(context, x, attention_mask), maps

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slot_k: Tensor,
        slot_v: Tensor,
        strength: Tensor,
        bias: Tensor | None,
        same: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One softmax over slots and neighbours, for h heads a group and sorted tokens: (B, G, h, N, d), and its weights."""
        to_slots = self.slot_scores(q, slot_k, bias)
        to_tokens = near_scores(q, k, same, self.chunk) + strength
        weights = softmax(torch.cat([to_slots, to_tokens], -1))
        dropped = functional.dropout(weights, self.dropout, self.training)
        of_slots, of_tokens = dropped.split([to_slots.shape[-1], to_tokens.shape[-1]], -1)
        return of_slots @ slot_v + near_values(of_tokens, v, same.shape[-2], self.chunk), weights

    def _sorted(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        """(B, N, D) → (B, G, H/G, N, d): each group of heads in its own order."""
        groups = x.unflatten(-1, (self.groups, -1)).transpose(1, 2)  # (B, G, N, D/G)
        groups = Permuted.apply(groups, neighbours.order, neighbours.back)
        return groups.unflatten(-1, (self.num_heads // self.groups, -1)).transpose(2, 3)

    def _maps(self, weights: Tensor, neighbours: Neighbours, chosen: Chosen | None) -> Tensor:
        """(B, G, H/G, N, K + R + S), sorted → (B, H, N, K + N)."""
        order, length = neighbours.order, neighbours.order.shape[-1]
        chunk, columns = neighbours.same.shape[-2:]
        of_slots, of_tokens = weights.split([weights.shape[-1] - columns, columns], -1)
        seen = beside(chunked(order[..., None], chunk)).transpose(-1, -2)  # (B, G, M, 1, S): which token each column is
        seen = seen.expand(-1, -1, -1, chunk, -1).flatten(2, 3)[:, :, :length]
        tokens = spread(of_tokens, seen[:, :, None], length)
        maps = torch.cat([of_slots, tokens], -1).transpose(2, 3).flatten(3)
        maps = in_order(maps, neighbours.back).unflatten(-1, (self.num_heads // self.groups, -1))
        maps = maps.transpose(2, 3).flatten(1, 2)
        return maps if chosen is None else chosen.merged(maps)

    # A class that overrides forward does not inherit these (Attention.__init_subclass__).
    flops = SlotsAndTokens.flops  # type: ignore[assignment]
    fixed_flops = SlotsAndTokens.fixed_flops  # type: ignore[assignment]

    def token_flops(self, length: int) -> int:
        of_rare = 4 * length * self.rare * self.hidden_size
        if not self.looks_up:
            return super().token_flops(length) + of_rare
        return near_flops(length, self.chunk, self.chunk, self.hidden_size) + of_rare


def neighbours(ids: Tensor, mask: Tensor | None, chunk: int, distance: int = 1) -> Neighbours:
    """``Neighbours`` of ids (B, N), mask (B, N) bool or None, in chunks of ``chunk``. Padding is no neighbour, and has none."""
    length = ids.shape[1]
    ids = ids.long()  # NONE is beyond int32
    ids = ids if mask is None else ids.masked_fill(~mask, NONE)
    around = functional.pad(ids, (distance, distance), value=NONE)
    starts = [distance + side * step for step in range(1, distance + 1) for side in (-1, 1)]
    near = torch.stack([around[:, start : start + length] for start in starts], 1)  # (B, G, N)
    near = near if mask is None else near.masked_fill(~mask[:, None], NONE)
    # Tokens without a neighbour come last, so that the amount of padding does not move the chunks. Sorting by position, too,
    # leaves no ties.
    place = torch.arange(length, device=ids.device)
    order = (near * length + place).argsort(-1)
    whole = undivided(length, chunk, chunk)
    near = chunked(near.gather(-1, order)[..., None], length if whole else chunk, NONE)  # (B, G, M, c, 1)
    same = (near == beside(near, NONE).transpose(-1, -2)) & (near < NONE)
    if whole:
        apart = (place // chunk - place[:, None] // chunk).abs()
        same = same & (apart <= 1) & (place != place[:, None])
    else:
        columns = torch.arange(3 * chunk, device=ids.device)
        same = same & (columns != chunk + columns[:chunk, None])
    return Neighbours(order, order.argsort(-1), same)


def rarest(ids: Tensor, mask: Tensor | None, count: int) -> Chosen:
    """The ``count`` highest different ids in each row of ids (B, N), mask (B, N) bool or None: where each first occurs."""
    length = ids.shape[1]
    ids = ids.long() if mask is None else ids.long().masked_fill(~mask, -1)
    order = (ids * length + torch.arange(length, device=ids.device)).argsort(-1)
    ids = ids.gather(-1, order)
    again = ids == functional.pad(ids, (1, 0), value=-1)[:, :length]  # padding comes first
    # Padded by ``count``, so that a row of any length has enough.
    found, at = functional.pad(ids.masked_fill(again, -1), (0, count), value=-1).topk(count, -1)
    return Chosen(functional.pad(order, (0, count)).gather(-1, at), found >= 0)


def _check_heads(attention: str, num_heads: int, distance: int) -> None:
    if distance == 1:
        check_halves(attention, num_heads)
    elif num_heads % (2 * distance):
        when = f"with attention={attention} and attention_options.distance={distance}"
        raise SettingError("num_heads", num_heads, f"a multiple of {2 * distance}", when=when)


def _option(kind: type[LookupAttention], config: "EncoderConfig", name: str) -> int:
    """A number from attention_options, or the class's default, for use before the attention has been made."""
    options = config.attention_options or {}
    check_ranges("attention_options.", LookupAttention.__init__, options)
    if not isinstance(value := options.get(name, ATTENTIONS.defaults(kind)[name]), int):
        raise SettingError(f"attention_options.{name}", value, "a whole number")
    return value
