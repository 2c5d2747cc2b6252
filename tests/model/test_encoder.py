"""The encoder: the authors' parameter counts, exact masks in every combination, maps, checkpointing, what is refused."""

import itertools
import statistics

import pytest
import torch

from lit_linformer.callbacks.length_sweep import AllocatedTensors
from lit_linformer.model import ATTENTIONS, Encoder, EncoderConfig, MaskedLanguageModel, count_parameters
from lit_linformer.model.flops import training_flops
from lit_linformer.model.linformer import ORDERS, SHARINGS
from lit_linformer.model.projection import PROJECTIONS
from tests.model.mechanisms import IMAGE, MECHANISMS, MODERNS


def tiny(**options):
    shape = {
        "vocab_size": 50,
        "max_length": 16,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 16,
        "projection_dim": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return EncoderConfig(**{**shape, **options})


def randomised(config, seed=0):
    """An encoder with all parameters random, so that nothing agrees by being zero."""
    torch.manual_seed(seed)
    encoder = Encoder(config).double().eval()
    for parameter in encoder.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return encoder


def test_parameter_count_is_the_authors():
    model = MaskedLanguageModel(EncoderConfig(vocab_size=50_000, sharing="headwise"))
    # The authors' has 514 positions, two of them never used (fairseq counts from pad + 1).
    assert count_parameters(model) + 2 * 768 == 126_065_744


@pytest.mark.parametrize(
    ("sharing", "matrices"), [("none", 288), ("heads", 144), ("headwise", 24), ("key-value", 12), ("layerwise", 1)]
)
def test_distinct_matrices_of_12_layers_and_12_heads(sharing, matrices):
    shape = {"num_layers": 12, "num_heads": 12, "hidden_size": 24}
    linformer = count_parameters(Encoder(tiny(sharing=sharing, **shape)))
    transformer = count_parameters(Encoder(tiny(attention="full", **shape)))
    assert linformer - transformer == matrices * 16 * 4


LINFORMERS = [
    dict(zip(("sharing", "projection", "order"), kind, strict=True))
    for kind in itertools.product(SHARINGS, PROJECTIONS, ORDERS)
]
KINDS = {" ".join(kind.values()): kind for kind in ({"attention": "full"}, {"attention": "lookup"}, IMAGE, *LINFORMERS)}
KINDS |= MECHANISMS


SETTINGS = [
    {"norm": norm, "local_width": width, "mass_bias": mass_bias, "short_rows": short}
    for norm, width, mass_bias, short in (("post", 0, True, "zeros"), ("pre", 3, True, "mean"), ("pre", 3, False, "mean"))
]
PADDED = {
    f"{name} {' '.join(map(str, more.values()))}": {**kind, **more} for name, kind in KINDS.items() for more in SETTINGS
} | MODERNS


@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
def test_padding_never_matters(options):
    encoder = randomised(tiny(**options))
    ids = torch.randint(0, 50, (2, 9))
    padded, mask = torch.nn.functional.pad(ids, (0, 5), value=7), torch.arange(14)[None].expand(2, -1) < 9
    alone = encoder(ids)
    torch.testing.assert_close(encoder(padded, mask)[:, :9], alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(encoder(ids, torch.ones_like(ids)), alone, rtol=1e-10, atol=1e-10)
    one_longer = torch.cat([torch.nn.functional.pad(ids[:1], (0, 5)), torch.randint(0, 50, (1, 14))])
    mixed = torch.stack([mask[0], torch.ones(14, dtype=torch.bool)])
    torch.testing.assert_close(encoder(one_longer, mixed)[0, :9], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["linformer", "full", "lookup"])
def test_attention_maps_of_chosen_layers(attention):
    encoder = randomised(tiny(attention=attention))
    ids = torch.randint(0, 50, (2, 16))
    hidden, maps = encoder(ids, need_weights=[1])
    assert list(maps) == [1] and maps[1].shape == (2, 2, 16, {"linformer": 4, "full": 16, "lookup": 20}[attention])
    torch.testing.assert_close(hidden, encoder(ids), rtol=1e-10, atol=1e-10)
    assert list(encoder(ids, need_weights=True)[1]) == [0, 1]
    torch.testing.assert_close(encoder(ids, need_weights=[-1])[1], maps)
    with pytest.raises(ValueError, match=r"need_weights names layer 2; allowed: 0 to 1, or -1 \(the last\) to -2"):
        encoder(ids, need_weights=[0, 2])


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_no_rows_and_ids_of_32_bits(options):
    encoder, ids = Encoder(tiny(**options)).eval(), torch.randint(0, 50, (2, 16))
    assert encoder(ids[:0]).shape == (0, 16, 8)
    assert encoder(ids[:0], torch.ones(0, 16), need_weights=True)[0].shape == (0, 16, 8)
    assert torch.equal(encoder(ids.int()), encoder(ids))


RECOMMENDED = {"lookup, window": MECHANISMS["lookup, window"] | {"short_rows": "mean"}, "none": {"sharing": "none"}}


@pytest.mark.parametrize("options", [{}, {"attention": "full"}, *RECOMMENDED.values()], ids=["linformer", "full", *RECOMMENDED])
def test_the_plain_encoder_is_exported_for_any_batch_and_length(options):
    encoder = Encoder(tiny(norm="pre", local_width=3, **options)).eval()
    ids, mask = torch.randint(0, 50, (3, 10)), torch.ones(3, 10, dtype=torch.bool)
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=16)}
    program = torch.export.export(encoder, (ids, mask), dynamic_shapes=(sizes, sizes)).module()
    for rows, length in ((1, 1), (2, 3), (5, 16)):
        ids = torch.randint(0, 50, (rows, length))
        mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))
        torch.testing.assert_close(program(ids, mask)[mask], encoder(ids, mask)[mask])


class Mean(torch.nn.Module):
    """A layer of the user's own, without an attention."""

    def forward(self, x, attention_mask, need_weights, given):
        return x + x.mean(1, keepdim=True), None, {}


@pytest.mark.parametrize("replaced", [[0], [1], [0, 1]], ids=["first", "last", "all"])
@pytest.mark.parametrize("attention", ["linformer", "lookup"])
def test_a_whole_layer_may_be_replaced(attention, replaced):
    encoder = Encoder(tiny(attention=attention))
    for layer in replaced:
        encoder.layers[layer] = Mean()
    ids = torch.randint(50, (2, 16))
    assert encoder(ids).shape == (2, 16, encoder.config.hidden_size)
    assert sorted(encoder(ids, need_weights=True)[1]) == [layer for layer in range(2) if layer not in replaced]
    assert training_flops(encoder, 16) is None


def test_k_may_differ_by_layer():
    encoder = randomised(tiny(projection_dim=[8, 2], sharing="key-value"))
    _, maps = encoder(torch.randint(0, 50, (1, 16)), need_weights=True)
    assert [maps[layer].shape[-1] for layer in (0, 1)] == [8, 2]


@pytest.mark.parametrize("attention", ["full", "linformer", "lookup"])
def test_the_convolution_begins_at_zero_or_with_a_given_deviation(attention):
    shape = {"attention": attention, "norm": "pre", "local_width": 5, "hidden_size": 256}
    zeros, drawn = Encoder(tiny(**shape)), Encoder(tiny(**shape, local_std=0.5))
    for one, other in zip(zeros.layers, drawn.layers, strict=True):
        assert not one.attention.local.weight.any()
        assert other.attention.local.weight.detach().std().item() == pytest.approx(0.5, rel=0.1)
        assert other.attention.query.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("options", [*MECHANISMS.values(), IMAGE], ids=[*MECHANISMS, "image"])
def test_the_state_dict_holds_all_that_a_run_continues_from(options):
    first, second = randomised(tiny(**options)), Encoder(tiny(**options)).double().eval()  # the second from other numbers
    ids = torch.randint(0, 50, (2, 13))
    first.train()(ids)  # which may change it
    first.eval()
    assert not torch.equal(first(ids), second(ids))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(ids), second(ids))


# In a Reformer some tokens fall into another bucket, which ones depends on the processor: the median over five encoders shows
# whether rounding is the only difference.
SEEDS = range(5)


def median_distance(rounded, exact):
    """The median over tokens, relative to the exact norm."""
    return ((rounded.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()


@pytest.mark.parametrize("options", [*MECHANISMS.values(), *MODERNS.values()], ids=[*MECHANISMS, *MODERNS])
def test_weights_of_half_precision(options):
    """With bf16-true no part may be float32."""
    apart = []
    for seed in SEEDS:
        encoder = randomised(tiny(**{"norm": "pre", "local_width": 3, **options}), seed).float()
        ids, mask = torch.randint(0, 50, (2, 13)), torch.arange(13) < torch.tensor([[13], [9]])
        exact = encoder(ids, mask)[mask]
        rounded = encoder.bfloat16()(ids, mask)
        rounded.float()[mask].square().sum().backward()
        assert rounded.dtype == torch.bfloat16 and all(parameter.grad.isfinite().all() for parameter in encoder.parameters())
        apart.append(median_distance(rounded[mask], exact))
    assert statistics.median(apart) < 0.1


@pytest.mark.parametrize("options", [*(MECHANISMS | MODERNS).values(), IMAGE], ids=[*(MECHANISMS | MODERNS), "image"])
def test_bfloat16_is_near_float32(options):
    apart = []
    for seed in SEEDS:
        encoder = randomised(tiny(**{"norm": "pre", "local_width": 3, **options}), seed).float()
        ids, mask = torch.randint(0, 50, (2, 13)), torch.arange(13) < torch.tensor([[13], [9]])
        with torch.autocast("cpu", torch.bfloat16):
            rounded = encoder(ids, mask)
            rounded.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters())
        apart.append(median_distance(rounded[mask], encoder(ids, mask)[mask]))
    assert statistics.median(apart) < 0.05


@pytest.mark.parametrize(
    "options",
    [
        *({"sharing": sharing} for sharing in SHARINGS),
        {"attention": "lookup"},
        IMAGE,
        *MECHANISMS.values(),
        MODERNS["modern lookup"],
    ],
    ids=[*SHARINGS, "lookup", "image", *MECHANISMS, "modern lookup"],
)
def test_checkpointing_changes_no_gradient_and_takes_masks(options, monkeypatch):
    for name in ("encoder.PIECE", "lookup.LONG"):  # so that these rows count as long
        monkeypatch.setattr(f"lit_linformer.model.{name}", 5)
    ids, mask = torch.randint(0, 50, (2, 12)), torch.arange(12)[None].expand(2, -1) < 9
    gradients = []
    for checkpointing in (False, True):
        encoder = randomised(tiny(**options, activation_checkpointing=checkpointing, dropout=0.1)).train()
        torch.manual_seed(1)
        encoder(ids, mask).square().sum().backward()
        gradients.append([parameter.grad for parameter in encoder.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-12)


def peak_memory(config, length):
    """Bytes of the weights plus the peak of what forward and backward allocate, on the meta device: nothing is computed."""
    with torch.device("meta"):
        encoder, ids = Encoder(config).train(), torch.zeros(1, length, dtype=torch.int64)
    with AllocatedTensors(encoder.parameters()) as allocated:
        encoder(ids).sum().backward()
    return sum(parameter.nbytes for parameter in encoder.parameters()) + allocated.peak


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"attention": "lookup"}], ids=["linformer", "lookup"])
def test_a_row_of_65536_tokens_fits_into_8_gib(options):
    shape = {"max_length": 65536, "projection_dim": 256, "norm": "pre", "local_width": 5}
    config = EncoderConfig(**shape, **options, dropout=0.0, attention_dropout=0.0, activation_checkpointing=True)
    assert peak_memory(config, 65536) < 7.5 * 2**30  # torch itself needs 0.4


LINEAR = {"lookup": {"attention": "lookup"}, "image": IMAGE, **{kind: {"projection": kind} for kind in PROJECTIONS}}
LINEAR |= {f"sharing {sharing}": {"sharing": sharing} for sharing in SHARINGS} | MECHANISMS
LINEAR |= {name: {"attention": name} for name in ("sparse", "lsh")}  # with default strides and chunks, for long rows
ROOT = ("sparse", "coarse", "coarse, gated")  # N √N by their docstrings; coarse where k grows as √n


@pytest.mark.parametrize("name", LINEAR)
def test_memory_grows_with_the_length_and_not_with_its_square(name):
    """Forward and backward on a padded row: peak memory with four times as many tokens, in real tensors."""
    peaks = []
    for root in (32, 64):
        length = root**2
        of_k = {"projection_dim": root} if name.startswith("coarse") else {}
        config = tiny(**LINEAR[name], **of_k, max_length=length, num_layers=1)
        encoder, ids = Encoder(config).train(), torch.zeros(1, length, dtype=torch.int64)
        with AllocatedTensors(encoder.parameters()) as allocated:
            encoder(ids, torch.arange(length)[None] < length - 3).sum().backward()
        peaks.append(allocated.peak)
    assert peaks[1] < (8.5 if name in ROOT else 4.5) * peaks[0]


def test_every_attention_is_among_them():
    kinds = {kind.get("attention", "linformer") for kind in LINEAR.values()}
    assert {*kinds, "full"} == set(ATTENTIONS)


def test_shared_matrix_is_one_entry_of_the_state_dict():
    names = [name for name in Encoder(tiny(sharing="layerwise")).state_dict() if "E.weight" in name or "F.weight" in name]
    assert names == ["E.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_dim": 17}, r"projection_dim \(k\) is 17; allowed: 1 to max_length = 16"),
        ({"hidden_size": 9}, "hidden_size is 9; allowed: a multiple of num_heads = 2"),
        ({"projection_dim": [4, 4, 4], "sharing": "none"}, "lists 3 numbers; allowed: one, or num_layers = 2"),
        ({"projection_dim": []}, r"projection_dim is \[\]; allowed: one number, or one for each layer"),
        ({"projection_dim": [8, 4]}, r"projection_dim is \[8, 4\]; allowed: one k for all layers"),
        ({"projection": "conv", "projection_dim": 5}, "divisors of max_length = 16"),
        ({"causal": True}, "causal is true; allowed: false"),
        ({"local_width": 4}, "local_width is 4; allowed: 0"),
        ({"norm": "both"}, "norm is 'both'; allowed: post, pre"),
        ({"norm_type": "batch"}, "norm_type is 'batch'; allowed: layer, rms"),
        ({"position": "sinusoidal"}, "position is 'sinusoidal'; allowed: learned, rotary, image"),
        ({"position": "image", "max_length": 17}, "max_length is 17, which is no square image; allowed: w² tokens, or"),
        ({"projection_init": "squares", "max_length": 17}, "max_length is 17, which is no square image"),
        (
            {"projection_init": "squares", "projection_dim": 8},
            r"projection_dim \(k\) is 8, but .* 4 × 4 pixels so; allowed with projection_init='squares': 1, 4, 16",
        ),
        (
            {"projection_init": "squares", "projection": "mean"},
            "projection is 'mean'; allowed with projection_init='squares': linear",
        ),
        (
            {"position": "rotary", "hidden_size": 6},
            "hidden_size/num_heads is 3; allowed with position='rotary': an even head width",
        ),
        ({"position": "rotary"}, "order is 'compress_first'; allowed with position='rotary': project_first"),
        (
            {"position": "rotary", "sharing": "none", "projection": "conv"},
            "projection is 'conv'; allowed with position='rotary'",
        ),
        ({"position": "rotary", "rotary_base": 1.0, "attention": "full"}, "rotary_base is 1.0; allowed: more than 1"),
        (
            {
                "position": "rotary",
                "projection": "gated",
                "sharing": "none",
                "projection_options": {"gate": "channel"},
            },
            "projection is 'gated', gate=channel; allowed with position='rotary'",
        ),
        (
            {"position": "rotary", "order": "project_first", **MECHANISMS["long-short"]},
            "attention_options.dual_norm is true; allowed with position='rotary': false",
        ),
        ({"input_size": 3, "attention": "lookup"}, "attention is 'lookup'; allowed with input_size: one that reads no ids"),
        ({"feed_forward": "relu"}, "feed_forward is 'relu'; allowed: gelu, geglu"),
        ({"sharing": "all"}, "sharing is 'all'; allowed: none, heads, headwise"),
        (
            {"attention": "hyena"},
            "attention is 'hyena'; allowed: linformer, coarse, full, window, lookup, lsh, luna, nystrom, sparse, or the path",
        ),
        ({"order": "any"}, "order is 'any'; allowed: compress_first, project_first"),
        ({"dropout": 1.0}, "dropout is 1.0; allowed: at least 0"),
        ({"num_layers": 0}, "num_layers is 0; allowed: 1 to 1000"),
        ({"projection_dim": 16 / 4}, "projection_dim is 4.0; allowed: a whole number"),
        ({"intermediate_size": 8 * 8 / 3}, r"intermediate_size is 21.3\d*; allowed: a whole number"),
    ],
)
def test_impossible_shapes_are_refused_when_the_config_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_inputs_that_do_not_fit_are_refused():
    encoder = Encoder(tiny())
    with pytest.raises(ValueError, match="17 tokens; allowed: up to max_length = 16"):
        encoder(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match="input_ids have no tokens; allowed: one or more in each row"):
        encoder(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 3\); allowed: input_ids', \(1, 4\)"):
        encoder(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool))
    encoder(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]))
    for row in ([0, 1, 1, 1], [1, 0, 0, 1]):
        with pytest.raises(
            ValueError, match="attention_mask has pads before real tokens; allowed: real tokens first, then pads"
        ):
            encoder(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0], row]))
