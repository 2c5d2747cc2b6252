"""Models made from models: a Transformer's weights in a Linformer, and a longer n.

Shapes: N tokens, n = max_length, K = k projected slots, H heads, L layers, D hidden width, S rows of text.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_linformer.model import ATTENTIONS, PROJECTIONS, Encoder, EncoderConfig, MaskedLanguageModel, Projection
from lit_linformer.model.projections import stretched
from lit_linformer.utils.errors import SettingError


def to_linformer(
    net: MaskedLanguageModel, start: str, rows: Tensor | None, attention: str = EncoderConfig.attention, **settings: Any
) -> MaskedLanguageModel:
    """A model with another attention and a Transformer's weights; what the Transformer lacks, such as E and F, is new.

    Args:
        net: the Transformer, with full attention.
        start: how E and F are initialised: one of EncoderConfig's projection_init, or of FILLS, which use the Transformer.
        rows: for FILLS: token ids (S, n) without padding, from which the attention maps are computed.
        attention, settings: EncoderConfig's.

    Raises ValueError for settings with which no encoder can be made, or for which the weights do not fit.
    """
    init = EncoderConfig.projection_init if start in FILLS else start
    if net.encoder.config.position == "rotary":
        settings = {"order": "project_first", **settings}  # so that each key is rotated before E mixes it
    config = replace(net.encoder.config, attention=attention, projection_init=init, **settings)
    if start in FILLS and not config.attention_kind.slots:
        takes = ", ".join(name for name, kind in ATTENTIONS.items() if kind.slots)
        raise SettingError("projection_init", start, f"with attention={takes}", more=f" with attention={attention!r}")
    if start in FILLS and PROJECTIONS.find(config.projection).fill is Projection.fill:
        takes = ", ".join(name for name, kind in PROJECTIONS.items() if kind.fill is not Projection.fill)
        raise SettingError("projection_init", start, f"with projection={takes}", more=f" with projection={config.projection!r}")
    made = MaskedLanguageModel(config)
    own, theirs = made.state_dict(), net.state_dict()
    if lacking := [name for name, tensor in theirs.items() if name not in own or own[name].shape != tensor.shape]:
        allowed = "one with query, key, value and out as Attention has them"
        more = f", which has no {lacking[0].removeprefix('encoder.')} like a Transformer's"
        raise SettingError("attention", attention, allowed, more=more)
    made.load_state_dict(own | theirs)
    if start in FILLS:
        FILLS[start](net.encoder, made.encoder, rows)
    return made.eval()


@torch.inference_mode()
def right_singular_vectors(encoder: Encoder, made: Encoder, rows: Tensor) -> None:
    """Sets E and F of ``made`` to the K strongest right singular vectors of a Transformer's attention maps for rows (S, n).

    The best projection Vᵀ V of rank K for P ≈ P Vᵀ V (paper, theorem 1), over all maps that share an E: a head's, a layer's,
    or all. Each vector's sign and length make it comparable with a mean over tokens: Σ ≥ 0, Σ|·| = 1.
    """
    total = torch.zeros(())
    for layer in range(len(made.layers)):
        gram = _gram(encoder, layer, rows)  # (H, n, n)
        if made.E is not None:
            total = total + gram.sum(0)
            continue
        for projection in (made.layers[layer].attention.E, made.layers[layer].attention.F):
            if projection is not None:
                of_heads = gram if projection.num_heads is not None else gram.sum(0)
                projection.fill(_strongest(of_heads, projection.projection_dim))
    if made.E is not None:
        made.E.fill(_strongest(total, made.E.projection_dim))


FILLS = {"svd": right_singular_vectors}


def _gram(encoder: Encoder, layer: int, rows: Tensor) -> Tensor:
    """Σ Pᵀ P over the rows, (H, n, n) float64, of one layer's maps P: one layer at a time, since they are large."""
    total = torch.zeros(())
    for batch in rows.split(4):
        maps = encoder(batch, need_weights=[layer])[1][layer].double()  # (B, H, n, n)
        total = total + (maps.transpose(-2, -1) @ maps).sum(0)
    return total


def _strongest(gram: Tensor, k: int) -> Tensor:
    """The k strongest eigenvectors of Σ Pᵀ P, (..., n, n) → (..., k, n) float32, the strongest first, scaled as above."""
    vectors = torch.linalg.eigh(gram).eigenvectors[..., -k:].transpose(-2, -1).flip(-2)
    sums = vectors.sum(-1, keepdim=True)
    return (vectors * torch.where(sums < 0, -1.0, 1.0) / vectors.abs().sum(-1, keepdim=True)).float()


def to_longer(net: MaskedLanguageModel, max_length: int, positions: str, projections: str) -> MaskedLanguageModel:
    """The same model for longer inputs.

    Args:
        net: a Transformer, a Linformer, or with another attention.
        max_length: the new n.
        positions: how position embeddings, if any, grow from n to the new n rows: interpolate (the old ones are spread, with
            new ones in between) | repeat (the old ones, again and again).
        projections: how E and F grow: interpolate (the same K slots, each over a longer stretch: columns are spread, and
            divided so that row sums stay) | repeat (the same slots again for each block of n tokens: K grows with n).

    Raises ValueError for an n that is not longer or, if something is repeated, not a multiple of the old one.
    """
    config = net.encoder.config
    before = config.max_length
    if max_length <= before:
        raise SettingError("max_length", max_length, f"more than the model's {before} (shorter inputs need no conversion)")
    if config.of_images:
        raise SettingError("max_length", max_length, f"{before}, since it reads images of that size")
    embedded = net.encoder.positions is not None  # rotary positions have no table
    projected = any(isinstance(module, Projection) for module in net.modules())
    repeats = (embedded and positions == "repeat") or (projected and projections == "repeat")
    if max_length % before and repeats:
        raise SettingError("max_length", max_length, f"a multiple of the model's {before}", when="where something is repeated")
    changed = config.attention_kind.lengthened(config, max_length, projections)
    made = MaskedLanguageModel(replace(config, max_length=max_length, **changed))
    weights, old = net.state_dict(), dict(net.named_modules())
    if embedded:
        table = weights["encoder.positions.weight"]
        longer = table.repeat(max_length // before, 1) if positions == "repeat" else stretched(table.T, max_length).T
        weights["encoder.positions.weight"] = longer
    for name, module in made.named_modules():
        if isinstance(module, Projection):
            module.lengthen(old[name], projections)
            weights |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    for name, tensor in made.state_dict().items():
        if tensor.shape != weights[name].shape:
            allowed = "one whose weights do not, or belong to a Projection with `lengthen`"
            more = f", whose weight {name.rpartition('attention.')[2]} depends on n"
            raise SettingError("attention", config.attention, allowed, more=more)
    made.load_state_dict(weights)
    return made.eval()
