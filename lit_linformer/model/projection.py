"""The base of every projection E (and F): from n tokens to k slots. The kinds are in projections.py.

Shapes: B batch, N tokens of the input (N <= n), n = max_length, K = k projected slots, H heads, D hidden width, d = D/H head
width, C channels: the last dimension of what is compressed (D when x is compressed, d when a head's keys or values are).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import SettingError, UserError
from .registry import Registry, check_shape
from .starts import FITS, PROJECTION_INITS

if TYPE_CHECKING:
    from .encoder import EncoderConfig

SHORT_ROWS = ("zeros", "mean")

# What a class says of its forward. A subclass with a forward of its own has to say it again.
OF_FORWARD = ("commutes", "weighs_tokens", "mass", "flops", "weights_flops", "matrix", "any_length")


class Projection(nn.Module):
    """Compresses (..., N, C) to (..., K, C) along the tokens: ``K̄ = E K`` (paper, equation 7).

    One of your own is a subclass with a ``forward``; what else is here may be left as it is, and then a run has no MFU,
    ``draw`` refuses, and so on, each in one line. Settings of its own are further arguments of ``__init__``, which takes these
    as ``**shape``; ``model.encoder.projection_options`` sets them. Parameters of its own (``nn.Parameter``) are learnt at
    ``projection_lr_factor``; modules inside it (``nn.Linear``) as any other.

    Args:
        max_length: n, the longest input in tokens.
        projection_dim: k, the slots it is compressed to.
        num_heads: how many heads have a matrix of their own; None: one for all.
        channels: width C of what is compressed.
        init: how a learned E, or a kernel, starts: one of starts.PROJECTION_INITS.
        noise: standard deviation of Gaussian noise added to that start.
        hidden_size: D, width of the layer's input; None: what ``channels`` and ``num_heads`` make of it.
        short_rows: what stands in the places up to n that a row has no token for: zeros, or the mean of its tokens.
    """

    commutes = False  # whether E (x W) = (E x) W for every matrix W
    # Of EncoderConfig, those that only some kinds read; a class of your own may.
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
        if "forward" in vars(cls):
            if "for_input" not in vars(cls) and cls.for_input is not Projection.for_input:
                raise TypeError(f"{cls.__name__} has a forward, but not the for_input that an encoder calls in its place")
            for name in OF_FORWARD:
                if name not in vars(cls):
                    setattr(cls, name, vars(Projection)[name])

    @classmethod
    def check(cls, max_length: int, projection_dim: int, init: str) -> None:
        """Raises ValueError, naming the setting, for a projection that cannot be made."""
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
        """Whether each slot is a sum of tokens with one weight for all channels: what rotary positions ask for."""
        return False

    def start(self) -> None:
        """Called once an encoder has given its linear layers their start, those in here too: for another one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compress.

        Args:
            x: (B, N, C), or (B, H, N, C) a head; rows at pads must be zero already.
            mask: (B, N) bool, True at real tokens; None when all are real.

        Returns:
            (B, K, C) or (B, H, K, C).
        """
        raise NotImplementedError

    def for_input(self, x: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """What compresses the keys and values of one input: a function as ``forward``.

        For projections whose weights depend on the layer's input x, (B, N, D): they are computed once for keys and values.
        The values at pads must not matter.
        """
        return self._to_slots

    def _to_slots(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``forward``; UserError where that of a user's own class does not return K rows."""
        found = self(x, mask)
        check_shape(PROJECTIONS, self, found, (*x.shape[:-2], self.projection_dim, x.shape[-1]), "a row for each of k slots")
        return found

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The share of each slot that lies on real tokens: Σ_real |E_j| / Σ |E_j|, in [0, 1]; 0 means an empty slot.

        Args:
            x: what is compressed, (..., N, C).
            mask: (B, N) bool or None, as for ``forward``.

        Returns:
            (1 or B, 1 or H, K) without gradient (it masks, it is not learned), or None when every row is full: all are 1.
        """
        raise NotImplementedError

    def flops(self, length: int, width: int) -> int | None:
        """Operations that compress one row of N tokens, ``width`` channels in all heads together; None: not known."""
        return None

    def weights_flops(self, length: int) -> int:
        """Operations of ``for_input`` itself, once for keys and values."""
        return 0

    def matrix(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """What each token of a layer's input x, (1, N, D), gives each slot: (K, N), or (H, K, N); None: no such matrix."""
        return None

    def any_length(self) -> "Projection":
        """What an export traces in its place: the same, with nothing in it that depends on N but sizes."""
        return self

    def lengthen(self, old: "Projection", how: str) -> None:
        """Takes over what a projection of a shorter n has learnt.

        Args:
            old: the same kind, of the shorter n.
            how: interpolate (the same K slots, each over a longer stretch) | repeat (the same slots again for each block of
                the old n tokens: K has grown as n has).
        """
        mine, theirs = self.state_dict(), old.state_dict()
        if changed := [name for name in mine if mine[name].shape != theirs[name].shape]:
            kind, allowed, on = PROJECTIONS.name(type(self)), "one that has `lengthen`", "n"
            if how == "repeat":  # with which k grows, too
                allowed, on = f"--projections interpolate, which keeps k, or {allowed}", "n or k"
            raise SettingError("projection", kind, allowed, more=f", whose {changed[0]} depends on {on}")
        self.load_state_dict(theirs)

    def fill(self, E: Tensor) -> None:
        """Takes a matrix, (K, n) or (H, K, n), as its start."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{PROJECTIONS.name(type(self))}, n={self.max_length}, k={self.projection_dim}"


PROJECTIONS = Registry("projection", Projection, methods=("forward", "for_input"))


def make_projection(kind: str, max_length: int, projection_dim: int, **settings: Any) -> Projection:
    """The projection of that name or class path; settings: num_heads, channels, init, noise, and what it has of its own."""
    return PROJECTIONS.find(kind)(max_length=max_length, projection_dim=projection_dim, **settings)


def project(E: Tensor, x: Tensor) -> Tensor:
    """E x: (K, N) times (B, N, C) or (B, H, N, C), or a matrix a head, (H, K, N) times (B, H, N, C) → (..., K, C).

    `E @ x` copies x, or E for each row of the batch. Written so that nothing is copied, forward and backward take 0.4 to 1.0 of
    its time (CPU, batches of 1 to 32, N = 128 to 8,192; 0.5 at 4 × 512 × 768, k = 128).
    """
    if E.dim() == 3:
        return torch.einsum("hkn,bhnc->bhkc", E, x)
    if x.dim() == 4:  # one E for all heads: their widths side by side
        return project(E, x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return torch.bmm(E.expand(x.shape[0], -1, -1), x)  # len(x) would be a constant of an exported program


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """mask (B, N) bool or, where it is None, True for each of N tokens, (1, N); x (..., N, C)."""
    return torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if mask is None else mask


def missing(x: Tensor, mask: Tensor | None, max_length: int) -> Tensor:
    """The places up to n without a token, (1 or B, n) bool; x (..., N, C), mask (B, N) bool or None."""
    return functional.pad(~real_tokens(x, mask), (0, max_length - x.shape[-2]), value=True)


def as_column(values: Tensor, x: Tensor) -> Tensor:
    """One a row, (1 or B, N) → (1 or B, N, 1), or (1 or B, 1, N, 1) where x has heads, (B, H, N, C): to be used with x."""
    return (values[:, None] if x.dim() == 4 else values)[..., None]


def mean_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of a row's tokens, (..., 1, C); x (..., N, C), zero at pads, mask (B, N) bool or None."""
    if mask is None:
        return x.mean(-2, keepdim=True)
    count = mask.sum(-1).clamp(min=1).view(-1, *[1] * (x.dim() - 1))
    return x.sum(-2, keepdim=True) / count.to(x.dtype)


def check_dims(config: "EncoderConfig") -> list[int]:
    """k of each layer; ValueError where they are not as many as layers."""
    dims = config.projection_dims
    if len(dims) != config.num_layers:
        raise UserError(f"projection_dim lists {len(dims)} numbers", f"one, or num_layers = {config.num_layers} of them")
    return dims


def longer_dims(config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
    """``Attention.lengthened`` of what has k slots: as many, or as many more as n grows where they are repeated."""
    times = max_length // config.max_length if how == "repeat" else 1
    dims = config.projection_dim
    return {"projection_dim": dims * times if isinstance(dims, int) else [k * times for k in dims]}
