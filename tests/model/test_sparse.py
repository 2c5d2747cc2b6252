"""The Sparse Transformer's pattern, compared with a softmax over all pairs in it."""

import math

import pytest
import torch

from lit_linformer.model import EncoderConfig, SparseAttention
from tests.model.written_out import assert_agree, made, three_rows

B, D, H, LONGEST = 3, 16, 4, 24


def make(**options):
    return made(SparseAttention, D, H, LONGEST, **options)


def written_out(attention, x, mask, reach, stride):
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (attention.query(x), attention.key(x), attention.value(x)))
    scores = q @ k.transpose(2, 3) / math.sqrt(D // H)
    for h in range(H):
        for i in range(x.shape[1]):
            for t in range(x.shape[1]):
                inside = abs(i - t) <= reach if h < H // 2 else (i - t) % stride == 0
                if not inside:
                    scores[:, h, i, t] = -1e30
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -1e30)
    maps = scores.softmax(-1)
    return attention.output(maps @ v, x, mask), maps


@pytest.mark.parametrize("length", [LONGEST, 13, 2, 1])
@pytest.mark.parametrize("options", [{}, {"stride": 4, "reach": 3}, {"stride": 7}, {"stride": 1, "reach": 30}])
@pytest.mark.parametrize("padded", [False, True])
def test_is_what_is_written_out(length, options, padded):
    attention = make(**options)
    stride = options.get("stride", 5)  # √24 = 4.9
    _, mask = three_rows(length, padded)
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    expected, maps = written_out(attention, x, mask, options.get("reach", stride), stride)
    real = mask if padded else slice(None)
    found = attention(x, mask)[0]
    assert_agree(found[real], expected[real], x, 1e-12)
    told = attention(x, mask, need_weights=True)
    torch.testing.assert_close(told[0][real], expected[real], rtol=1e-12, atol=1e-12)
    for b in range(B):
        rows = slice(None) if mask is None else mask[b]
        torch.testing.assert_close(told[1][b][:, rows], maps[b][:, rows], rtol=1e-12, atol=1e-12)


def test_heads_are_halved_or_it_is_refused():
    with pytest.raises(ValueError, match="num_heads is 3; allowed with attention=sparse: an even number"):
        EncoderConfig(hidden_size=12, num_heads=3, attention="sparse")
    with pytest.raises(ValueError, match=r"attention_options.stride is 0; allowed: 1 or more"):
        EncoderConfig(attention="sparse", attention_options={"stride": 0})
