"""The dynamic projection compared with its formula, one token and slot at a time."""

import pytest
import torch

from lit_linformer.model import PROJECTIONS, LinformerAttention, make_projection

B, N, D, H, K = 2, 9, 8, 2, 3


@pytest.mark.parametrize("heads", [None, H])
@pytest.mark.parametrize("padded", [False, True])
def test_is_the_papers_formula(heads, padded):
    torch.manual_seed(0)
    E = make_projection("dynamic", 12, K, num_heads=heads, channels=D if heads is None else D // H).double()
    assert E.scores.weight.shape == ((heads or 1) * K, D)
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(N) < torch.tensor([[N], [5]]) if padded else None
    z = x if heads is None else torch.randn(B, H, N, D // H, dtype=torch.float64)
    if padded:
        z = z.masked_fill(~(mask[..., None] if heads is None else mask[:, None, :, None]), 0.0)
    found = E.for_input(x, mask)(z, mask)
    for b in range(B):
        real = N if mask is None else int(mask[b].sum())
        for h in range(heads or 1):
            weight = E.scores.weight[h * K : (h + 1) * K]
            P = torch.stack([x[b, t] @ weight.T for t in range(real)]).softmax(0)  # (N, K)
            own = (z[b] if heads is None else z[b, h])[:real]
            torch.testing.assert_close(found[b] if heads is None else found[b, h], P.T @ own, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(E.matrix(x)[..., 0, :].sum(-1), torch.ones(() if heads is None else (H,), dtype=torch.float64))


def test_weights_are_computed_once_for_keys_and_values_and_gradients_are_right():
    torch.manual_seed(0)
    attention = LinformerAttention(D, H, N, K, sharing="heads", projection="dynamic").double()
    calls = []
    attention.E.scores.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 5, D, dtype=torch.float64, requires_grad=True)
    attention(x)
    assert len(calls) == 1 and attention.F is None
    assert torch.autograd.gradcheck(
        lambda x, W: torch.func.functional_call(attention, {"E.scores.weight": W}, (x,))[0],
        (x, attention.E.scores.weight.detach().requires_grad_()),
    )


@pytest.mark.parametrize("kind", ["dynamic", "gated"])
def test_a_forward_that_nothing_would_call_is_refused(kind):
    with pytest.raises(TypeError, match="Mine has a forward, but not the for_input that an encoder calls in its place"):
        type("Mine", (PROJECTIONS.find(kind),), {"forward": lambda self, x, mask=None: x})
