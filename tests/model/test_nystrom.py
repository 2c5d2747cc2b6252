"""The Nyströmformer's three matrices written out, row by row, with the landmarks of each row."""

import math

import pytest
import torch

from lit_linformer.model import EncoderConfig, NystromAttention
from tests.model.written_out import assert_agree, made, three_rows

B, D, H, LONGEST, K = 3, 16, 4, 24, 6


def make(**options):
    return made(NystromAttention, D, H, LONGEST, K, std=0.5, **options)


def written_out(attention, x, inverse):
    """One row without padding, (N, D), one head at a time; the landmarks are means over windows of n/K tokens."""
    heads = []
    for rows in torch.arange(D).split(D // H):
        q, k, v = (x @ part.weight[rows].T + part.bias[rows] for part in (attention.query, attention.key, attention.value))
        mean_q, mean_k = (torch.stack([window.mean(0) for window in part.split(LONGEST // K)]) for part in (q, k))
        scale = math.sqrt(D // H)
        kernels = [(a @ b.T / scale).softmax(-1) for a, b in ((q, mean_k), (mean_q, mean_k), (mean_q, k))]
        heads.append(kernels[0] @ inverse(kernels[1]) @ kernels[2] @ v)
    return attention.out(torch.cat(heads, -1))


def iterated(A):
    Z = A.T / (A.abs().sum(0).max() * A.abs().sum(1).max())
    for _ in range(6):
        Z = (
            0.25
            * Z
            @ (
                13 * torch.eye(len(A), dtype=A.dtype)
                - A @ Z @ (15 * torch.eye(len(A), dtype=A.dtype) - A @ Z @ (7 * torch.eye(len(A), dtype=A.dtype) - A @ Z))
            )
        )
    return Z


@pytest.mark.parametrize("length", [LONGEST, 13, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
def test_is_the_papers_formula(length, padded):
    attention = make()
    lengths, mask = three_rows(length, padded)
    x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    found, maps = attention(x, mask, need_weights=True)
    for b, real in enumerate(lengths):
        expected = written_out(attention, x[b, :real], iterated)
        assert_agree(found[b, :real], expected, x)
        torch.testing.assert_close(attention(x, mask)[0][b, :real], expected, rtol=1e-10, atol=1e-10)
    values = attention.value(x).unflatten(-1, (H, -1)).transpose(1, 2)
    values = values if mask is None else values.masked_fill(~mask[:, None, :, None], 0.0)
    read = attention.output(maps @ values, x, mask)
    rows = slice(None) if mask is None else mask
    torch.testing.assert_close(read[rows], found[rows], rtol=1e-10, atol=1e-10)


def test_the_iteration_finds_the_pseudo_inverse():
    attention, x = make(iterations=60), torch.randn(1, 17, D, dtype=torch.float64)
    expected = written_out(attention, x[0], torch.linalg.pinv)
    torch.testing.assert_close(attention(x)[0][0], expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_right():
    attention = make(iterations=3)
    x = torch.randn(1, 9, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attention(x)[0], (x,))


def test_refused():
    with pytest.raises(ValueError, match=r"projection_dim \(k\) is 100, but attention='nystrom' works on windows .* 512"):
        EncoderConfig(attention="nystrom", projection_dim=100)
    with pytest.raises(ValueError, match=r"projection_dim lists 2 numbers; allowed: one, or num_layers = 12"):
        EncoderConfig(attention="nystrom", projection_dim=[64, 128])
    with pytest.raises(ValueError, match=r"attention_options.iterations is 0; allowed: 1 or more"):
        EncoderConfig(attention="nystrom", attention_options={"iterations": 0})


def test_the_inverse_of_half_precision_is_computed_in_float32():
    attention = NystromAttention(D, H, LONGEST, K)
    q, k = torch.randn(2, 1, H, K, D // H).bfloat16()
    there = torch.ones(1, 1, K, dtype=torch.bool)
    assert torch.equal(attention._inverse(q, k, there), attention._inverse(q.float(), k.float(), there))
