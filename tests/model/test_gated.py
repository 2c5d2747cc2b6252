"""Pooling by a gate compared with its formula, one window, head and channel at a time."""

import math

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig, LinformerAttention, make_projection
from tests.model.written_out import made

B, D, H, LONGEST, K = 2, 8, 2, 12, 4


def make(heads=None, **options):
    channels = D if heads is None else D // H
    return made(make_projection, "gated", LONGEST, K, num_heads=heads, channels=channels, **options)


@pytest.mark.parametrize("heads", [None, H])
@pytest.mark.parametrize("options", [{}, {"gate": "channel"}, {"gate": "channel", "overlap": 2}, {"overlap": 3}])
@pytest.mark.parametrize(("length", "lengths"), [(LONGEST, None), (7, None), (LONGEST, (LONGEST, 4)), (7, (7, 1))])
def test_is_the_formula(heads, options, length, lengths):
    E, overlap, width = make(heads, **options), options.get("overlap", 0), LONGEST // K
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
    z = x if heads is None else x.unflatten(-1, (H, -1)).transpose(1, 2)
    z = z if mask is None else z.masked_fill(~(mask[..., None] if heads is None else mask[:, None, :, None]), 0.0)
    found, expected = E.for_input(x, mask)(z, mask), torch.zeros(B, heads or 1, K, z.shape[-1], dtype=torch.float64)
    for b in range(B):
        real = length if lengths is None else lengths[b]
        for h in range(heads or 1):
            rows = E.scores.weight.unflatten(0, (heads or 1, -1))[h]
            bias = E.bias if heads is None else E.bias[h]
            own = z[b] if heads is None else z[b, h]
            for j in range(K):
                first = j * width - overlap
                tokens = [t for t in range(first, (j + 1) * width + overlap) if 0 <= t < real]
                if tokens:
                    gates = torch.stack([x[b, t] @ rows.T + bias[t - first] for t in tokens]).softmax(0)
                    expected[b, h, j] = (gates * own[tokens]).sum(0)
    torch.testing.assert_close(found, expected if heads else expected[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(E(z.detach(), mask), found, rtol=1e-12, atol=1e-12)
    if options.get("gate") != "channel" and mask is None:
        torch.testing.assert_close(E.matrix(x[:1]) @ z[0], found[0], rtol=1e-12, atol=1e-12)
    held = E.mass(z, mask)
    assert held is None or torch.equal((held[:, 0] > 0).expand(B, -1), (expected != 0).any(-1).any(1))


@pytest.mark.parametrize(("init", "kind"), [("block_mean", "mean"), ("strided", "linear")])
def test_starts_as_windows_or_near_a_token_of_them(init, kind):
    shape = {"vocab_size": 9, "max_length": LONGEST, "hidden_size": D, "num_layers": 1, "num_heads": H, "projection_dim": K}
    E = Encoder(EncoderConfig(**shape, intermediate_size=8, sharing="heads", projection="gated", projection_init=init))
    E = E.layers[0].attention.E
    x = torch.randn(1, LONGEST, D)
    other = make_projection(kind, LONGEST, K, num_heads=H, channels=D // H, init=init)
    z = x.unflatten(-1, (H, -1)).transpose(1, 2)
    apart = (E.for_input(x, None)(z, None) - other(z)).abs().max()
    assert apart < (1e-6 if kind == "mean" else 4 * 2 * math.exp(-4) * z.abs().max())


def test_gradients_are_right():
    torch.manual_seed(0)
    options = {"gate": "channel", "overlap": 1}
    attention = LinformerAttention(D, H, LONGEST, K, sharing="heads", projection="gated", projection_options=options).double()
    x = torch.randn(1, 8, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, W, B: torch.func.functional_call(attention, {"E.scores.weight": W, "E.bias": B}, (x,))[0],
        (x, *(p.detach().requires_grad_() for p in (attention.E.scores.weight, attention.E.bias))),
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"projection_options": {"overlap": 5}}, r"projection_options.overlap is 5; allowed: up to the window, .* = 4"),
        ({"projection_options": {"gate": "token"}}, r"projection_options.gate is 'token'; allowed: head, channel"),
        ({"projection_init": "normal"}, r"projection_init is 'normal'; allowed with projection='gated': block_mean"),
        ({"projection_dim": 100}, r"projection_dim \(k\) is 100, but projection='gated' works on windows"),
    ],
)
def test_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        EncoderConfig(**{"projection": "gated", **settings})
