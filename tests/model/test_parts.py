"""Optional parts of the encoder: rotary positions and what they mean for slots, norms, feed-forward, biases."""

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig, LinformerAttention, MaskedLanguageModel, SelfAttention, count_parameters
from lit_linformer.model.linformer import SHARINGS
from lit_linformer.model.parts import ImagePositions, exporting, rotated
from lit_linformer.model.projection import make_projection
from tests.model.mechanisms import MECHANISMS, MODERN, MODERNS

N, D, H, K = 12, 16, 4, 3
BASE = 100.0


def config(**settings):
    shape = {"vocab_size": 50, "max_length": N, "hidden_size": D, "num_layers": 2, "num_heads": H, "intermediate_size": 48}
    return EncoderConfig(**{**shape, "projection_dim": K, **settings})


def test_each_pair_of_channels_is_turned_as_a_complex_number():
    x = torch.randn(2, N, D, dtype=torch.float64)
    first, second = x.unflatten(-1, (H, 2, -1)).unbind(-2)
    places, rate = torch.arange(N, dtype=torch.float64), BASE ** -torch.tensor([0.0, 0.5], dtype=torch.float64)
    turned = torch.complex(first, second) * torch.exp(1j * places[:, None, None] * rate)
    expected = torch.stack([turned.real, turned.imag], -2).flatten(-3)
    torch.testing.assert_close(rotated(x, H, BASE), expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(rotated(x, H, BASE)[:, 0], x[:, 0]) and not torch.allclose(rotated(x, H, BASE)[:, 1], x[:, 1])


def test_angles_are_exact_in_half_precision():
    """bfloat16 cannot tell positions 256 and 257 apart."""
    x = torch.ones(1, 600, D, dtype=torch.bfloat16)
    torch.testing.assert_close(rotated(x, H, BASE).float(), rotated(x.float(), H, BASE), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("around", [0, 1])
def test_a_pixel_has_its_rows_embedding_and_its_columns(around):
    made = ImagePositions(16 + 2 * around, D)
    for place in range(16):
        row, column = divmod(place, 4)
        assert torch.equal(made.weight[around + place], made.rows.weight[row] + made.columns.weight[column])
    assert not around or torch.equal(made.weight[[0, -1]], made.around.weight)
    encoder = Encoder(config(position="image", max_length=18, projection_dim=4))
    assert count_parameters(encoder) == count_parameters(Encoder(config(max_length=18, projection_dim=4))) - (18 - 10) * D


def test_scores_know_only_how_far_apart_tokens_are():
    attention = SelfAttention(D, H, N, rotary_base=BASE).double()
    x = torch.randn(1, N, D, dtype=torch.float64)
    q, k, _ = attention.heads(x)
    later_q, later_k, _ = attention.heads(x[:, 5:])  # the same tokens, five positions earlier
    torch.testing.assert_close(later_q @ later_k.mT, (q @ k.mT)[..., 5:, 5:], rtol=1e-12, atol=1e-12)
    attention.rotary_base = None
    assert not torch.allclose(attention.heads(x)[0] @ attention.heads(x)[1].mT, q @ k.mT)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("projection", ["linear", "mean", "gaussian", "dynamic", "gated"])
def test_scores_of_slots_are_the_transformers_times_E(sharing, projection):
    """What rotary positions mean for slots: q_i R_i · Σ_t E_jt R_t k_t = Σ_t E_jt (q_i · R_(t-i) k_t)."""
    torch.manual_seed(0)
    slots = LinformerAttention(D, H, N, K, sharing, projection, order="project_first", rotary_base=BASE).double()
    shared = make_projection(projection, N, K, channels=D // H, hidden_size=D, init="split") if slots.E is None else None
    if shared is not None:
        shared.double()
    every = SelfAttention(D, H, N, rotary_base=BASE).double()
    every.load_state_dict({name: tensor for name, tensor in slots.state_dict().items() if name in every.state_dict()})
    x = torch.randn(1, N, D, dtype=torch.float64)
    q, k, _ = every.heads(x)
    E = slots.matrix(x, shared).double()
    torch.testing.assert_close(q @ slots.compress(x, None, shared)[0].mT, (q @ k.mT) @ E.mT, rtol=1e-11, atol=1e-11)


def test_of_one_token_a_slot_a_linformer_is_the_transformer():
    torch.manual_seed(0)
    full = Encoder(config(attention="full", **MODERN)).double().eval()
    linformer = Encoder(config(sharing="none", projection_dim=N, projection_init="strided", **MODERN)).double().eval()
    linformer.load_state_dict(full.state_dict(), strict=False)  # E is the identity
    ids = torch.randint(0, 50, (2, N))
    torch.testing.assert_close(linformer(ids), full(ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", MODERNS.values(), ids=MODERNS)
def test_places_count_under_every_attention(options):
    torch.manual_seed(0)
    encoder = Encoder(config(**{**options, "local_width": 0})).double().eval()
    for parameter in encoder.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    ids = torch.arange(N)[None] % 5
    turned = encoder(ids)
    for layer in encoder.layers:
        layer.attention.rotary_base = 9.0
    assert (encoder(ids) - turned).abs().max() > 1e-3
    assert encoder.positions is None and not any("position" in name for name in encoder.state_dict())


def test_geglu_has_as_many_parameters():
    gated, plain = (count_parameters(Encoder(config(feed_forward=kind, bias=False))) for kind in ("geglu", "gelu"))
    assert gated == plain
    layer = Encoder(config(feed_forward="geglu")).layers[0]
    assert layer.up.out_features == layer.gate.out_features == layer.down.in_features == 32  # two thirds of 48
    h = torch.randn(2, D)
    expected = torch.nn.functional.gelu(h @ layer.gate.weight.T) * (h @ layer.up.weight.T)
    torch.testing.assert_close(layer._inner(h), expected)


WITHOUT_BIASES = {"full": {"attention": "full"}, "linformer": {"sharing": "headwise"}, "long-short": MECHANISMS["long-short"]}


@pytest.mark.parametrize("options", WITHOUT_BIASES.values(), ids=WITHOUT_BIASES)
def test_without_biases_there_are_none(options):
    net = MaskedLanguageModel(config(**options, norm="pre", bias=False, head_bias=False))
    assert not [name for name in net.state_dict() if name.endswith("bias")]
    ids = torch.randint(0, 50, (2, 2))  # fewer than slots: W_K and W_V come first
    assert net(ids).shape == (2, 2, 50) and net.nll(ids, ids[:, :1] % 2, ids[:, :1]).isfinite().all()


def test_rms_norm_takes_no_mean():
    norm = Encoder(config(norm_type="rms")).embedding_norm
    x = torch.randn(3, D) + 5
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_headers_tell_the_parts():
    modern = config(**MODERN)
    assert modern.attention_kind.describe(modern).endswith(", rotary positions, GeGLU, RMSNorm, no biases")
    plain = config()
    assert plain.attention_kind.describe(plain) == "linformer, k = 3, layerwise"


@pytest.mark.parametrize("attention", ["lookup", "window", "coarse", "lsh"])
def test_a_compiled_model_is_not_taken_for_an_exported_one(attention, monkeypatch):
    """An exported program computes scores of all pairs, to serve every length. In torch 2.11, is_exporting() is also True in
    torch.compile, and with this flag in newer versions."""
    options = {"window": {"window": 4}, "coarse": {"best": 2}}.get(attention, {"chunk": 4})
    shape = {"vocab_size": 50, "max_length": 64, "hidden_size": 16, "num_heads": 2, "num_layers": 2, "intermediate_size": 24}
    encoder = Encoder(EncoderConfig(**shape, projection_dim=16, attention=attention, attention_options=options)).eval()
    ids, shapes = torch.randint(50, (2, 64)), []

    def record(graph, inputs):
        nodes = [node.meta.get("example_value") for node in graph.graph.nodes]
        shapes.extend(tuple(value.shape) for value in nodes if isinstance(value, torch.Tensor))
        return graph

    compiled = torch.compile(encoder, backend=record, fullgraph=True)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert exporting()
    found = compiled(ids)
    monkeypatch.undo()
    assert len(shapes) > 20 and not [shape for shape in shapes if shape.count(64) > 1]
    assert torch.allclose(found, encoder(ids), atol=1e-6)
