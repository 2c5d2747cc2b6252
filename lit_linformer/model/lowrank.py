"""How low the rank of attention is (paper, section 3 and figure 1), and what an approximation of rank k loses.

Shapes: S sentences, B of them at a time, N tokens of a sentence (all real: only full rows are measured), K columns of a
map (N for the Transformer, k for the Linformer), H heads, d head width, L layers measured, R = min(N, K) singular values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from .attention import attend
from .encoder import Encoder, EncoderConfig
from .errors import SettingError
from .starts import initial_matrix

SEED = 20200608  # of the random projection: one matrix for all sentences, layers and heads
MULTIPLE = 8  # a suggested k is rounded up to a multiple of this, which suits tensor cores
# Approximations of softmax(q kᵀ/√d) v, at rank k.
ERRORS = {
    "svd": "truncated SVD: P_k V, the best P of rank k (it sees P)",
    "random": "P Rᵀ R V with a fixed R ~ N(0, 1/k), the theorems' object (it sees P)",
    "random_linformer": "softmax(q (R K)ᵀ/√d) R V with the same R",
    "block_mean": "softmax(q (E K)ᵀ/√d) E V with E's start, block means",
    "learned": "the layer's own: of a Linformer its learned E and F",
}


@dataclass
class Measured:
    """Means over the sentences.

    Args:
        layers: their indices, L of them, from 0.
        length: N.
        columns: K of each layer.
        sentences: S.
        curves: (L, H, R) float64: entry j - 1 is Σ_{i ≤ j} σ_i / Σ σ_i, normalised for each sentence, then averaged. If layers
            have different k, R is the largest, and shorter curves continue at 1.
        ranks: the rank k of the approximations in each layer; empty if no errors were asked for.
        errors: {name in ERRORS: (L, H) float64}: ‖approximation − P V‖_F / ‖P V‖_F.
    """

    layers: list[int]
    length: int
    columns: list[int]
    sentences: int
    curves: Tensor
    ranks: list[int]
    errors: dict[str, Tensor]

    def at(self, index: int) -> Tensor:
        """(L, H): the cumulative share at a singular value, counted from 1; 1 beyond the last one."""
        return self.curves[..., min(index, self.curves.shape[-1]) - 1]

    def suggested(self, threshold: float) -> list[int]:
        """The smallest k of each layer whose share (mean over heads) reaches the threshold, rounded up to a multiple of 8."""
        held = rank_holding(self.curves.mean(1), threshold)
        return [min(self.length, -(-k // MULTIPLE) * MULTIPLE) for k in held.tolist()]


def cumulative(values: Tensor) -> Tensor:
    """Singular values (..., R), the largest first → their normalised cumulative sums (..., R), which end at 1."""
    sums = values.cumsum(-1)
    return sums / sums[..., -1:]


def rank_holding(curves: Tensor, threshold: float) -> Tensor:
    """The smallest j whose cumulative share (..., R) reaches the threshold: (...) int64 from 1; R for a curve of NaN."""
    short = ~(curves >= threshold - 1e-12)  # 1e-12: a sum of shares may end at 1 - 2e-16
    return (short.sum(-1) + 1).clamp(max=curves.shape[-1])


def approximations(q: Tensor, k: Tensor, v: Tensor, svd: tuple[Tensor, Tensor, Tensor], rank: int) -> dict[str, Tensor]:
    """Approximations of P v, each (B, H, N, d).

    Args:
        q, k, v: queries, keys, values, (B, H, N, d).
        svd: torch's singular value decomposition of P = softmax(q kᵀ/√d): (B, H, N, N), (B, H, N), (B, H, N, N).
        rank: k, up to N.
    """
    U, values, W = svd
    length, P = values.shape[-1], (U * values[..., None, :]) @ W
    R = torch.randn(rank, length, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64) / math.sqrt(rank)
    R, E = R.to(v), initial_matrix("block_mean", length, rank).to(v)
    return {
        "svd": (U[..., :rank] * values[..., None, :rank]) @ (W[..., :rank, :] @ v),
        "random": (P @ R.T) @ (R @ v),
        "random_linformer": attend(q, R @ k, R @ v, None, 0.0, False)[0],
        "block_mean": attend(q, E @ k, E @ v, None, 0.0, False)[0],
    }


@torch.no_grad()
def measure(
    encoder: Encoder,
    rows: Tensor,
    layers: list[int],
    rank: int | None = None,
    dtype: torch.dtype | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda summed: summed,
    progress: Callable[[int], Any] = lambda done: None,
) -> Measured:
    """Runs sentences through an encoder in eval mode and measures its attention.

    Args:
        encoder: in eval mode, with any attention that takes `need_weights`, whose maps are measured.
        rows: token ids (S, N) int64, without padding.
        layers: which layers, from 0.
        rank: rank k of the approximations for a Transformer; a model with a projection_dim uses its own. None: no errors.
        dtype: for the maps and all computations on them; None: float64 on a CPU, where it costs hardly more, else float32.
            Apple's GPUs only run the encoder, since torch decomposes wrongly on them, or not at all (pytorch/pytorch#196112).
        reduce: sums a tensor over processes, each of which has other sentences.
        progress: called with the number of sentences done.

    Raises:
        SettingError: errors are asked for, and an attention of the user's own has no queries or keys.
    """
    assert not encoder.training
    config, home = encoder.config, encoder.tokens.weight.device
    device = torch.device("cpu") if home.type == "mps" else home  # of the maps
    dtype = dtype or (torch.float64 if device.type == "cpu" else torch.float32)
    length = rows.shape[1]
    kind = config.attention_kind
    columns = [kind.columns(config, layer, length) for layer in layers]
    # k, not the columns: lookup's are slots and all N tokens, and at rank N nothing is lost.
    has_k = "projection_dim" in kind.settings  # slots, luna's latents, nystrom's landmarks
    ranks = [min(length, config.projection_dims[layer] if has_k else rank) for layer in layers] if rank is not None else []
    takes = signature(kind.compress).parameters  # an inherited compress may not take what layers hand on
    names = [name for name in ERRORS if not kind.exact or name != "learned"] if ranks else []
    shape = (len(layers), config.num_heads)
    curves = torch.zeros(*shape, min(length, max(columns)), dtype=torch.float64, device=device)
    errors = torch.zeros(len(names), *shape, dtype=torch.float64, device=device)

    def here(part: Tensor) -> Tensor:
        return part.to(device).to(dtype)  # in two steps: Apple's GPUs have no float64

    def observe(place: int, attention: torch.nn.Module, args: tuple, kwargs: dict, _: Any) -> None:
        x = args[0]
        maps = here(attention.forward(x, None, **{**kwargs, "need_weights": True})[1])  # .forward: without this hook
        if not maps.isfinite().all():  # a model that has diverged
            curves[place] += math.nan
            errors[:, place] += math.nan
            return
        if ranks:
            try:
                q, k, v = (here(part) for part in attention.heads(x))
            except AttributeError as error:  # an attention of the user's own without W_Q or W_K
                allowed = "one that has queries and keys, or a `heads` of its own"
                raise SettingError("attention", config.attention, allowed, more=f", but {error}") from error
            exact, P = attend(q, k, v, None, 0.0, True)
            svd = torch.linalg.svd(P, full_matrices=False)
            stand_ins = approximations(q, k, v, svd, ranks[place])
            if not kind.exact:
                given = {name: kwargs[name] for name in kind.handed_on if name in kwargs and name in takes}
                stand_ins["learned"] = maps @ here(attention.compress(x, **encoder.shared, **given)[1])
            for name, row in zip(names, errors, strict=True):
                row[place] += (matrix_norm(stand_ins[name] - exact) / matrix_norm(exact)).sum(0)  # Frobenius
        values = svd[1] if ranks and kind.exact else torch.linalg.svdvals(maps)
        curves[place, :, : values.shape[-1]] += cumulative(values).sum(0)
        curves[place, :, values.shape[-1] :] += len(x)

    handles = []
    try:
        for place, layer in enumerate(layers):
            attention = encoder.layers[layer].attention
            handles.append(attention.register_forward_hook(partial(observe, place), with_kwargs=True))
        # As many rows at once that maps, singular vectors and copies take some 100 MB on a CPU, 1 GB on a GPU.
        most = 2 ** (23 if device.type == "cpu" else 26) // (config.num_heads * length * (length if ranks else max(columns)))
        done = 0
        for batch in rows.split(max(1, most)) if len(rows) else ():  # a process may have no rows
            encoder(batch.to(home))
            done += len(batch)
            progress(done)
    finally:
        for handle in handles:
            handle.remove()
    total = reduce(torch.tensor(float(len(rows)), dtype=torch.float64, device=device))
    curves, errors = ((reduce(summed) / total).cpu() for summed in (curves, errors))
    by_name = dict(zip(names, errors, strict=True))
    return Measured(list(layers), length, columns, int(total), curves, ranks, by_name)


def check_maps(encoder: Encoder) -> None:
    """Raises ValueError for an attention that returns no maps to measure."""
    if not all(layer.gives_maps for layer in encoder.layers):
        raise SettingError(
            "attention", encoder.config.attention, "one that takes need_weights", more=", whose forward gives no maps"
        )


def check_layers(setting: str, layers: list[int] | None, config: EncoderConfig) -> list[int]:
    """The given layers in order, all for None; ValueError for one that the encoder does not have."""
    wanted = sorted(set(range(config.num_layers) if layers is None else layers))
    if not wanted or wanted[0] < 0 or wanted[-1] >= config.num_layers:
        raise SettingError(setting, layers, f"layers from 0 to {config.num_layers - 1}")
    return wanted


def check_index(setting: str, index: int | None, config: EncoderConfig, length: int) -> int:
    """The given index, or a quarter of the singular values (the paper's 128 of 512); ValueError beyond n."""
    if index is not None and not 1 <= index <= length:
        raise SettingError(setting, index, f"1 to n = {length}, the tokens of a row")
    # A Linformer's map has only k singular values: at k the share is 1 by definition.
    most = min(length, *(config.attention_kind.columns(config, layer, length) for layer in range(config.num_layers)))
    return index or max(1, most // 4)
