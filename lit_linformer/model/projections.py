"""The projections E: a learned matrix, a fixed random one, a convolution, and two poolings. Each is one class.

Shapes as in projection.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import SettingError, UserError
from .parts import at_least_float32, exact_sum, exporting, without_autocast
from .projection import PROJECTIONS, Projection, as_column, mean_token, missing, project, real_tokens
from .starts import WINDOW_INITS, initial_matrix


@PROJECTIONS.add("linear")
class Linear(Projection):
    """A learned E: (K, n), or (H, K, n) if each head has its own."""

    commutes = True

    def __init__(self, **shape: Any):
        super().__init__(**shape)
        self._keep(self._matrix(self.init))

    @classmethod
    def weighs_tokens(cls, options: dict[str, Any]) -> bool:
        return True

    def _matrix(self, init: str) -> Tensor:
        heads = self.num_heads or 1
        E = torch.stack([initial_matrix(init, self.max_length, self.projection_dim, (head, heads)) for head in range(heads)])
        return E if self.num_heads is not None else E[0]

    def _keep(self, E: Tensor) -> None:
        self.weight = nn.Parameter(E + self.noise * torch.randn_like(E) if self.noise else E)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if exporting():  # of a plain encoder, perhaps for any length
            return self.any_length()(x, mask)
        return with_rest(self, project(self.weight[..., : x.shape[-2]], x), x, mask)

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        length = x.shape[-2]
        if mask is None and length == self.max_length:
            return None
        size = at_least_float32(self.weight.detach().abs())
        size = size if size.dim() == 3 else size[None]  # (1 or H, K, n)
        total = size.sum(-1).clamp(min=torch.finfo(size.dtype).tiny)
        if mask is None:
            return (size[..., :length].sum(-1) / total)[None]
        if exporting():  # whether a slice of columns is contiguous depends on N = n
            mask = functional.pad(mask, (0, self.max_length - length))
        else:
            size = size[..., :length]
        with without_autocast(x.device):
            real = torch.einsum("hkn,bn->bhk", size, mask.to(size.dtype))
        return real / total

    def flops(self, length: int, width: int) -> int:
        return 2 * self.projection_dim * length * width

    def matrix(self, x: Tensor) -> Tensor:
        return matrix_with_rest(self, self.weight[..., : x.shape[-2]], self.weight.sum(-1))

    def any_length(self) -> Projection:
        return _AnyLength(self)

    @torch.no_grad()
    def lengthen(self, old: Projection, how: str) -> None:
        self.weight.copy_(LENGTHENED[how](old.weight, self.max_length))  # type: ignore[arg-type]

    @torch.no_grad()
    def fill(self, E: Tensor) -> None:
        self.weight.copy_(E)


class Windowed(Projection):
    """Slot j is made of window j, n/k tokens wide: k must divide n."""

    @classmethod
    def check(cls, max_length: int, projection_dim: int, init: str) -> None:
        super().check(max_length, projection_dim, init)
        kind = PROJECTIONS.name(cls)
        if "projection_init" in cls.settings and init not in WINDOW_INITS:
            raise SettingError("projection_init", init, ", ".join(WINDOW_INITS), when=f"with projection={kind!r}")
        check_windows("projection", kind, max_length, projection_dim)


@PROJECTIONS.add("conv")
class Convolution(Windowed):
    """One learned kernel for each channel, of width and stride n/k: (n/k, C), or (H, n/k, C) if each head has its own."""

    def __init__(self, **shape: Any):
        super().__init__(**shape)
        heads, self.window = self.num_heads or 1, self.max_length // self.projection_dim
        kernel = torch.stack([WINDOW_INITS[self.init](self.window, (head, heads)) for head in range(heads)])
        kernel = (kernel if self.num_heads is not None else kernel[0])[..., None].repeat_interleave(self.channels, -1)
        self.weight = nn.Parameter(kernel + self.noise * torch.randn_like(kernel) if self.noise else kernel)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.short_rows == "mean" and not is_full(self, x, mask):
            holes = as_column(missing(x, mask, self.max_length), x)
            x = torch.where(holes, mean_token(x, mask), functional.pad(x, (0, 0, 0, self.max_length - x.shape[-2])))
        return all_slots(self, (windows(self, x, 0.0) * self.weight.unsqueeze(-3)).sum(-2))

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        return window_mass(self, x, mask)

    def flops(self, length: int, width: int) -> int:
        return 2 * (self.max_length if self.short_rows == "mean" else length) * width

    def matrix(self, x: Tensor) -> Tensor:
        """The mean of the channels' kernels."""
        kernel = self.weight.mean(-1)  # (n/k) or (H, n/k)
        columns = kernel.repeat(*[1] * (kernel.dim() - 1), self.projection_dim)
        E = window_tokens(self, x) * columns[..., None, : x.shape[-2]]
        return matrix_with_rest(self, E, kernel.sum(-1)[..., None])

    @torch.no_grad()
    def lengthen(self, old: Projection, how: str) -> None:
        if self.window == old.window:  # the slots are repeated
            self.weight.copy_(old.weight)  # type: ignore[arg-type]
            return
        longer = stretched(old.weight.transpose(-2, -1), self.window).transpose(-2, -1)
        self.weight.copy_(longer * old.window / self.window)


@PROJECTIONS.add("mean")
class Mean(Windowed):
    """Slot j is the mean of the real tokens of window j, n/k tokens wide."""

    settings = ()

    @classmethod
    def weighs_tokens(cls, options: dict[str, Any]) -> bool:
        return True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        counts = as_column(window_counts(self, x, mask), x)
        sums = all_slots(self, exact_sum(windows(self, x, 0.0), -2))
        return (sums / counts.clamp(min=1).to(sums.dtype)).to(x.dtype)

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        return window_mass(self, x, mask)

    def flops(self, length: int, width: int) -> int:
        return 0

    def matrix(self, x: Tensor) -> Tensor:
        tokens = window_tokens(self, x)
        return tokens / tokens.sum(1, keepdim=True).clamp(min=1)


@PROJECTIONS.add("max")
class Max(Mean):
    """Slot j is the maximum over the real tokens of window j, channel by channel."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        lowest = torch.finfo(x.dtype).min
        if mask is not None:
            x = x.masked_fill(~as_column(mask, x), lowest)
        found = all_slots(self, windows(self, x, lowest).amax(-2))
        return found.masked_fill(as_column(window_counts(self, x, mask), x) == 0, 0.0)

    mass, flops = Mean.mass, Mean.flops

    def matrix(self, x: Tensor) -> Tensor:
        """The windows over which the maximum is taken."""
        return window_tokens(self, x)


@PROJECTIONS.add("gaussian")
class Gaussian(Linear):
    """A fixed random E, N(0, 1/k), kept in the state dict: the projection of the paper's theorems."""

    fill = Projection.fill  # not Linear's: a random E is not to be replaced
    settings = ("short_rows",)

    def _keep(self, E: Tensor) -> None:
        self.register_buffer("weight", E)

    def _matrix(self, init: str) -> Tensor:
        return super()._matrix("normal")


class _AnyLength(Projection):
    """A ``Linear``, to be traced for any length."""

    def __init__(self, of: Linear):
        super().__init__(of.max_length, of.projection_dim, of.num_heads, of.channels, short_rows=of.short_rows)
        if isinstance(of.weight, nn.Parameter):
            self.weight = of.weight
        else:
            self.register_buffer("weight", of.weight)
        if of.num_heads is not None:
            self.by_token = of.weight.permute(2, 0, 1).contiguous()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        # Whether a slice of columns is contiguous depends on N = n, which the trace would record. So with a matrix for each
        # head rows of (n, H, K) are sliced, otherwise columns are copied: each is the faster one in onnxruntime, by a tenth.
        if self.num_heads is not None:
            slots = self.by_token[: x.shape[-2]].permute(1, 2, 0) @ x
        else:
            slots = self.weight.index_select(-1, torch.arange(x.shape[-2], device=x.device)) @ x
        return with_rest(self, slots, x, mask)

    mass = Linear.mass


def with_rest(projection: Linear | _AnyLength, slots: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """Slots, (..., K, C), plus E applied to the positions beyond the end of each row of x, if these hold the row's mean."""
    if projection.short_rows == "zeros" or is_full(projection, x, mask):
        return slots
    if mask is None:
        share = projection.weight[..., x.shape[-2] :].sum(-1)  # of each slot, (K,) or (H, K)
    else:
        holes = missing(x, mask, projection.max_length).to(projection.weight.dtype)
        share = torch.einsum("...kn,bn->b...k", projection.weight, holes)  # (B, K) or (B, H, K)
        if x.dim() == 4 and projection.num_heads is None:
            share = share[:, None]
    return slots + share[..., None] * mean_token(x, mask)


def matrix_with_rest(projection: Projection, E: Tensor, sums: Tensor) -> Tensor:
    """The weight of each of N tokens in each slot: E's columns, (..., K, N), whose rows sum to ``sums``, (..., K or 1)."""
    if projection.short_rows == "zeros":
        return E
    return E + (sums - E.sum(-1))[..., None] / E.shape[-1]


def is_full(projection: Projection, x: Tensor, mask: Tensor | None) -> bool:
    """Whether all rows are known to have n tokens; always False during export, which may be for any length."""
    return mask is None and x.shape[-2] == projection.max_length and not exporting()


def check_windows(setting: str, kind: str, max_length: int, projection_dim: int) -> None:
    """Raises ValueError if windows of equal width do not tile n tokens."""
    if max_length % projection_dim:
        raise UserError(
            f"projection_dim (k) is {projection_dim}, but {setting}={kind!r} works on windows of max_length/k tokens",
            f"the divisors of max_length = {max_length}",
        )


def windows(projection: Projection, x: Tensor, fill: float, more: int = 0) -> Tensor:
    """(..., N, C) → (..., M, n/k, C): the ⌈N k/n⌉ windows that have tokens and ``more`` after them, K at most.

    ``fill`` stands where there is no token. An exported program has all K windows, since it serves every length.
    """
    width = projection.max_length // projection.projection_dim
    count = projection.projection_dim
    if not exporting():
        count = min(count, -(-x.shape[-2] // width) + more)
    missing = count * width - x.shape[-2]
    if exporting() or missing:
        x = functional.pad(x, (0, 0, 0, missing), value=fill)
    return x.unflatten(-2, (count, width))


def all_slots(projection: Projection, x: Tensor) -> Tensor:
    """(..., M, C), one row for each of ``windows`` → (..., K, C), zeros for the others."""
    missing = projection.projection_dim - x.shape[-2]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def window_counts(projection: Projection, x: Tensor, mask: Tensor | None) -> Tensor:
    """Real tokens in each window, (1 or B, K)."""
    return all_slots(projection, windows(projection, real_tokens(x, mask)[..., None].long(), 0).sum(-2))[..., 0]


def window_mass(projection: Projection, x: Tensor, mask: Tensor | None) -> Tensor | None:
    """``Projection.mass`` for windows."""
    if mask is None and x.shape[-2] == projection.max_length:
        return None
    counts = window_counts(projection, x, mask)
    exact = torch.promote_types(x.dtype, torch.float32)
    return counts[:, None].to(exact) / (projection.max_length // projection.projection_dim)


def window_tokens(projection: Projection, x: Tensor) -> Tensor:
    """(K, N): 1 where the token is in the slot's window, else 0; N from x (..., N, C)."""
    K, n = projection.projection_dim, projection.max_length
    return torch.block_diag(*torch.ones(K, 1, n // K)).to(x.device)[:, : x.shape[-2]]


def _interpolated(weight: Tensor, max_length: int) -> Tensor:
    """E (..., K, n) for a larger n: columns are interpolated, and divided so that row sums stay the same."""
    return stretched(weight, max_length) / (max_length / weight.shape[-1])


def _repeated(weight: Tensor, max_length: int) -> Tensor:
    """E (..., K, n) for a multiple of n: the same block repeated along the diagonal."""
    return torch.kron(torch.eye(max_length // weight.shape[-1]).to(weight), weight)


LENGTHENED = {"interpolate": _interpolated, "repeat": _repeated}


def stretched(x: Tensor, width: int) -> Tensor:
    """(..., N) → (..., width), by linear interpolation."""
    flat = functional.interpolate(x.reshape(-1, 1, x.shape[-1]), size=width, mode="linear", align_corners=False)
    return flat.reshape(*x.shape[:-1], width)
