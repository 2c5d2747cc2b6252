"""Lookup: one softmax over slots and tokens next to the same neighbour, compared with that written out; padding, gradients."""

import math

import pytest
import torch

from lit_linformer.model import ATTENTIONS, Encoder, EncoderConfig, LookupAttention, WindowAttention, make_projection
from lit_linformer.model.chunks import Permuted, in_order
from lit_linformer.model.lookup import neighbours, rarest
from tests.model.written_out import assert_agree, made, three_rows

B, D, H, LONGEST, K = 3, 16, 4, 24, 3


def make(**options):
    return made(LookupAttention, D, H, LONGEST, K, **{"sharing": "none", "chunk": 4, "looks_up": True, **options})


def same_neighbours(ids, mask, head, distance=1):
    """(B, N, N): whether t is next to the same neighbour as i, one token at a time, without a limit on their number."""
    shift = {1: [-1, -1, 1, 1], 2: [-1, 1, -2, 2]}[distance][head]
    length = ids.shape[1]
    found = torch.zeros(len(ids), length, length, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        real = length if mask is None else int(mask[b].sum())
        for i in range(real):
            for t in range(real):
                inside = 0 <= i + shift < real and 0 <= t + shift < real
                found[b, i, t] = i != t and inside and row[i + shift] == row[t + shift]
    return found


def rare_tokens(ids, mask, count):
    """(B, N): whether t is the first with its id in its row, and the id among the highest, one token at a time."""
    found = torch.zeros(ids.shape, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        row = row if mask is None else row[: int(mask[b].sum())]
        found[b, [row.index(id) for id in sorted(set(row))[::-1][:count]]] = True
    return found


def written_out(attention, x, ids, mask):
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (attention.query(x), attention.key(x), attention.value(x)))
    if mask is not None:
        k, v = (t.masked_fill(~mask[:, None, :, None], 0.0) for t in (k, v))
    slot_k, slot_v = attention.E(k), attention.F(v)
    heads = []
    for h in range(H):
        slots = q[:, h] @ slot_k[:, h].transpose(1, 2) / math.sqrt(D // H)
        tokens = q[:, h] @ k[:, h].transpose(1, 2) / math.sqrt(D // H) + attention.strength[h]
        tokens = tokens.masked_fill(~same_neighbours(ids, mask, h, attention.distance), -torch.inf)
        rare = q[:, h] @ k[:, h].transpose(1, 2) / math.sqrt(D // H)
        rare = rare.masked_fill(~rare_tokens(ids, mask, attention.rare)[:, None], -torch.inf)
        weights = torch.cat([slots, tokens, rare], -1).softmax(-1)
        heads.append(weights[..., :K] @ slot_v[:, h] + weights[..., K:] @ torch.cat([v[:, h]] * 2, 1))
    return attention.output(torch.stack(heads, 1), x, mask)


@pytest.mark.parametrize("length", [LONGEST, 23, 12, 9, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rare", "distance"), [(0, 1), (4, 1), (0, 2)])
def test_is_what_is_written_out(length, padded, rare, distance):
    attention = make(chunk=12, rare=rare, distance=distance)  # two chunks: all tokens are within reach
    ids = torch.randint(0, 8, (B, length))
    _, mask = three_rows(length, padded)
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    given = {"chosen": rarest(ids, mask, rare)} if rare else {}
    found, maps = attention(x, mask, True, neighbours=neighbours(ids, mask, 12, distance), **given)
    expected, real = written_out(attention, x, ids, mask), mask if padded else slice(None)
    assert_agree(found[real], expected[real], x, 1e-12)
    assert maps.shape == (B, H, length, K + length)
    torch.testing.assert_close(maps.sum(-1), torch.ones(B, H, length, dtype=torch.float64))
    read = maps @ attention.compress(x, mask)[1]
    torch.testing.assert_close(attention.output(read, x, mask)[real], found[real], rtol=1e-12, atol=1e-12)


def test_of_many_the_nearest_are_within_reach():
    ids = torch.tensor([[7, 1] * 12])  # 12 tokens have a 7 on their left, 11 have a 1
    sorted_by = neighbours(ids, None, 4)
    attention = make(chunk=4)
    maps = attention(torch.randn(1, 24, D, dtype=torch.float64), None, True, neighbours=sorted_by)[1]
    seen = (maps[0, 0, :, K:] > 0).nonzero().tolist()
    assert all((i - t) % 2 == 0 and i != t for i, t in seen)
    for i in range(1, 24, 2):  # the four before and the four after it, if there are so many, and none outside its three chunks
        near = {t for i_, t in seen if i_ == i}
        assert near >= {t for t in range(i - 8, i + 9, 2) if 0 < t < 24 and t != i} and len(near) <= 11


def test_large_ids_have_neighbours_too():
    ids = torch.randint(0, 5, (B, LONGEST))
    small, large = (neighbours(ids * times, None, 4) for times in (1, 2**21))
    assert small.same.any() and all(torch.equal(one, other) for one, other in zip(small, large, strict=True))


@pytest.mark.parametrize("distance", [1, 2])
def test_padding_and_what_stands_there_never_matter(distance):
    attention = make(sharing="headwise", mass_bias=True, rare=3, distance=distance)

    def given(ids, mask):
        return {"neighbours": neighbours(ids, mask, 4, distance), "chosen": rarest(ids, mask, 3)}

    x, ids = torch.randn(B, 13, D, dtype=torch.float64), torch.randint(0, 4, (B, 13))
    padded = torch.cat([x, torch.full((B, 8, D), torch.nan, dtype=torch.float64)], 1)
    longer = torch.cat([ids, torch.randint(0, 9, (B, 8))], 1)  # some of them rarer
    mask = torch.arange(21)[None].expand(B, -1) < 13
    alone = attention(x, **given(ids, None))[0]
    attention.query.register_forward_pre_hook(lambda module, inputs: (inputs[0].nan_to_num(5.0),))  # any query at a pad
    found = attention(padded, mask, **given(longer, mask))[0][:, :13]
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


def test_gradients_are_right_and_every_parameter_has_one():
    attention = make(order="project_first")
    ids = torch.randint(0, 4, (1, 14))
    x = torch.randn(1, 14, D, dtype=torch.float64, requires_grad=True)
    given = neighbours(ids, None, 4)
    assert torch.autograd.gradcheck(
        lambda x, b: torch.func.functional_call(attention, {"strength": b}, (x,), {"neighbours": given})[0],
        (x, attention.strength.detach().requires_grad_()),
    )
    attention(x, neighbours=given)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in attention.parameters())


def test_which_layers_look_up_and_what_is_refused():
    def encoder(**options):
        shape = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_heads": 2, "num_layers": 5, "projection_dim": 4}
        return Encoder(EncoderConfig(attention="lookup", intermediate_size=8, **{**shape, **options}))

    def layers(**options):
        return [layer.attention.sees_tokens for layer in encoder(attention_options=options).layers]

    assert layers() == [True, False, True, False, True] and layers(every=4) == [True, False, False, False, True]
    assert layers(every=1) == [True] * 5 and layers(window=4) == [True] * 5
    assert [layer.attention.looks_up for layer in encoder(attention_options={"window": 4}).layers] == layers()
    for options, said in (
        ({"attention_options": {"every": 0}}, "attention_options.every is 0; allowed: 1 or more"),
        ({"attention_options": {"chunk": 0}}, "attention_options.chunk is 0; allowed: 1 to 4096"),
        ({"attention_options": {"window": 3}}, "attention_options.window is 3; allowed: an even number"),
        ({"attention_options": {"every": "two"}}, "attention_options.every is 'two'; allowed: a whole number"),
        (
            {"attention_options": {"reach": 3}},
            "attention_options names 'reach'; allowed with attention=lookup: every, chunk, str",
        ),
        ({"num_heads": 1}, "num_heads is 1; allowed with attention=lookup: an even number"),
        (
            {"attention_options": {"distance": 2}},
            "num_heads is 2; allowed with attention=lookup and attention_options.distance=2: a multiple of 4",
        ),
    ):
        with pytest.raises(ValueError, match=said.replace(".", "\\.")):
            encoder(**options)
    with pytest.raises(ValueError, match="attention is lookup, which needs the ids"):
        make()(torch.randn(1, 5, D, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"attention is lookup, which needs the ids.*rare"):
        make(rare=2)(torch.randn(1, 5, D, dtype=torch.float64), neighbours=neighbours(torch.zeros(1, 5), None, 4))


@pytest.mark.parametrize("padded", [False, True])
def test_the_other_layers_see_a_window_where_one_is_asked_for(padded):
    layer, window = make(looks_up=False, window=4), WindowAttention(D, H, LONGEST, K, sharing="none", window=4).double()
    window.load_state_dict(layer.state_dict())
    ids, x = torch.randint(0, 8, (B, 20)), torch.randn(B, 20, D, dtype=torch.float64)
    mask = torch.arange(20) < torch.tensor([[20], [11], [1]]) if padded else None
    for found, expected in zip(layer(x, mask, True, neighbours=neighbours(ids, mask, 4)), window(x, mask, True), strict=True):
        assert torch.equal(found, expected)
    assert layer.flops(20) == window.flops(20) > make(looks_up=False).flops(20)


def test_the_other_layers_see_the_rarest_too():
    """With one chunk for all tokens and no strength, a lookup without neighbours equals a window without tokens."""
    ids, x = torch.randint(0, 8, (B, 20)), torch.randn(B, 20, D, dtype=torch.float64)
    mask = torch.arange(20) < torch.tensor([[20], [11], [1]])
    given = {
        "chosen": rarest(ids, mask, 3),
        "neighbours": neighbours(torch.arange(B * 20).view(B, 20), mask, 4),
    }  # none in common
    window, looks_up = make(looks_up=False, window=2, rare=3), make(rare=3)
    window.load_state_dict(looks_up.state_dict(), strict=False)
    window.see = lambda q, k, v, *_: (
        q.new_empty(*q.shape[:3], 0),
        lambda weights: 0,
        lambda weights: q.new_zeros(B, H, 20, 20),
    )
    for found, expected in zip(*(one(x, mask, True, **given) for one in (window, looks_up)), strict=True):
        torch.testing.assert_close(found[mask] if found.dim() == 3 else found, expected[mask] if found.dim() == 3 else expected)
    without = make(looks_up=False, window=2)
    assert looks_up.flops(20) - make().flops(20) == window.flops(20) - without.flops(20) == 4 * 20 * 3 * D


def test_all_layers_share_an_E_and_a_copied_token_is_found():
    """With weights that only mean "read the token's value", each masked token gets what followed the same neighbour before."""
    attention = make(sharing="layerwise")
    shared = make_projection("linear", LONGEST, K, channels=D).double()
    ids = torch.tensor([[9, 3, 8, 1, 9, 0, 2, 5]])  # 0 has the second 9 on its left, 3 the first
    x = torch.nn.functional.one_hot(ids, D).double()
    torch.nn.init.zeros_(attention.query.weight)
    torch.nn.init.zeros_(attention.query.bias)
    torch.nn.init.constant_(attention.strength, 50.0)
    torch.nn.init.eye_(attention.value.weight)
    torch.nn.init.zeros_(attention.value.bias)
    torch.nn.init.eye_(attention.out.weight)
    torch.nn.init.zeros_(attention.out.bias)
    found = attention(x, shared=shared, neighbours=neighbours(ids, None, 4))[0]
    half = D // 2
    torch.testing.assert_close(found[0, 5, :half], x[0, 1, :half])
    assert found[0, 5, half:].max() < 0.5  # no other token has a 2 on its right


@pytest.mark.parametrize("distance", [1, 2])
def test_a_long_row_gives_the_same_by_one_head_of_each_group_at_a_time(monkeypatch, distance):
    torch.manual_seed(0)
    layer = LookupAttention(16, 8, 32, 4, looks_up=True, local_width=3, distance=distance).double()
    projection = make_projection("linear", 32, 4, channels=16).double()
    x, ids = torch.randn(2, 30, 16, dtype=torch.float64), torch.randint(0, 5, (2, 30))
    found = []
    for longest in (30, 29):
        monkeypatch.setattr("lit_linformer.model.lookup.LONG", longest)
        layer.zero_grad()
        out, _ = layer(x, None, shared=projection, neighbours=neighbours(ids, None, 16, distance))
        out.square().sum().backward()
        with torch.no_grad():
            predicted, _ = layer(x, None, shared=projection, neighbours=neighbours(ids, None, 16, distance))
        found.append([out, predicted, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)])
    for whole, by_heads in zip(*found, strict=True):
        torch.testing.assert_close(whole, by_heads, rtol=1e-12, atol=1e-12)


def test_gradients_of_rows_in_another_order():
    """Equal to those of in_order, bit for bit; its second derivatives are right, and vmap works."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(2, 3, 7, generator=generator).argsort(-1)
    x = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(x.shape, dtype=x.dtype, generator=generator)

    def read(x, order):
        return Permuted.apply(x, order, order.argsort(-1))

    plain = in_order(x, order)
    assert torch.equal(read(x, order), plain)
    expected = torch.autograd.grad((plain * weight).sum(), x)[0]
    assert torch.equal(torch.autograd.grad((read(x, order) * weight).sum(), x)[0], expected)
    torch.autograd.gradgradcheck(lambda x: read(x, order).square(), x)
    assert torch.equal(torch.vmap(read)(x, order), plain)


def test_no_gradient_of_a_layer_is_a_sum_over_rows_read():
    """On a GPU such a sum is slow, and adds in any order."""
    attention, ids = make(), torch.randint(0, 3, (B, LONGEST))
    x = torch.randn(B, LONGEST, D, dtype=torch.float64, requires_grad=True)
    attended, _ = attention(x, neighbours=neighbours(ids, None, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attended.sum().backward()
    called = {event.name for event in profile.events()}
    assert "aten::index_select" in called
    assert not called & {"aten::index_add_", "aten::index_put_", "aten::scatter_add_", "aten::_index_put_impl_"}


class EachLayer(LookupAttention):
    """With other defaults than its parent's."""

    def __init__(self, *shape, every=1, chunk=2, window=4, rare=3, **more):
        super().__init__(*shape, every=every, chunk=chunk, window=window, rare=rare, **more)


def test_a_class_of_ones_own_may_have_other_defaults():
    shape = {"vocab_size": 30, "max_length": LONGEST, "hidden_size": D, "num_heads": H, "num_layers": 3, "projection_dim": K}
    path, options = f"{__name__}.EachLayer", {"every": 1, "chunk": 2, "window": 4, "rare": 3}
    kinds = {"attention": path}, {"attention": "lookup", "attention_options": options}
    own, named = (Encoder(EncoderConfig(**shape, **kind)).eval() for kind in kinds)
    named.load_state_dict(own.state_dict())
    ids = torch.randint(0, 30, (B, LONGEST - 1))
    assert torch.equal(own(ids), named(ids)) and all(layer.attention.looks_up for layer in own.layers)
    columns = [
        [ATTENTIONS.find(one.config.attention).columns(one.config, layer, 9) for layer in range(3)] for one in (own, named)
    ]
    assert columns[0] == columns[1]
