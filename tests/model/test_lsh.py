"""The Reformer's attention, compared with one softmax over the union of all rounds, one token at a time."""

import math

import pytest
import torch

from lit_linformer.model import EncoderConfig, LshAttention
from tests.model.written_out import assert_agree, made

B, D, H, LONGEST = 3, 16, 4, 40


def make(**options):
    return made(LshAttention, D, H, LONGEST, **options)


def sets_of(attention, q, h):
    """For each token in one head's q (N, d), the set of tokens in P_r(i) for any round r, by the definition."""
    found = [set() for _ in q]
    for r in range(attention.rounds):
        R = attention.rotations[h, :, r]  # (d, 2, p/2)
        buckets = []
        for row in q:
            pair = [torch.cat([row @ R[:, f], -(row @ R[:, f])]).argmax().item() for f in range(2)]
            buckets.append(tuple(pair))
        order = sorted(range(len(q)), key=lambda i: (buckets[i], i))
        c = attention.chunk
        for s, i in enumerate(order):
            first = s // c * c
            near = order[max(0, first - c // 2) : first + c + c // 2]
            found[i] |= {t for t in near if buckets[t] == buckets[i]}
    return found


def written_out(attention, x):
    """One row without padding, (N, D): the output, (N, D), and the maps."""
    heads, maps = [], []
    for h, rows in enumerate(torch.arange(D).split(D // H)):
        q, v = (x @ part.weight[rows].T + part.bias[rows] for part in (attention.query, attention.value))
        k = q / q.norm(dim=-1, keepdim=True) * math.sqrt(D // H)
        scores = torch.full((len(x), len(x)), -1e30, dtype=x.dtype)
        for i, others in enumerate(sets_of(attention, q.detach(), h)):
            others = sorted(others - {i}) or [i]
            scores[i, others] = q[i] @ k[others].T / math.sqrt(D // H)
        maps.append(scores.softmax(-1))
        heads.append(maps[-1] @ v)
    return attention.out(torch.cat(heads, -1)), torch.stack(maps)


@pytest.mark.parametrize("options", [{}, {"chunk": 4, "rounds": 3}, {"chunk": 2, "rounds": 1}])
@pytest.mark.parametrize(("length", "lengths"), [(LONGEST, None), (13, None), (1, None), (23, (23, 9, 1))])
def test_is_the_papers_formula(options, length, lengths):
    attention = make(**options)
    mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    found, (told, maps) = attention(x, mask)[0], attention(x, mask, need_weights=True)
    for b, real in enumerate(lengths or [length] * B):
        expected, expected_maps = written_out(attention, x[b, :real])
        assert_agree(found[b, :real], expected, x)
        torch.testing.assert_close(told[b, :real], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(maps[b, :, :real, :real], expected_maps, rtol=1e-10, atol=1e-10)


def test_it_finds_what_is_alike_however_far():
    attention = make(rounds=4, chunk=8)
    x = torch.randn(1, LONGEST, D, dtype=torch.float64)
    x[0, 37] = x[0, 2] + 1e-3 * torch.randn(D, dtype=torch.float64)
    maps = attention(x, need_weights=True)[1]
    assert (maps[0, :, 2, 37] > 0).all() and (maps[0, :, 37, 2] > 0).all()
    assert (maps[0] > 0).double().mean() < 0.7  # but not everywhere


def test_the_same_seed_gives_the_same_buckets():
    assert torch.equal(make().rotations, make().rotations)
    assert "rotations" in make().state_dict()


def test_refused():
    for options, said in (
        ({"chunk": 5}, "chunk is 5; allowed: an even number"),
        ({"chunk": 0}, "chunk is 0; allowed: 2 to 4096"),
        ({"rounds": 0}, "rounds is 0; allowed: 1 to 64"),
    ):
        with pytest.raises(ValueError, match=f"attention_options.{said}"):
            EncoderConfig(attention="lsh", attention_options=options)
