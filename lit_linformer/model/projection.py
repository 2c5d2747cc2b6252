"""The k x n projection E (and F): from n tokens to k slots.

Shapes: B batch, N tokens of the input (N <= n), n = max_length, K = k projected slots, H heads, D hidden width, d = D/H head
width, C channels: whatever stands last in what is compressed (D when x is compressed, d when a head's keys or values are).
"""

import itertools
import math

import torch
from torch import Tensor, nn

PROJECTIONS = ("linear", "conv", "mean", "max", "gaussian")
WINDOW_INITS = ("block_mean", "split", "strided")
PROJECTION_INITS = (*WINDOW_INITS, "normal", "xavier")


def window_bounds(max_length: int, projection_dim: int) -> list[int]:
    """Where the K windows of near-equal width that tile n tokens begin, and n at the end: K + 1 numbers."""
    return [j * max_length // projection_dim for j in range(projection_dim + 1)]


def initial_matrix(init: str, max_length: int, projection_dim: int, part: tuple[int, int] = (0, 1)) -> Tensor:
    """A start for one learned E, (K, n).

    ``block_mean``: slot j is the mean of window j. ``split``: of a part of window j, one for each head. ``strided``: slot j is
    one token of window j, the first of that part. ``normal``: N(0, 1/k), the random projection of Theorem 2. ``xavier``:
    uniform with gain 1/sqrt(2), as in the authors' released code.

    Args:
        part: (h, H): the matrix of the h-th of H heads.
    """
    E = torch.zeros(projection_dim, max_length)
    if init == "normal":
        return E.normal_(0.0, 1.0 / math.sqrt(projection_dim))
    if init == "xavier":
        return nn.init.xavier_uniform_(E, gain=1.0 / math.sqrt(2.0))
    bounds = window_bounds(max_length, projection_dim)
    for row, (start, stop) in zip(E, itertools.pairwise(bounds), strict=True):
        row[start:stop] = initial_window(init, stop - start, part)
    return E


def initial_window(init: str, width: int, part: tuple[int, int] = (0, 1)) -> Tensor:
    """The weights of a window's tokens, (width,), for block_mean, split and strided."""
    head, heads = part
    weights = torch.zeros(width)
    if init == "block_mean":
        return weights + 1.0 / width
    first = head * width // heads
    after = first + 1 if init == "strided" else max(first + 1, (head + 1) * width // heads)
    weights[first:after] = 1.0 / (after - first)
    return weights


class Projection(nn.Module):
    """Compresses (..., N, C) to (..., K, C) along the tokens: ``K̄ = E K`` (paper, equation 7).

    Args:
        kind: linear (a learned E) | conv (one learned kernel a channel, width and stride n/k) | mean | max (pooling over
            windows of n/k) | gaussian (a fixed random E, N(0, 1/k), kept in the state dict).
        max_length: n, the longest input in tokens.
        projection_dim: k, the slots it is compressed to.
        num_heads: how many heads have a matrix of their own; None: one for all.
        channels: width C of what is compressed (only conv needs it).
        init: how a learned E, or a kernel, starts: see ``initial_matrix``.
        noise: standard deviation of Gaussian noise added to a learned E's start.
    """

    def __init__(
        self,
        kind: str,
        max_length: int,
        projection_dim: int,
        num_heads: int | None = None,
        channels: int = 1,
        init: str = "block_mean",
        noise: float = 0.0,
    ):
        super().__init__()
        check_projection(kind, max_length, projection_dim, init)
        self.kind, self.max_length, self.projection_dim = kind, max_length, projection_dim
        self.window = max_length // projection_dim
        self.commutes = kind in ("linear", "gaussian")  # E (x W) = (E x) W; max and a kernel a channel do not
        heads = () if num_heads is None else (num_heads,)
        parts = [(h, num_heads or 1) for h in range(num_heads or 1)]
        if kind in ("linear", "gaussian"):
            start = "normal" if kind == "gaussian" else init
            E = torch.stack([initial_matrix(start, max_length, projection_dim, part) for part in parts])
            E = E.reshape(*heads, projection_dim, max_length)
            if kind == "gaussian":
                self.register_buffer("weight", E)
            else:
                self.weight = nn.Parameter(E + noise * torch.randn_like(E) if noise else E)
        elif kind == "conv":
            kernel = torch.stack([initial_window(init, self.window, part) for part in parts])
            kernel = kernel.reshape(*heads, self.window, 1).repeat_interleave(channels, -1)
            self.weight = nn.Parameter(kernel + noise * torch.randn_like(kernel) if noise else kernel)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compress.

        Args:
            x: (B, N, C), or (B, H, N, C) a head; rows at pads must be zero already.
            mask: (B, N) bool, True at real tokens; None when all are real. Mean and max need it.

        Returns:
            (B, K, C) or (B, H, K, C).
        """
        if self.kind in ("linear", "gaussian"):
            return project(self.weight[..., : x.shape[-2]], x)
        if self.kind == "max" and mask is not None:
            pads = ~(mask if x.dim() == 3 else mask[:, None])
            x = x.masked_fill(pads[..., None], torch.finfo(x.dtype).min)
        fill = torch.finfo(x.dtype).min if self.kind == "max" else 0.0
        windows = self._windows(x, fill)  # (..., K, n/k, C)
        if self.kind == "conv":
            return (windows * self.weight.unsqueeze(-3)).sum(-2)
        counts = self._counts(x.shape[-2], mask, x.device)  # (1 or B, K) real tokens a window
        counts = counts.view(counts.shape[0], *[1] * (x.dim() - 3), -1, 1)
        if self.kind == "mean":
            return windows.sum(-2) / counts.clamp(min=1).to(x.dtype)
        return windows.amax(-2).masked_fill(counts == 0, 0.0)

    def mass(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The share of each slot that lies on real tokens: Σ_real |E_j| / Σ |E_j|, in [0, 1]; 0 means an empty slot.

        Args:
            x: what is compressed, (..., N, C).
            mask: (B, N) bool or None, as for ``forward``.

        Returns:
            (1 or B, 1 or H, K) without gradient (it masks, it is not learned), or None when every row is full: all are 1.
        """
        length = x.shape[-2]
        if mask is None and length == self.max_length:
            return None
        if self.kind not in ("linear", "gaussian"):
            return self._counts(length, mask, x.device)[:, None].float() / self.window
        size = self.weight.detach().abs()
        size = size.to(torch.promote_types(size.dtype, torch.float32))
        size = size if size.dim() == 3 else size[None]  # (1 or H, K, n)
        total = size.sum(-1).clamp(min=torch.finfo(size.dtype).tiny)
        if mask is None:
            return (size[..., :length].sum(-1) / total)[None]
        with torch.autocast(x.device.type, enabled=False):
            real = torch.einsum("hkn,bn->bhk", size[..., :length], mask.to(size.dtype))
        return real / total

    def _windows(self, x: Tensor, fill: float) -> Tensor:
        """(..., N, C) → (..., K, n/k, C); tokens that a short input lacks are filled in."""
        missing = self.max_length - x.shape[-2]
        if missing:
            x = nn.functional.pad(x, (0, 0, 0, missing), value=fill)
        return x.unflatten(-2, (self.projection_dim, self.window))

    def _counts(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor:
        """Real tokens in each window, (1 or B, K)."""
        if mask is None:
            mask = torch.ones(1, length, dtype=torch.bool, device=device)
        return self._windows(mask[..., None].long(), 0).sum((-2, -1))

    def extra_repr(self) -> str:
        return f"{self.kind}, n={self.max_length}, k={self.projection_dim}"


def project(E: Tensor, x: Tensor) -> Tensor:
    """E x: (K, N) times (B, N, C) or (B, H, N, C), or a matrix a head, (H, K, N) times (B, H, N, C) → (..., K, C).

    `E @ x` copies x, or E for each row of the batch. Written so that nothing is copied, forward and backward take 0.4 to 1.0 of
    its time (CPU, batches of 1 to 32, N = 128 to 8,192; 0.5 at 4 × 512 × 768, k = 128).
    """
    if E.dim() == 3:
        return torch.einsum("hkn,bhnc->bhkc", E, x)
    if x.dim() == 4:  # one E for all heads: their widths side by side
        return project(E, x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return torch.bmm(E.expand(len(x), -1, -1), x)


def check_projection(kind: str, max_length: int, projection_dim: int, init: str) -> None:
    """Raises ValueError, naming the setting, for a projection that cannot be made."""
    if kind not in PROJECTIONS:
        raise ValueError(f"projection is {kind!r}; allowed: {', '.join(PROJECTIONS)}")
    if init not in PROJECTION_INITS:
        raise ValueError(f"projection_init is {init!r}; allowed: {', '.join(PROJECTION_INITS)}")
    if kind == "conv" and init not in WINDOW_INITS:
        raise ValueError(f"projection_init is {init!r}; allowed with projection='conv': {', '.join(WINDOW_INITS)}")
    if not 1 <= projection_dim <= max_length:
        raise ValueError(f"projection_dim (k) is {projection_dim}; allowed: 1 to max_length = {max_length}")
    if kind in ("conv", "mean", "max") and max_length % projection_dim:
        raise ValueError(
            f"projection_dim (k) is {projection_dim}, but projection={kind!r} works on windows of max_length/k tokens: "
            f"allowed are the divisors of max_length = {max_length}"
        )
