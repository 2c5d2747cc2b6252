"""Luna's two attentions written out, one head at a time, over two layers; the second continues from the first's latents."""

import math

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig, LunaAttention
from tests.model.written_out import assert_agree, three_rows

D, H, K = 16, 4, 6
ROWS = torch.arange(D).split(D // H)


def make(count=1):
    torch.manual_seed(0)
    layers = [LunaAttention(D, H, 24, K).double().eval() for _ in range(count)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return layers, torch.nn.Embedding(K, D).double()


def attended(asked, keys, values):
    """softmax(q kᵀ/√d) v of each head, concatenated, and the mean of their maps."""
    maps = [(asked[:, rows] @ keys[:, rows].T / math.sqrt(D // H)).softmax(-1) for rows in ROWS]
    return torch.cat([P @ values[:, rows] for P, rows in zip(maps, ROWS, strict=True)], -1), torch.stack(maps)


def written_out(layer, x, latents):
    """One row without padding, (N, D): the layer's output, its maps, and the latents that it passes on, not yet normed."""
    P = torch.nn.functional.layer_norm(latents, (D,), layer.latent_norm.weight, layer.latent_norm.bias)
    packed, _ = attended(layer.pack_query(P), layer.pack_key(x), layer.pack_value(x))
    context, maps = attended(layer.query(x), layer.key(packed), layer.value(packed))
    return layer.out(context), maps, P + packed


@pytest.mark.parametrize("length", [24, 5, 1])  # n, fewer than K, one
@pytest.mark.parametrize("padded", [False, True])
def test_is_the_papers_formula_over_two_layers(length, padded):
    (first, second), latents = make(2)
    lengths, mask = three_rows(length, padded)
    x = torch.randn(3, length, D, dtype=torch.float64, requires_grad=True)
    y, _, handed_on = first(x, mask, shared=latents)
    z, maps, _ = second(y, mask, need_weights=True, shared=latents, **handed_on)
    for b, real in enumerate(lengths):
        expected_y, _, of_first = written_out(first, x[b, :real], latents.weight)
        expected, expected_maps, _ = written_out(second, expected_y, of_first)
        assert_agree(z[b, :real], expected, x)
        torch.testing.assert_close(maps[b, :, :real], expected_maps, rtol=1e-10, atol=1e-10)
    _, values = second.compress(y, mask, latents, **handed_on)
    torch.testing.assert_close(second.output(maps @ values, y, mask), z, rtol=1e-10, atol=1e-10)


def test_gradients_are_right():
    (layer,), latents = make()
    x = torch.randn(1, 5, D, dtype=torch.float64, requires_grad=True)
    handed = torch.randn(1, K, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, shared=latents)[::2][0], (x,))
    assert torch.autograd.gradcheck(lambda x, latents: layer(x, latents=latents)[2]["latents"], (x, handed))


def test_an_encoder_hands_its_latents_on():
    """The second layer gets the first's latents: otherwise what the first packs would have no effect."""
    config = EncoderConfig(50, 16, D, 2, H, 32, "luna", projection_dim=K, dropout=0.0)
    encoder, ids = Encoder(config), torch.randint(50, (2, 16))
    encoder.layers[0].attention.out.requires_grad_(False).weight.zero_()  # the tokens read nothing in the first layer
    encoder(ids).square().sum().backward()
    assert encoder.layers[0].attention.pack_value.weight.grad.abs().max() > 0
    assert encoder.E.weight.grad.abs().max() > 0


def test_refused():
    with pytest.raises(ValueError, match=r"luna's first layer needs the latents: pass shared=LunaAttention.shared\(config\)"):
        make()[0][0](torch.randn(1, 5, D, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"projection_dim is \[8, 4\]; allowed with attention=luna: one k for all layers, which"
    ):
        EncoderConfig(num_layers=2, attention="luna", projection_dim=[8, 4])
    with pytest.raises(ValueError, match=r"position is 'rotary', but attention=luna .* allowed: learned"):
        EncoderConfig(attention="luna", position="rotary")
