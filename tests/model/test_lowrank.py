"""Singular values and approximations of attention, compared with numpy, with theory, and with the model's own maps."""

import math

import numpy as np
import pytest
import torch
from torch.linalg import matrix_norm

from lit_linformer.model import Attention, Encoder, EncoderConfig
from lit_linformer.model.attention import attend, merge_heads
from lit_linformer.model.lowrank import ERRORS, Measured, approximations, check_index, cumulative, measure, rank_holding
from tests.model.mechanisms import MECHANISMS

SHAPE = {
    "vocab_size": 50,
    "max_length": 24,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.5,  # as in a trained model: at 0.02 attention is uniform and has rank one
}
MODELS = {
    "transformer": {"attention": "full"},
    "transformer, convolution, pre-norm": {"attention": "full", "local_width": 3, "norm": "pre"},
    "linformer": {"projection_dim": 8},
    "a k for each layer": {"projection_dim": [8, 6, 4], "sharing": "headwise", "norm": "pre", "projection_noise": 0.3},
    "none, convolution": {"projection_dim": 8, "sharing": "none", "local_width": 3, "projection_noise": 0.3},
    "project first": {"projection_dim": 8, "order": "project_first", "sharing": "key-value"},
    "mean": {"projection_dim": 8, "projection": "mean", "mass_bias": True},
    **{name: {"projection_dim": 8, **settings} for name, settings in MECHANISMS.items()},
    "lookup": {"projection_dim": 8, "attention": "lookup", "attention_options": {"chunk": 4}},
}


def build(**settings):
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SHAPE | settings)).double().eval()
    for layer in encoder.layers:
        for linear in (layer.attention.query, getattr(layer.attention, "key", layer.attention.value), layer.attention.value):
            torch.nn.init.normal_(linear.bias)  # so that it matters whether compression is before or after
    return encoder


def sentences(length=24, count=5):
    return torch.randint(0, 50, (count, length), generator=torch.Generator().manual_seed(1))


def attention_inputs(length=24):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("length", [24, 16], ids=["n", "fewer than n"])
def test_curves_are_numpys_of_the_models_own_maps(settings, length):
    encoder, rows = build(**settings), sentences(length)
    _, maps = encoder(rows, need_weights=True)
    found = measure(encoder, rows, [0, 2])
    assert found.curves.dtype == torch.float64 and found.sentences == 5 and found.length == length
    for place, layer in enumerate((0, 2)):
        P = maps[layer].detach().numpy()
        assert np.allclose(P.sum(-1), 1, atol=1e-12) or settings["attention"] == "nystrom"  # its inverse is approximate
        values = np.linalg.svd(P, compute_uv=False)  # (S, H, R)
        expected = (values.cumsum(-1) / values.sum(-1, keepdims=True)).mean(0)
        curve = found.curves[place].numpy()
        assert np.abs(curve[:, : expected.shape[-1]] - expected).max() < 1e-10
        assert (curve[:, expected.shape[-1] :] == 1).all() and np.allclose(curve[:, -1], 1, atol=1e-12)
        assert (np.diff(curve) >= -1e-12).all()
        assert found.columns[place] == P.shape[-1]


def test_each_sentence_is_normalised_before_the_mean():
    values = torch.tensor([[8.0, 2.0], [0.6, 0.4]])  # the first would dominate a pooled sum
    assert cumulative(values).mean(0).tolist() == pytest.approx([0.7, 1.0])


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_matrix_of_rank_r_gives_r(rank):
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(4, 20, rank, generator=generator, dtype=torch.float64)
    P = factors @ torch.rand(4, rank, 20, generator=generator, dtype=torch.float64)
    curves = cumulative(torch.linalg.svdvals(P))
    assert rank_holding(curves, 1.0).tolist() == [rank] * 4


def test_rank_holding():
    curve = torch.tensor([0.5, 0.8, 0.9, 1.0])
    held = [int(rank_holding(curve, share)) for share in (0.1, 0.5, 0.51, 0.9, 0.95, 1.0)]
    assert held == [1, 1, 2, 3, 4, 4]
    assert int(rank_holding(curve * math.nan, 0.9)) == 4
    even = Measured([0], 12, [12], 1, cumulative(torch.ones(1, 2, 12)), [], {})
    assert [even.suggested(share) for share in (0.5, 0.7, 1.0)] == [[8], [12], [12]]  # up to a multiple of 8, but not beyond n


def test_index_is_a_quarter_of_the_fewest_singular_values():
    layers = EncoderConfig(max_length=64, num_layers=2, projection_dim=[16, 32], sharing="headwise")
    assert [check_index("index", given, layers, 64) for given in (None, 20)] == [4, 20]
    assert check_index("index", None, EncoderConfig(max_length=64, num_layers=2, attention="full"), 32) == 8


def test_truncated_svd_is_eckart_and_youngs_and_none_is_better():
    """With the identity as V, every stand-in is itself a matrix of rank k that approximates P."""
    q, k, _ = attention_inputs()
    identity = torch.eye(24, dtype=torch.float64).expand(2, 2, 24, 24)
    _, P = attend(q, k, identity, None, 0.0, True)
    svd = torch.linalg.svd(P, full_matrices=False)
    for rank in (1, 6, 23):
        found = approximations(q, k, identity, svd, rank)
        assert list(found) == [name for name in ERRORS if name != "learned"]
        errors = {name: matrix_norm(stand_in - P) for name, stand_in in found.items()}
        tail = torch.linalg.svdvals(P)[..., rank:].square().sum(-1).sqrt()
        assert torch.allclose(errors["svd"], tail, atol=1e-12)
        assert all((errors["svd"] <= error + 1e-12).all() for error in errors.values())
        assert all(torch.linalg.matrix_rank(stand_in).max() <= rank for stand_in in found.values())


def test_every_stand_in_is_exact_where_it_has_to_be():
    q, k, v = attention_inputs()
    exact, P = attend(q, k, v, None, 0.0, True)
    found = approximations(q, k, v, torch.linalg.svd(P, full_matrices=False), 24)
    assert torch.allclose(found["svd"], exact, atol=1e-12)
    assert torch.allclose(found["block_mean"], exact, atol=1e-12)  # E is the identity
    # Keys and values that are constant within each window lose nothing by averaging over it.
    k, v = (x[:, :, ::3].repeat_interleave(3, 2) for x in (k, v))
    exact, P = attend(q, k, v, None, 0.0, True)
    found = approximations(q, k, v, torch.linalg.svd(P, full_matrices=False), 8)
    assert torch.allclose(found["block_mean"], exact, atol=1e-7)  # a third is initialised in float32


def test_random_projection_is_the_theorems():
    """E[Rᵀ R] = 1, so the error falls as 1/√k: to an eighth from k = 4 to k = 256."""
    q, k, v = attention_inputs(length=256)
    exact, P = attend(q, k, v, None, 0.0, True)
    svd = torch.linalg.svd(P, full_matrices=False)
    errors = [matrix_norm(approximations(q, k, v, svd, rank)["random"] - exact).mean().item() for rank in (4, 256)]
    assert errors[1] == pytest.approx(errors[0] / 8, rel=0.3)


@pytest.mark.parametrize("settings", list(MODELS.values())[2:], ids=list(MODELS)[2:])
def test_learned_error_is_that_of_the_layers_own_output(settings):
    encoder, rows = build(**settings), sentences()
    layer = encoder.layers[1].attention
    seen = {}
    hooks = [layer.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))]
    hooks += [layer.out.register_forward_pre_hook(lambda _, args: seen.update(context=args[0]))]
    encoder(rows)
    for hook in hooks:
        hook.remove()
    x = seen["x"]
    context = seen["context"] - (0 if layer.local is None else layer.local(x))
    q, k, v = layer.heads(x)
    exact = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    own = context.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    assert torch.allclose(merge_heads(own), context)
    expected = (matrix_norm(own - exact) / matrix_norm(exact)).mean(0)
    found = measure(encoder, rows, [1], rank=3)  # where there is a k, it is the rank
    assert torch.allclose(found.errors["learned"][0], expected, atol=1e-10)
    has_none = encoder.config.attention in ("full", "sparse", "lsh")
    assert found.ranks == [3 if has_none else encoder.config.projection_dims[1]]


def test_identity_for_E_loses_nothing():
    encoder = build(projection_dim=24, order="project_first", sharing="key-value")  # block means of one token each
    found = measure(encoder, sentences(), [0, 1, 2], rank=24)
    assert found.errors["learned"].max() < 1e-12


def test_batches_devices_and_processes_do_not_matter():
    encoder, rows = build(attention="full"), sentences(count=6)
    whole = measure(encoder, rows, [0, 1], rank=6)
    parts = []
    for rank in range(2):
        parts.append([])
        measure(encoder, rows[rank::2], [0, 1], rank=6, reduce=lambda summed, to=parts[-1]: to.append(summed) or summed)
    total, curves, errors = (a + b for a, b in zip(*parts, strict=True))
    assert total == 6 and torch.allclose(curves / 6, whole.curves, atol=1e-12)
    assert torch.allclose(errors / 6, torch.stack(list(whole.errors.values())), atol=1e-12)
    empty = measure(encoder, rows[:0], [0], reduce=lambda summed: summed + 1)  # a rank (process) without sentences
    assert empty.sentences == 1 and (empty.curves == 1).all()
    for attention in ("lookup", "coarse"):
        assert (
            measure(build(attention=attention, projection_dim=8), rows[:0], [0], reduce=lambda summed: summed + 1).sentences
            == 1
        )
    single = measure(encoder.float(), rows, [0, 1], rank=6, dtype=torch.float32)
    assert torch.allclose(single.curves, whole.curves, atol=1e-4)


def test_hooks_are_gone_and_weights_untouched():
    encoder = build(attention="full")
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(IndexError):
        measure(encoder, torch.full((1, 24), 1000), [0])
    assert not any(layer.attention._forward_hooks for layer in encoder.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_diverged_model_gives_nan_and_no_crash():
    encoder = build(attention="full")
    encoder.layers[1].attention.query.weight.data.fill_(math.nan)
    found = measure(encoder, sentences(), [0, 1], rank=6)
    assert found.curves[0].isfinite().all() and found.curves[1].isnan().all() and found.errors["svd"][1].isnan().all()
    assert found.suggested(0.9)[1] == 24


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("settings", [MODELS["transformer"], MODELS["a k for each layer"]], ids=["transformer", "linformer"])
def test_suggestion_is_a_config(settings, share):
    dims = measure(build(**settings), sentences(), [0, 1, 2]).suggested(share)
    assert all(dim % 8 == 0 and 8 <= dim <= 24 for dim in dims)
    for sharing in ("none", "headwise", "key-value"):
        config = EncoderConfig(**SHAPE, projection_dim=dims, sharing=sharing)
        assert config.projection_dims == dims
        Encoder(config)(sentences())


class HandsOn(Attention):
    """Attention that passes its output to the next layer, with the ``compress`` that all attention has."""

    handed_on = ("before",)

    def forward(self, x, attention_mask=None, need_weights=False, before=0.0):
        context, maps = self.attend(*self.heads(x), None, need_weights)
        out = self.output(context, x, attention_mask) + before
        return out, maps, {"before": out}


class Keyless(Attention):
    """Its maps are weights, as in a Synthesizer."""

    def __init__(self, **shape):
        super().__init__(**shape)
        del self.key
        self.scores = torch.nn.Parameter(torch.randn(self.num_heads, self.max_length, self.max_length))

    def forward(self, x, attention_mask=None, need_weights=False):
        return x, self.scores.softmax(-1).expand(len(x), -1, -1, -1)


def test_attention_of_ones_own_without_keys_has_a_spectrum_but_no_errors():
    encoder = Encoder(EncoderConfig(**SHAPE, attention=f"{__name__}.Keyless")).eval()
    assert measure(encoder, sentences(), [0, 1, 2]).curves.isfinite().all()
    with pytest.raises(ValueError, match=r"Keyless', but .* no attribute 'key'; allowed: one that has queries and keys, or a"):
        measure(encoder, sentences(), [0, 1, 2], rank=6)


def test_attention_of_ones_own_that_hands_something_on():
    found = measure(build(attention=f"{__name__}.HandsOn"), sentences(), [0, 1, 2], rank=6)
    assert found.curves.isfinite().all() and found.errors["learned"].max() < 1e-9
