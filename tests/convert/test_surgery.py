"""What conversions do to weights, each checked against an independent computation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_linformer.convert.surgery import to_linformer, to_longer
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from tests.model.mechanisms import IMAGE, MECHANISMS, MODERN

SHAPE = {"vocab_size": 40, "max_length": 12, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}


def model(**settings):
    torch.manual_seed(0)
    net = MaskedLanguageModel(EncoderConfig(**SHAPE | settings)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return net


def rows(count=5, length=12):
    return torch.randint(0, 40, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", [{}, {"norm": "pre", "local_width": 3}])
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
@pytest.mark.parametrize("start", ["strided", "block_mean"])
def test_with_as_many_slots_as_tokens_it_is_the_transformer(settings, sharing, start):
    net = model(attention="full", **settings)
    made = to_linformer(net, start, None, projection_dim=12, sharing=sharing)
    assert torch.allclose(made(rows()), net(rows()), atol=1e-5)
    assert made.encoder.config.attention == "linformer" and not made.training


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_a_modern_transformer_is_converted_and_gets_longer(sharing):
    net = model(attention="full", **MODERN | {"order": "compress_first"})
    made = to_linformer(net, "strided", None, projection_dim=12, sharing=sharing)
    assert torch.allclose(made(rows()), net(rows()), atol=1e-5) and made.encoder.config.order == "project_first"
    twice = to_longer(net, 24, "repeat", "repeat")(rows(length=24))
    longer = to_longer(made, 24, "repeat", "repeat")
    assert torch.allclose(longer(rows(length=24)), twice, atol=1e-5)  # still one token for each slot


def test_lookup_that_finds_nothing_is_the_transformer_and_gets_longer():
    net = model(attention="full")
    settings = {"projection_dim": 12, "sharing": "none", "attention_options": {"strength": -100.0, "chunk": 4}}
    made = to_linformer(net, "strided", None, "lookup", **settings)
    assert torch.allclose(made(rows()), net(rows()), atol=1e-5)
    settings["attention_options"]["strength"] = 2.0
    assert not torch.allclose(to_linformer(net, "strided", None, "lookup", **settings)(rows()), net(rows()), atol=1e-3)
    longer = to_longer(made, 24, "repeat", "repeat")
    assert longer.encoder.config.projection_dim == 24 and longer(rows(length=24)).shape == (5, 24, 40)


def test_a_pattern_of_all_pairs_is_the_transformer():
    net = model(attention="full", local_width=3)
    made = to_linformer(net, "block_mean", None, "sparse", attention_options={"stride": 1, "reach": 12})
    assert torch.allclose(made(rows()), net(rows()), atol=1e-5)


CONVERTED = {name: settings for name, settings in MECHANISMS.items() if name != "lsh"}


def test_shared_queries_and_keys_are_no_transformers():
    with pytest.raises(
        ValueError, match=r"attention is 'lsh', which has no layers.0.attention.key.weight like a Transformer's"
    ):
        to_linformer(model(attention="full"), "block_mean", None, "lsh")


@pytest.mark.parametrize("settings", CONVERTED.values(), ids=CONVERTED)
def test_every_mechanism_takes_a_transformers_weights_and_gets_longer(settings):
    net = model(attention="full")
    settings = {"attention": "linformer", "projection_dim": 4, **settings}
    made = to_linformer(net, "block_mean", None, **settings)
    own, theirs = made.state_dict(), net.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in theirs.items())
    longer = to_longer(made, 24, "repeat", "interpolate")
    for name, tensor in longer.state_dict().items():
        assert (
            name in ("encoder.E.weight", "encoder.E.bias")
            or name.endswith("attention.E.bias")
            or torch.equal(tensor[: len(own[name])], own[name])
        )
    assert longer(rows(length=24)).isfinite().all()


@pytest.mark.parametrize(("sharing", "names"), [("none", "EF"), ("headwise", "EF"), ("key-value", "E"), ("layerwise", "E")])
def test_svd_is_numpys_of_the_maps_that_share_a_matrix(sharing, names):
    net = model(attention="full")
    made = to_linformer(net, "svd", rows(7), projection_dim=[3, 5] if sharing != "layerwise" else 4, sharing=sharing)
    maps = {layer: map.detach().double().numpy() for layer, map in net.encoder(rows(7), need_weights=True)[1].items()}
    for layer, found in enumerate(made.encoder.layers):
        for name in names:
            E = made.encoder.E if sharing == "layerwise" else getattr(found.attention, name)
            E = E.weight.detach().double().numpy()
            assert np.allclose(np.abs(E).sum(-1), 1, atol=1e-6) and (E.sum(-1) > -1e-6).all()
            heads = maps[layer] if sharing != "layerwise" else np.concatenate([maps[0], maps[1]], axis=1)
            groups = [heads[:, h] for h in range(2)] if sharing == "none" else [heads]
            for matrix, group in zip(E if sharing == "none" else [E], groups, strict=True):
                V = np.linalg.svd(group.reshape(-1, 12), full_matrices=False)[2][: len(matrix)]
                mine = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
                assert np.allclose(mine.T @ mine, V.T @ V, atol=1e-5)  # the same orthogonal projection


@pytest.mark.parametrize("of_image", IMAGE.items())
def test_a_model_of_images_is_for_their_size_alone(of_image):
    made = to_linformer(model(attention="full", position=IMAGE["position"], max_length=18), "squares", None, projection_dim=4)
    assert made.encoder.config.position == "image" and made(rows(length=18)).isfinite().all()
    net = model(max_length=18, projection_dim=4, **dict([of_image]))
    with pytest.raises(ValueError, match="max_length is 36; allowed: 18, since it reads images of that size"):
        to_longer(net, 36, "repeat", "repeat")


def test_only_a_matrix_can_be_made_of_singular_vectors():
    with pytest.raises(ValueError, match=r"projection_init is 'svd' with projection='conv'; allowed: with projection=linear"):
        to_linformer(model(attention="full"), "svd", rows(), projection_dim=4, sharing="none", projection="conv")
    with pytest.raises(ValueError, match=r"'svd' with attention='nystrom'; allowed: with attention=linformer"):
        to_linformer(model(attention="full"), "svd", rows(), attention="nystrom", projection_dim=4)


def test_repeated_positions_and_slots():
    net = model(projection_dim=4, sharing="headwise")
    made = to_longer(net, 36, "repeat", "repeat")
    assert made.encoder.config == replace(net.encoder.config, max_length=36, projection_dim=12)
    old, new = net.state_dict(), made.state_dict()
    for block in range(3):
        assert torch.equal(new["encoder.positions.weight"][12 * block :][:12], old["encoder.positions.weight"])
    for name in ("E", "F"):
        key = f"encoder.layers.1.attention.{name}.weight"
        assert torch.equal(new[key], torch.block_diag(old[key], old[key], old[key]))


def test_interpolated_positions_and_columns():
    net = model(projection_dim=4, sharing="none")
    made = to_longer(net, 30, "interpolate", "interpolate")
    assert made.encoder.config == replace(net.encoder.config, max_length=30)
    old, new = net.state_dict(), made.state_dict()
    # Interpolates between the centres of neighbours, with numpy.
    places = (np.arange(30) + 0.5) * 12 / 30 - 0.5

    def spread(row):
        return np.interp(places, np.arange(12), row)

    expected = np.apply_along_axis(spread, 0, old["encoder.positions.weight"].numpy())
    assert np.allclose(new["encoder.positions.weight"].numpy(), expected, atol=1e-5)
    key = "encoder.layers.0.attention.F.weight"
    expected = np.apply_along_axis(spread, -1, old[key].numpy()) * 12 / 30
    assert np.allclose(new[key].numpy(), expected, atol=1e-5)


def test_a_mean_stays_one_when_its_window_is_spread():
    net = MaskedLanguageModel(EncoderConfig(**SHAPE, projection_dim=4, sharing="layerwise"))
    made, other = to_longer(net, 48, "repeat", "interpolate").encoder, to_longer(net, 48, "interpolate", "repeat").encoder
    assert torch.allclose(made.E.weight.sum(-1), torch.ones(4))
    assert torch.equal(made.positions.weight[12:24], net.encoder.positions.weight) and other.E.weight.shape == (16, 48)
    assert not torch.allclose(other.positions.weight[12:24], net.encoder.positions.weight)


@pytest.mark.parametrize(("how", "k", "width"), [("repeat", 8, 3), ("interpolate", 4, 6)])
def test_convolutions_keep_or_spread_their_windows(how, k, width):
    net = model(projection_dim=4, projection="conv", sharing="none")
    made = to_longer(net, 24, "repeat", how)
    before, after = (one.encoder.layers[0].attention.E.weight for one in (net, made))
    assert made.encoder.config.projection_dim == k and after.shape == (2, width, 4)
    assert torch.allclose(after.sum(1), before.sum(1), atol=1e-5) and (how == "interpolate" or torch.equal(before, after))
    made(rows(2, 24))


@pytest.mark.parametrize("projection", ["mean", "max", "gaussian"])
@pytest.mark.parametrize("how", ["repeat", "interpolate"])
def test_what_has_no_weights_or_fixed_ones_gets_longer_too(projection, how):
    net = model(projection_dim=4, projection=projection)
    made = to_longer(net, 24, "interpolate", how)
    assert made(rows(2, 24)).isfinite().all() and made.encoder.config.projection_dim == (8 if how == "repeat" else 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "full"},
        {"attention": "sparse"},
        {"attention": "sparse", "attention_options": {"reach": 2}},
        {"attention": "sparse", "attention_options": {"stride": 4}},
    ],
    ids=["full", "sparse", "reach", "stride"],
)
def test_a_longer_transformer_is_the_same_on_short_inputs_if_positions_are_repeated(settings):
    net = model(**settings)
    made = to_longer(net, 24, "repeat", "repeat")
    assert torch.equal(made(rows()), net(rows()))


def test_lengths_that_do_not_go():
    net = model(projection_dim=4)
    with pytest.raises(ValueError, match=r"max_length is 12; allowed: more than the model's 12"):
        to_longer(net, 12, "repeat", "repeat")
    with pytest.raises(
        ValueError, match=r"max_length is 20; allowed where something is repeated: a multiple of the model's 12"
    ):
        to_longer(net, 20, "interpolate", "repeat")
    assert to_longer(net, 20, "interpolate", "interpolate").encoder.config.max_length == 20
    net = model(projection_dim=4, projection="dynamic")
    with pytest.raises(ValueError, match=r"weight depends on n or k; allowed: --projections interpolate, which keeps k, or"):
        to_longer(net, 24, "repeat", "repeat")
    assert to_longer(net, 24, "repeat", "interpolate")(rows(length=24)).isfinite().all()
