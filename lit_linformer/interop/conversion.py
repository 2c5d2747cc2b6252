"""Models made of models: a Transformer's weights in a Linformer, and a longer n.

Shapes: N tokens, n = max_length, K = k projected slots, H heads, L layers, D hidden width, S rows of text.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from lit_linformer.model import Encoder, EncoderConfig, MaskedLanguageModel


def to_linformer(
    net: MaskedLanguageModel, projection_dim: int | list[int], sharing: str, projection: str, start: str, rows: Tensor | None
) -> MaskedLanguageModel:
    """A Linformer with a Transformer's weights and new E and F.

    Args:
        net: of attention="full".
        projection_dim, sharing, projection: as EncoderConfig's.
        start: of E and F: one of EncoderConfig's projection_init, or svd, see ``right_singular_vectors``.
        rows: for svd: token ids (S, n) without pads, what the attention maps are of.

    Raises ValueError for settings that no encoder has.
    """
    config = replace(
        net.encoder.config,
        attention="linformer",
        projection_dim=projection_dim,
        sharing=sharing,
        projection=projection,
        projection_init="block_mean" if start == "svd" else start,
    )
    if start == "svd" and projection != "linear":
        raise ValueError(f"projection_init is 'svd' with projection={projection!r}; allowed: with projection=linear")
    made = MaskedLanguageModel(config)
    own = made.state_dict()
    if start == "svd":
        own |= dict(right_singular_vectors(net.encoder, config, rows))
    made.load_state_dict(own | net.state_dict())
    return made.eval()


@torch.inference_mode()
def right_singular_vectors(encoder: Encoder, config: EncoderConfig, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """E and F by name: the K strongest right singular vectors of the attention maps of all rows, one above the other.

    The best projection Vᵀ V of rank K for P ≈ P Vᵀ V (paper, theorem 1), over those maps that share an E: a head's, a
    layer's, or all. Each vector has a sign and a length so that it is comparable with a mean over tokens: Σ ≥ 0, Σ|·| = 1.

    Args:
        encoder: a Transformer's.
        config: the Linformer's.
        rows: (S, n) int64, full rows.
    """
    shared = torch.zeros(())
    for layer, k in enumerate(config.projection_dims):
        gram = _gram(encoder, layer, rows)  # (H, n, n)
        if config.sharing == "layerwise":
            shared = shared + gram.sum(0)
            if layer == config.num_layers - 1:
                yield "encoder.E.weight", _strongest(shared, k)
            continue
        E = _strongest(gram if config.sharing == "none" else gram.sum(0), k)
        for name in ("E", "F") if config.sharing in ("none", "headwise") else ("E",):
            yield f"encoder.layers.{layer}.attention.{name}.weight", E


def _gram(encoder: Encoder, layer: int, rows: Tensor) -> Tensor:
    """Σ Pᵀ P over the rows, (H, n, n) float64, of one layer's maps P: one layer at a time, for they are large."""
    total = torch.zeros(())
    for batch in rows.split(4):
        maps = encoder(batch, need_weights=[layer])[1][layer].double()  # (B, H, n, n)
        total = total + (maps.transpose(-2, -1) @ maps).sum(0)
    return total


def _strongest(gram: Tensor, k: int) -> Tensor:
    """(..., n, n) → (..., k, n) float32, the strongest first."""
    vectors = torch.linalg.eigh(gram).eigenvectors[..., -k:].transpose(-2, -1).flip(-2)
    sums = vectors.sum(-1, keepdim=True)
    return (vectors * torch.where(sums < 0, -1.0, 1.0) / vectors.abs().sum(-1, keepdim=True)).float()


def to_longer(net: MaskedLanguageModel, max_length: int, positions: str, projections: str) -> MaskedLanguageModel:
    """The same model for longer inputs.

    Args:
        net: of either kind.
        max_length: the new n.
        positions: how their embeddings get from n rows to the new n: interpolate (between neighbours, so that the old ones are
            spread) | repeat (the old ones, again and again).
        projections: E and F: interpolate (the same K slots, each over a longer stretch: their columns are spread, and divided
            so that row sums stay) | repeat (the same slots again for each block of n tokens: K grows as n does).

    Raises ValueError for an n that is not longer, or no multiple where something is repeated.
    """
    config = net.encoder.config
    before = config.max_length
    if max_length <= before:
        raise ValueError(
            f"max_length is {max_length}; allowed: more than the model's {before} (shorter inputs need no conversion)"
        )
    linformer = config.attention == "linformer"
    if max_length % before and (positions == "repeat" or (linformer and projections == "repeat")):
        raise ValueError(f"max_length is {max_length}; allowed where something is repeated: a multiple of the model's {before}")
    times, dims = max_length // before, config.projection_dim
    if linformer and projections == "repeat":
        dims = dims * times if isinstance(dims, int) else [k * times for k in dims]
    made = MaskedLanguageModel(replace(config, max_length=max_length, projection_dim=dims))
    weights = net.state_dict()
    for name, tensor in weights.items():
        if name == "encoder.positions.weight":
            weights[name] = tensor.repeat(times, 1) if positions == "repeat" else _spread(tensor.T, max_length).T
        elif name.endswith((".E.weight", ".F.weight")):
            weights[name] = _longer(tensor, config.projection, max_length / before, max_length, projections)
    made.load_state_dict(weights)
    return made.eval()


def _longer(weight: Tensor, kind: str, factor: float, max_length: int, how: str) -> Tensor:
    """E (…, K, n), or a convolution's kernels (…, n/K, C), for the new n."""
    if kind == "conv":  # of the same width where slots are repeated
        if how == "repeat":
            return weight
        width = round(weight.shape[-2] * factor)
        return _spread(weight.transpose(-2, -1), width).transpose(-2, -1) / factor
    if how == "interpolate":
        return _spread(weight, max_length) / factor
    return torch.kron(torch.eye(round(factor)).to(weight), weight)  # the same block again along the diagonal


def _spread(x: Tensor, width: int) -> Tensor:
    """(..., N) → (..., width), linear between neighbours."""
    flat = functional.interpolate(x.reshape(-1, 1, x.shape[-1]), size=width, mode="linear", align_corners=False)
    return flat.reshape(*x.shape[:-1], width)
