"""Multi-head attention: the base class. The mechanisms are in full.py, linformer.py, lookup.py and so on, one file each.

Shapes: B batch, N tokens (N <= n = max_length), K = k projected slots, H heads, D hidden width, d = D/H head width, w width of
the local convolution. Names as in the paper (section 4): x input, q, k, v queries, keys, values, E and F the projections.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import SettingError, UserError
from .parts import differences, exporting, rotated
from .registry import Registry

if TYPE_CHECKING:
    from .encoder import EncoderConfig


class Attention(nn.Module):
    """Self-attention, (B, N, D) → (B, N, D), with the linear layers and the local convolution that all mechanisms have.

    To write one of your own, subclass this and define ``forward``, which need only take x and the mask and return a tensor. All
    other methods are optional: without them a run shows no MFU, ``draw`` refuses, and so on, each saying so in one line.
    ``__init__`` takes the arguments below as ``**shape``; any others are settings: ``model.encoder.attention_options``.

    Args:
        hidden_size: D.
        num_heads: H; divides D.
        max_length: n, the longest input.
        local_width: width w of a ``LocalConvolution`` of x, added to the heads' output before W_O; 0: none.
        dropout: probability with which attention weights are dropped.
        bias: whether the linear layers have one.
        rotary_base: base of the rotary positions that rotate queries and keys (parts.rotated); None: no rotation.
    """

    title: str | None = None  # name of a model with this attention, as shown to users; None: the setting's value
    exact = False  # softmax over all tokens: what the others are compared with, and converted from
    slots = False  # whether projections compress keys and values to projection_dim slots
    rotary = False  # whether forward rotates queries and keys, that is, gets them from ``queries``, ``keys`` or ``heads``
    settings: tuple[str, ...] = ()  # settings of EncoderConfig that this mechanism reads and some others do not
    grows = "repeat"  # what becomes of its slots if `convert` extends n and is not told: as in ``Projection.lengthen``
    handed_on: tuple[str, ...] = ()  # arguments of forward and compress that come from the previous layer's third result

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        local_width: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
        rotary_base: float | None = None,
    ):
        super().__init__()
        check_heads(hidden_size, num_heads)
        self.hidden_size, self.num_heads, self.max_length, self.dropout = hidden_size, num_heads, max_length, dropout
        self.rotary_base = rotary_base
        self.query = nn.Linear(hidden_size, hidden_size, bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias)
        self.value = nn.Linear(hidden_size, hidden_size, bias)
        self.out = nn.Linear(hidden_size, hidden_size, bias)
        self.local = LocalConvolution(hidden_size, local_width) if local_width else None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass does not inherit what describes its parent alone: it has to define these itself.
        own = ("title", "exact") + (("flops", "fixed_flops", "rotary") if "forward" in vars(cls) else ())
        for name in own:
            if name not in vars(cls):
                setattr(cls, name, vars(Attention)[name])

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        """Raises ValueError, naming the setting, if this attention cannot be built from the config."""

    @classmethod
    def arguments(cls, config: "EncoderConfig", layer: int) -> dict[str, Any]:
        """The arguments that the encoder passes to ``__init__`` for this layer, apart from ``attention_options``."""
        names = ("hidden_size", "num_heads", "max_length", "local_width", "bias")
        base = config.rotary_base if config.position == "rotary" else None
        return {name: getattr(config, name) for name in names} | {"dropout": config.attention_dropout, "rotary_base": base}

    @classmethod
    def from_config(cls, config: "EncoderConfig", layer: int) -> "Attention":
        return cls(**cls.arguments(config, layer), **(config.attention_options or {}))

    @classmethod
    def shared(cls, config: "EncoderConfig") -> nn.Module | None:
        """What all layers share, or None: the encoder's E in the state dict, which each ``forward`` gets as ``shared``."""
        return None

    def of_ids(self, config: "EncoderConfig", input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
        """Further arguments of each layer's ``forward``, computed once from the ids (B, N) and the mask (B, N) or None."""
        return {}

    @classmethod
    def describe(cls, config: "EncoderConfig") -> str:
        """A short description for headers, such as `linformer, k = 128, layerwise`."""
        options = (f"{name} = {value}" for name, value in (config.attention_options or {}).items())
        name = cls.title.lower() if cls.title else config.attention
        return ", ".join([name, *cls.details(config), *options, *differences(config)])

    @classmethod
    def details(cls, config: "EncoderConfig") -> list[str]:
        """Its most important settings, for ``describe``."""
        return []

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        """The number of columns of its maps for N = ``length`` tokens: how many slots and tokens are attended to."""
        return length

    @classmethod
    def lengthened(cls, config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
        """The settings to change for a larger n, by name. how: interpolate | repeat, as in ``Projection.lengthen``."""
        return {}

    def start(self) -> None:
        """Called after the encoder has initialised all linear layers, to initialise some in another way."""

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: (B, N, D), padded on the right.
            attention_mask: (B, N) bool, True at real tokens; None when all are.
            need_weights: also return the attention maps, without dropout.

        Returns:
            (B, N, D), and the maps (B, H, N, columns) or None.
        """
        raise NotImplementedError

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of all tokens, (B, H, N, d) each."""
        self.check_length(x)
        q, k, v = (split_heads(linear(x), self.num_heads) for linear in (self.queries, self.keys, self.value))
        return q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """W_Q x, (B, N, D), rotated by position if positions are rotary."""
        return self._rotated(self.query(x))

    def keys(self, x: Tensor) -> Tensor:
        """W_K x, as ``queries``."""
        return self._rotated(self.key(x))

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self.rotary_base is None else rotated(x, self.num_heads, self.rotary_base)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """softmax(q kᵀ/√d + bias) v with this layer's dropout: (B, H, N, d), and the maps if asked for."""
        return attend(q, k, v, bias, self.dropout if self.training else 0.0, need_weights)

    def output(self, context: Tensor, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """W_O applied to the heads (B, H, N, d), side by side, plus the local convolution of x: (B, N, D)."""
        local = 0.0 if self.local is None else self.local(zero_pads(x, attention_mask))
        return self.out(merge_heads(context) + local)

    def compress(
        self, x: Tensor, attention_mask: Tensor | None = None, shared: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the maps' columns, (B, H, columns, d) each."""
        return self.heads(x)[1:]

    def matrix(self, x: Tensor, shared: nn.Module | None = None) -> Tensor | None:
        """The weight of each token of x (1, N, D) in each column of the maps: (K, N), or (H, K, N); None: nothing to draw."""
        return None

    def flops(self, length: int, shared: nn.Module | None = None) -> int | None:
        """Operations of the forward pass on one row of N tokens, as flops.py counts them; None: not known."""
        return None

    def fixed_flops(self, length: int, shared: nn.Module | None = None) -> int:
        """The part of ``flops`` that multiplies by a fixed matrix, which needs no gradient."""
        return 0

    def linear_flops(self, length: int, rows: int) -> int:
        """Operations of W_Q and W_O for N tokens, of W_K and W_V for ``rows`` tokens or slots, and of the local convolution."""
        D, width = self.hidden_size, 0 if self.local is None else self.local.width
        return 4 * length * D * D + 4 * rows * D * D + 2 * width * length * D

    def check_length(self, x: Tensor) -> None:
        if x.shape[1] > self.max_length:
            raise UserError(f"the input has {x.shape[1]} tokens", f"up to max_length = {self.max_length}")


ATTENTIONS = Registry("attention", Attention, methods=("forward",), called={"transformer": "full"})


def check_width(width: int) -> None:
    """Raises ValueError for a convolution that is not centred on a token."""
    if width < 1 or width % 2 == 0:
        raise SettingError("local_width", width, "0 (none) or a positive odd number")


class LocalConvolution(nn.Module):
    """A depthwise convolution over the tokens, (B, N, D) → (B, N, D), initialised to zero: a local branch beside attention.

    Not in the paper. With budgets of millions of tokens both models need it to get below unigram perplexity (docs/LOG.md). An
    encoder with ``local_std`` draws its initial weights at random instead.

    Args:
        hidden_size: D.
        width: w, odd: the token itself and (w - 1)/2 neighbours on each side.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        check_width(width)
        self.width = width
        self.weight = nn.Parameter(torch.zeros(hidden_size, 1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not exporting():
            return self._shifted(x)
        # As a 2-d convolution of height 1 the channels-last input needs no copy: 3 × faster than conv1d on CPU, 16 × 512 × 256.
        # CPU autocast is off: the bfloat16 backward of a depthwise convolution took 3 × as long as the float32 one.
        with torch.autocast("cpu", enabled=False):
            x = x.to(self.weight.dtype).transpose(1, 2).unsqueeze(2)
            x = functional.conv2d(x, self.weight, padding=(0, self.width // 2), groups=x.shape[1])
        return x.squeeze(2).transpose(1, 2)

    def _shifted(self, x: Tensor) -> Tensor:
        # The same as a sum of w shifted copies, which a compiler fuses with the operations around it. Forward and backward on
        # a CPU, 4 × 512 × 768: compiled 17.0 ms instead of 27.2, in bfloat16 14.5 instead of 29.5; eager 84 instead of 15.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as the neighbouring matrix products read it
        length, x = x.shape[1], functional.pad(x, (0, 0, self.width // 2, self.width // 2))
        copies = (x[:, shift : shift + length] * self.weight[:, 0, 0, shift] for shift in range(self.width))
        return sum(copies)  # type: ignore[return-value]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ/√d + bias) v, fused unless the maps are asked for. bias: broadcastable to (B, H, N, K)."""
    # The fused kernel's bfloat16 backward is slow on a CPU: 28.8 ms for 8 × 4 heads, 512 queries, 128 keys; unfused 13.7.
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= 256
    if not need_weights and not slow:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout), None
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return functional.dropout(weights, dropout) @ v, weights if need_weights else None


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, stored in the scores' precision; its sums are in float32.

    On a GPU autocast would return float32, and so take twice the memory for the weights of many columns; on a CPU it does not.
    """
    return scores.softmax(-1, dtype=scores.dtype)  # autocast respects an explicit dtype


def log_mass(mass: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """log(mass) as an attention bias: (B, H, K) shares → (B, H, 1, K); None stays None.

    Zero mass becomes a large negative number, not -inf, so that a row without any real token stays finite: half of the lowest
    number, so that adding a score cannot overflow to -inf in half precision.
    """
    if mass is None:
        return None
    lowest = torch.finfo(dtype).min / 2
    bias = mass.to(torch.promote_types(dtype, torch.float32)).log().clamp(min=lowest)
    return bias.to(dtype)[:, :, None]


def as_bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """An attention bias: 0 where ``allowed``, else half of the lowest number, so that adding a score cannot overflow."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min / 2)


def zero_pads(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, N, D) with the vectors at padding set to zero, whatever their values (NaN too)."""
    # Not masked_fill, which on a CPU takes nearly twice as long, forward and backward.
    return x if attention_mask is None else torch.where(attention_mask[..., None], x, 0.0)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, D) → (B, H, N, d)"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, d) → (B, N, D)"""
    return x.transpose(1, 2).flatten(-2)


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raises ValueError if the number of heads does not divide the width."""
    if num_heads < 1 or hidden_size % num_heads:
        raise SettingError("hidden_size", hidden_size, f"a multiple of num_heads = {num_heads}")


def check_halves(attention: str, num_heads: int) -> None:
    """Raises ValueError if the number of heads is odd."""
    if num_heads % 2:
        raise SettingError("num_heads", num_heads, "an even number", when=f"with attention={attention}")
