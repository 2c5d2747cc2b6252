"""The base class of projections E (and F): from n tokens to k slots. The package's own are in projections.py.

Shapes: B batch, N tokens of the input (N <= n), n = max_length, K = k projected slots, H heads, D hidden width, d = D/H head
width, C channels: the last dimension of what is compressed (D when x is compressed, d when a head's keys or values are).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import SettingError, UserError
from .parts import exact_sum
from .registry import Registry, check_shape
from .starts import FITS, PROJECTION_INITS

if TYPE_CHECKING:
    from .encoder import EncoderConfig

SHORT_ROWS = ("zeros", "mean")

# What describes a class's forward. A subclass that overrides forward, or the for_input that is called in its place, does not
# inherit these, but has to define them itself.
OF_FORWARD = ("commutes", "weighs_tokens", "mass", "flops", "weights_flops", "matrix", "any_length")


class Projection(nn.Module):
    """Compresses (..., N, C) to (..., K, C) along the tokens: ``K̄ = E K`` (paper, equation 7).

    To write one of your own, subclass this and define ``forward``. All other methods are optional: without them a run shows no
    MFU, ``draw`` refuses, and so on, each saying so in one line. ``__init__`` takes the arguments below as ``**shape``; any
    others are settings: ``model.encoder.projection_options``. Its own parameters (``nn.Parameter``) are trained at
    ``projection_lr_factor`` times the learning rate; those of modules inside it (``nn.Linear``) at the usual one.

    Args:
        max_length: n, the longest input in tokens.
        projection_dim: k, the slots it is compressed to.
        num_heads: H, if each head has its own matrix; None: one matrix for all.
        channels: width C of what is compressed.
        init: how a learned E, or a kernel, is initialised: one of starts.PROJECTION_INITS.
        noise: standard deviation of Gaussian noise added to that initialisation.
        hidden_size: D, width of the layer's input; None: ``channels`` times ``num_heads``.
        short_rows: what is read at positions beyond the end of a row: zeros, or the mean of its tokens.
    """

    commutes = False  # whether E (x W) = (E x) W for every matrix W
    # Settings of EncoderConfig that this projection reads and some others do not.
    settings: tuple[str, ...] = ("projection_init", "projection_noise", "short_rows")

    def __init__(
        self,
        max_length: int,
        projection_dim: int,
        num_heads: int | None = None,
        channels: int = 1,
        init: str = "block_mean",
        noise: float = 0.0,
        hidden_size: int | None = None,
        short_rows: str = "zeros",
    ):
        super().__init__()
        self.check(max_length, projection_dim, init)
        self.max_length, self.projection_dim, self.num_heads, self.channels = max_length, projection_dim, num_heads, channels
        self.init, self.noise, self.hidden_size = init, noise, hidden_size or channels * (num_heads or 1)
        self.short_rows = short_rows

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "for_input" not in vars(cls) and cls.for_input is not Projection.for_input:
            raise TypeError(f"{cls.__name__} has a forward, but not the for_input that an encoder calls in its place")
        if {"forward", "for_input"} & vars(cls).keys():
            for name in OF_FORWARD:
                if name not in vars(cls):
                    setattr(cls, name, vars(Projection)[name])

    @classmethod
    def check(cls, max_length: int, projection_dim: int, init: str) -> None:
        """Raises ValueError, naming the setting, if no such projection can be made."""
        if init not in PROJECTION_INITS:
            raise SettingError("projection_init", init, ", ".join(PROJECTION_INITS))
        if not 1 <= projection_dim <= max_length:
            raise UserError(f"projection_dim (k) is {projection_dim}", f"1 to max_length = {max_length}")
        if init in FITS:
            if cls.fill is Projection.fill:
                takes = ", ".join(name for name, kind in PROJECTIONS.items() if kind.fill is not Projection.fill)
                raise SettingError("projection", PROJECTIONS.name(cls), takes, when=f"with projection_init={init!r}")
            FITS[init](max_length, projection_dim)

    @classmethod
    def check_options(cls, max_length: int, projection_dim: int, options: dict[str, Any]) -> None:
        """Raises ValueError, naming the setting, for projection_options that do not fit the shape."""

    @classmethod
    def weighs_tokens(cls, options: dict[str, Any]) -> bool:
        """Whether each slot is a sum of tokens with one weight for all channels, as rotary positions require."""
        return False

    def start(self) -> None:
        """Called after the encoder has initialised all linear layers, including those in here, to change how some start."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compress.

        Args:
            x: (B, N, C), or (B, H, N, C) by head; must be zero at padding.
            mask: (B, N) bool, True at real tokens; None when all are real.

        Returns:
            (B, K, C) or (B, H, K, C).
        """
        raise NotImplementedError

    def for_input(self, x: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The function, like ``forward``, that compresses the keys and values of one input.

        For projections whose weights depend on the layer's input x, (B, N, D): they are computed once for keys and values.
        Values of x at padding must not matter.
        """
        return self._to_slots

    def _to_slots(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``forward``; UserError if a user's own class does not return K slots."""
        found = self(x, mask)
        check_shape(PROJECTIONS, self, found, (*x.shape[:-2], self.projection_dim, x.shape[-1]), "a row for each of k slots")
        return found

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The share of each slot's weight that is on real tokens: Σ_real |E_j| / Σ |E_j|, in [0, 1]; 0 means an empty slot.

        Args:
            x: what is compressed, (..., N, C).
            mask: (B, N) bool or None, as for ``forward``.

        Returns:
            (1 or B, 1 or H, K) without gradient (it masks, it is not learned), or None when every row is full: all are 1.
        """
        raise NotImplementedError

    def flops(self, length: int, width: int) -> int | None:
        """Operations to compress one row of N tokens with ``width`` channels in all heads together; None: not known."""
        return None

    def weights_flops(self, length: int) -> int:
        """Operations of ``for_input`` itself, which runs once for keys and values together."""
        return 0

    def matrix(self, x: Tensor) -> Tensor | None:
        """The weight of each token of a layer's input x, (1, N, D), in each slot: (K, N) or (H, K, N); None: no such matrix."""
        return None

    def any_length(self) -> "Projection":
        """What an export for any length traces in its place: the same function, in which only sizes depend on N."""
        return self

    def lengthen(self, old: "Projection", how: str) -> None:
        """Takes over what a projection for a shorter n has learnt; SettingError if this class cannot.

        Args:
            old: of the same class, for the shorter n.
            how: interpolate (the same K slots, each over a longer stretch) | repeat (the same slots again for each block of
                the old n tokens: K has grown with n).
        """
        mine, theirs = self.state_dict(), old.state_dict()
        if changed := [name for name in mine if mine[name].shape != theirs[name].shape]:
            kind, allowed, on = PROJECTIONS.name(type(self)), "one that has `lengthen`", "n"
            if how == "repeat":  # with which k grows, too
                allowed, on = f"--projections interpolate, which keeps k, or {allowed}", "n or k"
            raise SettingError("projection", kind, allowed, more=f", whose {changed[0]} depends on {on}")
        self.load_state_dict(theirs)

    def fill(self, E: Tensor) -> None:
        """Initialises it with a matrix, (K, n) or (H, K, n)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{PROJECTIONS.name(type(self))}, n={self.max_length}, k={self.projection_dim}"


PROJECTIONS = Registry("projection", Projection, methods=("forward", "for_input"))


def make_projection(kind: str, max_length: int, projection_dim: int, **settings: Any) -> Projection:
    """The projection of that name or class path; settings: the other arguments of ``Projection``, and its own."""
    return PROJECTIONS.find(kind)(max_length=max_length, projection_dim=projection_dim, **settings)


def project(E: Tensor, x: Tensor) -> Tensor:
    """E x: (K, N) times (B, N, C) or (B, H, N, C), or one matrix for each head, (H, K, N) times (B, H, N, C) → (..., K, C).

    `E @ x` would copy x, or E for each row of the batch. This copies nothing, and takes 0.4 to 1.0 of its time, forward and
    backward (CPU, batches of 1 to 32, N = 128 to 8,192; 0.5 at 4 × 512 × 768, k = 128).
    """
    if E.dim() == 3:
        return torch.einsum("hkn,bhnc->bhkc", E, x)
    if x.dim() == 4:  # one E for all heads, whose channels are put side by side
        return project(E, x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return torch.bmm(E.expand(x.shape[0], -1, -1), x)  # len(x) would be a constant in an exported program


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mask (B, N) bool itself or, if it is None, True for each of N tokens, (1, N); x (..., N, C)."""
    return torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if mask is None else mask


def missing(x: Tensor, mask: Tensor | None, max_length: int) -> Tensor:
    """The positions up to n without a token, (1 or B, n) bool; x (..., N, C), mask (B, N) bool or None."""
    return functional.pad(real_tokens(x, mask).logical_not(), (0, max_length - x.shape[-2]), value=True)


def as_column(values: Tensor, x: Tensor) -> Tensor:
    """One value for each token, (1 or B, N) → (1 or B, N, 1), or (1 or B, 1, N, 1) if x has heads, to broadcast with x."""
    return (values[:, None] if x.dim() == 4 else values)[..., None]


def mean_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of a row's real tokens, (..., 1, C); x (..., N, C), zero at padding, mask (B, N) bool or None."""
    if mask is None:
        return x.mean(-2, keepdim=True)
    count = mask.sum(-1).clamp(min=1).view(-1, *[1] * (x.dim() - 1))
    return (exact_sum(x, -2, keepdim=True) / count).to(x.dtype)


def check_dims(config: "EncoderConfig") -> list[int]:
    """k of each layer; ValueError if their number is not that of the layers."""
    dims = config.projection_dims
    if len(dims) != config.num_layers:
        raise UserError(f"projection_dim lists {len(dims)} numbers", f"one, or num_layers = {config.num_layers} of them")
    return dims


def longer_dims(config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
    """``Attention.lengthened`` for slots: k stays, or, with how="repeat", grows by the same factor as n."""
    times = max_length // config.max_length if how == "repeat" else 1
    dims = config.projection_dim
    return {"projection_dim": dims * times if isinstance(dims, int) else [k * times for k in dims]}
