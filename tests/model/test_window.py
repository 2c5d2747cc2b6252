"""Slots and a window in one softmax, compared with both written out for all tokens; the Long-Short Transformer's model."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm

from lit_linformer.model import EncoderConfig, WindowAttention, make_projection
from tests.model.written_out import assert_agree, made, three_rows

B, D, H, LONGEST, K = 3, 16, 4, 24, 3


def make(**options):
    return made(WindowAttention, D, H, LONGEST, K, **{"sharing": "none", "window": 4, **options})


def written_out(attention, x, mask, window):
    """(B, N, D) and the maps: one softmax over slots and all tokens, with those outside the window masked."""
    tokens = [linear(x) for linear in (attention.key, attention.value)]
    if attention.token_norm is not None:
        tokens = [layer_norm(t, (D,), attention.token_norm.weight, attention.token_norm.bias) for t in tokens]
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (attention.query(x), *tokens))
    if mask is not None:
        k, v = (t.masked_fill(~mask[:, None, :, None], 0.0) for t in (k, v))
    E, F = attention.E, attention.F or attention.E
    slots = [E.for_input(x, mask)(k, mask), F.for_input(x, mask)(v, mask)]
    if attention.slot_norm is not None:
        for number, part in enumerate(slots):
            whole = torch.cat(part.unbind(1), -1)  # concatenated heads
            whole = layer_norm(whole, (D,), attention.slot_norm.weight, attention.slot_norm.bias)
            slots[number] = torch.stack(whole.split(D // H, -1), 1)
    place = torch.arange(x.shape[1])
    first = place // window * window
    near = (place >= first[:, None] - window // 2) & (place < first[:, None] + window + window // 2)
    near = near if mask is None else near & mask[:, None, None]
    to_tokens = (q @ k.transpose(2, 3) / math.sqrt(D // H)).masked_fill(~near, -1e30)
    maps = torch.cat([q @ slots[0].transpose(2, 3) / math.sqrt(D // H), to_tokens], -1).softmax(-1)
    return attention.output(maps @ torch.cat([slots[1], v], 2), x, mask), maps


CASES = {
    "a matrix a head": {},
    "project first": {"sharing": "headwise", "order": "project_first", "window": 6},
    "wider than the row": {"window": 40},
    "long-short": {"projection": "dynamic", "sharing": "heads", "dual_norm": True},
}


@pytest.mark.parametrize("length", [LONGEST, 13, 2, 1])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_is_what_is_written_out(length, options, padded):
    attention = make(**options)
    _, mask = three_rows(length, padded)
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    (found, maps), real = attention(x, mask, True), mask if padded else slice(None)
    expected, all_maps = written_out(attention, x, mask, options.get("window", 4))
    assert_agree(found[real], expected[real], x)
    for b in range(B):
        rows = slice(None) if mask is None else mask[b]
        torch.testing.assert_close(maps[b][:, rows], all_maps[b][:, rows], rtol=1e-10, atol=1e-10)
    read = maps @ attention.compress(x, mask)[1]
    torch.testing.assert_close(attention.output(read, x, mask)[real], found[real], rtol=1e-10, atol=1e-10)


def test_compresses_first_with_one_E_for_all_layers():
    attention, shared = make(sharing="layerwise", dual_norm=True), make_projection("linear", LONGEST, K, channels=D).double()
    x = torch.randn(B, 7, D, dtype=torch.float64)
    _, maps = attention(x, None, True, shared)
    slots = [attention.slot_norm(linear(shared.weight[:, :7] @ x)) for linear in (attention.key, attention.value)]
    tokens = [attention.token_norm(linear(x)) for linear in (attention.key, attention.value)]
    k, v = (torch.cat(pair, 1).unflatten(-1, (H, -1)).transpose(1, 2) for pair in zip(slots, tokens, strict=True))
    for found, expected in zip(attention.compress(x, None, shared), (k, v), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    scores = attention.query(x).unflatten(-1, (H, -1)).transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(D // H)
    torch.testing.assert_close(maps[..., :K] / maps[..., :K].sum(-1, keepdim=True), scores[..., :K].softmax(-1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention_options": {"window": 5}}, "attention_options.window is 5; allowed: an even number"),
        ({"attention_options": {"window": 0}}, "attention_options.window is 0; allowed: 2 to 65536"),
        ({"attention_options": {"window": "wide"}}, "attention_options.window is 'wide'; allowed: a whole number"),
        ({"attention_options": {"dual_norm": 1}}, "attention_options.dual_norm is 1; allowed: true or false"),
        ({"attention_options": {"chunk": 4}}, "attention_options names 'chunk'; allowed with attention=window: window, dual"),
    ],
)
def test_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        EncoderConfig(attention="window", **settings)
