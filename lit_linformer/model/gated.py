"""Gated pooling over windows. Shapes as in projection.py; c = n/k tokens per window, o overlap, S = c + 2 o, G gates."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from .attention import merge_heads
from .chunks import between
from .errors import SettingError
from .projection import PROJECTIONS, Projection, as_column, real_tokens
from .projections import Windowed, all_slots, stretched, windows
from .ranges import Natural, OneOf
from .starts import WINDOW_INITS

UNLIKELY = math.exp(-4)  # initial weight, relative to the largest, of tokens that projection_init leaves out


@PROJECTIONS.add("gated")
class Gated(Windowed):
    """Slot j = Σ_t softmax_t(x_t W_Z + B_(t - start)) ⊙ z_t over window j: DeepSeek-V4's compressed attention, bidirectional.

    x is the layer's input and z what is compressed. The softmax is over the real tokens of the window and ``overlap`` tokens on
    each side (in DeepSeek's CSA, causal, only before it); B is a bias for each position in the window. With W_Z = 0 and no
    overlap this is the mean over windows. O(N D G).

    Args:
        gate: head: one gate for each head (or for all, if they share a projection); channel: one for each channel.
        overlap: o, at most n/k.
        shape: as Projection's; init (block_mean, split or strided) gives the initial B; noise has no effect.
    """

    settings = ("projection_init",)

    def __init__(self, gate: Annotated[str, OneOf(("head", "channel"))] = "head", overlap: Natural = 0, **shape: Any):
        super().__init__(**shape)
        self.window, self.overlap = self.max_length // self.projection_dim, overlap
        self.check_options(self.max_length, self.projection_dim, {"overlap": overlap})
        heads, self.gates = self.num_heads or 1, 1 if gate == "head" else self.channels
        self.scores = nn.Linear(self.hidden_size, heads * self.gates, bias=False)
        bias = torch.full((heads, self.window + 2 * overlap, self.gates), math.log(UNLIKELY))
        for head in range(heads):
            start = WINDOW_INITS[self.init](self.window, (head, heads))
            bias[head, overlap : overlap + self.window] = (start / start.max()).clamp(min=UNLIKELY).log()[:, None]
        self.bias = nn.Parameter(bias if self.num_heads is not None else bias[0])

    @classmethod
    def check_options(cls, max_length: int, projection_dim: int, options: dict[str, Any]) -> None:
        overlap, window = options.get("overlap", 0), max_length // projection_dim
        if overlap > window:
            raise SettingError("projection_options.overlap", overlap, f"up to the window, max_length/projection_dim = {window}")

    @classmethod
    def weighs_tokens(cls, options: dict[str, Any]) -> bool:
        return options.get("gate", "head") == "head"

    def start(self) -> None:
        nn.init.zeros_(self.scores.weight)  # at first the bias alone determines the weights

    def weights(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Gates of x, (B, N, D), in the M ``windows`` with tokens: (B, M, S, G) or (B, H, M, S, G); zero at padding."""
        scores = self.scores(x)  # (…, N, H G)
        if self.num_heads is not None:
            scores = scores.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, G)
        there = self._windows(as_column(real_tokens(x, mask), scores), False)
        scores = self._windows(scores, 0.0) + self.bias.unsqueeze(-3)
        return scores.masked_fill(~there, torch.finfo(scores.dtype).min / 2).softmax(-2).to(x.dtype) * there

    def _windows(self, x: Tensor, fill: float) -> Tensor:
        """(..., N, C) → (..., M, S, C): each window with its overlap, by which one more may see the last tokens."""
        return between(windows(self, x, fill, more=1 if self.overlap else 0), fill, self.overlap)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes the gates from the very x that is compressed; an encoder calls ``for_input`` instead."""
        return self.for_input(x if self.num_heads is None else merge_heads(x), mask)(x, mask)

    def for_input(self, x: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        weights = self.weights(x, mask)

        def pool(z: Tensor, mask: Tensor | None) -> Tensor:
            gates = weights if weights.dim() == z.dim() + 1 else weights[:, None]
            return all_slots(self, (gates * self._windows(z, 0.0)).sum(-2))

        return pool

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """1 for a slot with a real token, else 0."""
        if mask is None and x.shape[-2] == self.max_length:
            return None
        real = self._windows(real_tokens(x, mask)[..., None], False)
        return all_slots(self, real.any(-2).float())[:, None, :, 0]

    def flops(self, length: int, width: int) -> int:
        return 0

    def weights_flops(self, length: int) -> int:
        return 2 * length * self.hidden_size * self.scores.out_features

    @torch.no_grad()
    def lengthen(self, old: Projection, how: str) -> None:
        """Interpolates a window's bias to the longer window."""
        assert isinstance(old, Gated)
        before, inside, after = old.bias.split([self.overlap, old.window, self.overlap], -2)
        inside = stretched(inside.transpose(-1, -2), self.window).transpose(-1, -2)
        self.load_state_dict(old.state_dict() | {"bias": torch.cat([before, inside, after], -2)})

    def matrix(self, x: Tensor) -> Tensor:
        """The mean of the channels' gates."""
        weights = self.weights(x, None).mean(-1, keepdim=True)
        tokens = torch.eye(x.shape[1], dtype=weights.dtype, device=x.device)
        return all_slots(self, (weights * self._windows(tokens, 0.0)).sum(-2))[0]
