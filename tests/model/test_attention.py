"""Attention: the paper's equation in float64, both orders, masks, gradients."""

import itertools
import math

import pytest
import torch

from lit_linformer.model import LinformerAttention, SelfAttention, make_projection
from lit_linformer.model.attention import LocalConvolution, attend, log_mass
from lit_linformer.model.linformer import SHARINGS
from lit_linformer.model.projection import PROJECTIONS
from tests.model.written_out import made

B, N, D, H, K = 2, 12, 16, 4, 3
ALL = list(itertools.product(SHARINGS, PROJECTIONS, ["compress_first", "project_first"]))


def make(sharing="headwise", order="compress_first", **options):
    return made(LinformerAttention, D, H, N, K, sharing=sharing, order=order, **options)


def shared_for(sharing, kind="linear", order="compress_first", short_rows="zeros"):
    if sharing != "layerwise":
        return {}
    channels = D if order == "compress_first" else D // H
    init = "split" if kind in ("conv", "gated") else "xavier"
    shared = make_projection(kind, N, K, channels=channels, init=init, hidden_size=D, short_rows=short_rows)
    return {"shared": shared.double()}


def by_the_paper(attention, x, E, F):
    """Equation 7, one head at a time: E (H, K, N) applied to K = x W_K + b."""
    heads = []
    d = D // H
    for h in range(H):
        rows = slice(h * d, (h + 1) * d)
        q, k, v = (
            x @ linear.weight[rows].t() + linear.bias[rows] for linear in (attention.query, attention.key, attention.value)
        )
        scores = q @ (E[h] @ k).transpose(1, 2) / math.sqrt(d)
        heads.append(scores.softmax(-1) @ (F[h] @ v))
    return torch.cat(heads, -1) @ attention.out.weight.t() + attention.out.bias


@pytest.mark.parametrize("sharing", SHARINGS)
def test_project_first_is_the_papers_formula(sharing):
    attention, extra = make(sharing, "project_first"), shared_for(sharing, order="project_first")
    E = (extra.get("shared") or attention.E).weight.expand(H, K, N)
    F = (extra.get("shared") or attention.F or attention.E).weight.expand(H, K, N)
    x = torch.randn(B, N, D, dtype=torch.float64)
    torch.testing.assert_close(attention(x, **extra)[0], by_the_paper(attention, x, E, F), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharing", ["headwise", "key-value"])
def test_compress_first_equals_it_without_biases_and_differs_with_them(sharing):
    first, second = make(sharing, "compress_first"), make(sharing, "project_first")
    second.load_state_dict(first.state_dict())
    x = torch.randn(B, N, D, dtype=torch.float64)
    assert (first(x)[0] - second(x)[0]).abs().max() > 1e-3
    for attention in (first, second):
        for linear in (attention.key, attention.value):
            torch.nn.init.zeros_(linear.bias)
    torch.testing.assert_close(first(x)[0], second(x)[0], rtol=1e-10, atol=1e-10)


def test_compress_first_adds_the_bias_once_a_slot():
    attention = make("headwise")
    x = torch.randn(B, N, D, dtype=torch.float64)
    E, F = attention.E.weight, attention.F.weight
    q, k, v = attention.query(x), attention.key(E @ x), attention.value(F @ x)
    heads = torch.nn.functional.scaled_dot_product_attention(*(t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v)))
    expected = attention.out(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("short", [{}, {"mass_bias": True}, {"short_rows": "mean"}], ids=str)
@pytest.mark.parametrize(("sharing", "kind", "order"), ALL)
def test_padded_equals_unpadded(sharing, kind, order, short):
    attention = make(sharing, order, projection=kind, **short)
    extra = shared_for(sharing, kind, order, short.get("short_rows", "zeros"))
    x = torch.randn(B, 7, D, dtype=torch.float64)
    padded = torch.cat([x, torch.full((B, 4, D), 1e6, dtype=torch.float64)], 1)  # any values in the padding
    mask = torch.arange(11)[None].expand(B, -1) < 7
    torch.testing.assert_close(attention(padded, mask, **extra)[0][:, :7], attention(x, **extra)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_rows_of_a_batch_do_not_mix(sharing):
    attention, extra = make(sharing), shared_for(sharing)
    x = torch.randn(B, N, D, dtype=torch.float64)
    together = attention(x, **extra)[0]
    torch.testing.assert_close(together[1:], attention(x[1:], **extra)[0], rtol=1e-12, atol=1e-12)


def test_row_of_pads_only_stays_finite():
    mask = torch.zeros(B, N, dtype=torch.bool)
    x = torch.randn(B, N, D, dtype=torch.float64)
    for attention in (make(mass_bias=True), make(), make(short_rows="mean"), SelfAttention(D, H, N).double()):
        for need_weights in (False, True):
            assert attention(x, mask, need_weights)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_empty_slots_get_no_attention_in_any_precision(dtype):
    mass = torch.tensor([[[1.0, 0.5, 0.0]]])
    bias = log_mass(mass, dtype)
    assert bias.dtype == dtype
    scores = torch.tensor([-40.0, -20.0, 60.0], dtype=dtype)
    weights = (scores + bias[0, 0, 0]).softmax(-1)
    assert weights.isfinite().all() and weights[2] == 0


@pytest.mark.parametrize("sharing", SHARINGS)
def test_maps_are_a_distribution_over_slots_and_give_the_same_output(sharing):
    attention, extra = make(sharing), shared_for(sharing)
    x = torch.randn(B, N, D, dtype=torch.float64)
    output, weights = attention(x, need_weights=True, **extra)
    assert weights.shape == (B, H, N, K)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
    torch.testing.assert_close(output, attention(x, **extra)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sharing", "order"), [("none", "project_first"), ("headwise", "compress_first")])
def test_gradients_are_right(sharing, order):
    attention = make(sharing, order)
    # At full length: the bias of short rows depends on |E|, but as a mask, without a gradient.
    x = torch.randn(1, N, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, E: torch.func.functional_call(attention, {"E.weight": E}, (x,))[0],
        (x, attention.E.weight.detach().requires_grad_()),
    )


@pytest.mark.parametrize(("sharing", "kind", "order"), ALL)
def test_every_parameter_gets_a_gradient(sharing, kind, order):
    # DDP fails on unused parameters without find_unused_parameters.
    attention, extra = make(sharing, order, projection=kind), shared_for(sharing, kind, order)
    attention(torch.randn(B, N, D, dtype=torch.float64), **extra)[0].square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
    # A key bias shifts all scores of a row equally, to which softmax is invariant: its gradient is zero, so it is left out.
    assert all(p.grad.abs().sum() > 0 for n, p in attention.named_parameters() if n != "key.bias")


def test_two_layers_share_no_matrix():
    first, second = make(), make()
    first.E.weight.data.zero_()
    assert second.E.weight.abs().sum() > 0


def test_layerwise_alone_says_what_it_needs():
    with pytest.raises(ValueError, match="needs the shared E"):
        make("layerwise")(torch.randn(B, N, D, dtype=torch.float64))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="hidden_size is 16; allowed: a multiple of num_heads = 5"):
        LinformerAttention(D, 5, N, K)
    with pytest.raises(ValueError, match="13 tokens; allowed: up to max_length = 12"):
        make()(torch.randn(1, 13, D, dtype=torch.float64))


def test_local_convolution_starts_at_zero_and_is_torchs_depthwise_one():
    local = LocalConvolution(D, 5)
    x = torch.randn(B, N, D)
    assert not local(x).any()
    torch.nn.init.normal_(local.weight)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), local.weight[:, :, 0], padding=2, groups=D).transpose(1, 2)
    torch.testing.assert_close(local(x), expected)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_local_convolution_is_the_same_compiled(length):
    torch.manual_seed(0)
    local = LocalConvolution(D, 5).double()
    torch.nn.init.normal_(local.weight)
    x = torch.randn(2, length, D, dtype=torch.float64, requires_grad=True)
    found = []
    for forward in (local, torch.compile(local, backend="eager", fullgraph=True)):
        y = forward(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, local.weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = [forward(x.float()) for forward in (local.float(), torch.compile(local, backend="eager", fullgraph=True))]
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)  # sums of five, each rounded to 8 bits


@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
@pytest.mark.parametrize("projection", ["linear", "gaussian", "mean", "max", "conv"])
def test_fewer_tokens_than_slots_give_what_the_formula_says(sharing, projection):
    """If N < K, the order of the products may change, for speed, but not the result: W (E x) + b, one slot at a time."""
    torch.manual_seed(0)
    layer = LinformerAttention(8, 2, 16, 8, sharing="headwise" if sharing == "layerwise" else sharing, projection=projection)
    layer = layer.double().eval()
    shared = make_projection(projection, 16, 8, channels=8).double() if sharing == "layerwise" else None
    for linear in (layer.key, layer.value):
        torch.nn.init.normal_(linear.bias)
    x, mask = torch.randn(3, 5, 8).double(), torch.arange(5) < torch.tensor([[5], [3], [1]])
    E = shared or layer.E
    F = shared or layer.F or layer.E
    if shared is not None:
        layer.E, layer.F = None, None
    clean = x * mask[..., None]
    q, k, v = layer.query(x), layer.key(E(clean, mask)), layer.value(F(clean, mask))
    heads = [torch.softmax(q[..., h] @ k[..., h].mT / 2, -1) @ v[..., h] for h in (slice(0, 4), slice(4, 8))]  # √d = 2
    torch.testing.assert_close(layer(x, mask, shared=shared)[0], layer.out(torch.cat(heads, -1)))


def test_bfloat16_on_a_cpu_is_near_float32():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 16) for length in (40, 12, 12))
    exact, _ = attend(q, k, v, None, 0.0, False)
    rounded, weights = attend(*(t.bfloat16() for t in (q, k, v)), None, 0.0, False)
    assert weights is None and rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.03)


class Adapter(torch.nn.Module):
    """As PEFT wraps a layer: its weight and bias are those of the layer below."""

    def __init__(self, below):
        super().__init__()
        self.below, self.added = below, torch.nn.Parameter(torch.randn_like(below.weight))

    @property
    def weight(self):
        return self.below.weight

    @property
    def bias(self):
        return self.below.bias

    def forward(self, x):
        return self.below(x) + x @ self.added.t()

    def merged(self):
        self.below.weight.data += self.added.data
        return self.below


@pytest.mark.parametrize("length", [2, K, N])
def test_an_adapter_of_keys_and_values_counts_in_rows_of_any_length(length):
    attention, x = make(), torch.randn(B, length, D, dtype=torch.float64)
    plain = attention(x)[0]
    attention.key, attention.value = Adapter(attention.key), Adapter(attention.value)
    adapted = attention(x)[0]
    adapted.sum().backward()
    assert attention.value.added.grad.abs().min() > 0 and not torch.allclose(adapted, plain)
    attention.key, attention.value = attention.key.merged(), attention.value.merged()
    torch.testing.assert_close(attention(x)[0], adapted, rtol=1e-12, atol=1e-12)
