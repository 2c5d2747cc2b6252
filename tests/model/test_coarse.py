"""Slots and the best windows in one softmax, compared with both written out, one window and token at a time."""

import math

import pytest
import torch

from lit_linformer.model import CoarseAttention, EncoderConfig
from tests.model.written_out import assert_agree, made

B, D, H, LONGEST, K = 3, 16, 4, 24, 6


def make(**options):
    return made(CoarseAttention, D, H, LONGEST, K, **{"sharing": "none", **options})


def written_out(attention, x):
    """One row without padding, (N, D): the output (N, D) and the maps (H, N, K + N)."""
    width, heads, maps = LONGEST // K, [], []
    for h, rows in enumerate(torch.arange(D).split(D // H)):
        q, k, v = (x @ part.weight[rows].T + part.bias[rows] for part in (attention.query, attention.key, attention.value))
        mean_q, mean_k = (torch.stack([window.mean(0) for window in part.split(width)]) for part in (q, k))
        slots = [E.weight[h, :, : len(x)] @ part for E, part in ((attention.E, k), (attention.F, v))]
        scores = torch.full((len(x), len(x)), -1e30, dtype=x.dtype)
        for i in range(len(x)):
            best = (mean_q[i // width] @ mean_k.T).argsort(descending=True)[: attention.best].tolist()
            tokens = [t for t in range(len(x)) if t // width in best]
            scores[i, tokens] = q[i] @ k[tokens].T / math.sqrt(D // H)
        maps.append(torch.cat([q @ slots[0].T / math.sqrt(D // H), scores], -1).softmax(-1))
        heads.append(maps[-1] @ torch.cat([slots[1], v]))
    return attention.out(torch.cat(heads, -1)), torch.stack(maps)


@pytest.mark.parametrize("best", [1, 2, 6])
@pytest.mark.parametrize(("length", "lengths"), [(LONGEST, None), (13, None), (1, None), (19, (19, 9, 1))])
def test_is_what_is_written_out(best, length, lengths):
    attention = make(best=best)
    mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    found, (told, maps) = attention(x, mask)[0], attention(x, mask, need_weights=True)
    for b, real in enumerate(lengths or [length] * B):
        expected, expected_maps = written_out(attention, x[b, :real])
        assert_agree(found[b, :real], expected, x)
        torch.testing.assert_close(told[b, :real], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(maps[b, :, :real, : K + real], expected_maps, rtol=1e-10, atol=1e-10)
    if mask is None:
        read = attention.output(maps @ attention.compress(x)[1], x, None)
        torch.testing.assert_close(read, found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"attention_options": {"best": 129}},
            r"attention_options.best is 129; allowed: up to projection_dim = 128, the windows",
        ),
        ({"attention_options": {"best": 0}}, r"attention_options.best is 0; allowed: 1 or more"),
        ({"projection_dim": 100}, r"projection_dim \(k\) is 100, but attention='coarse' works on windows"),
    ],
)
def test_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        EncoderConfig(**{"attention": "coarse", **settings})
