"""Gradients of each row by torch.func, and shapes on the meta device, which holds no values."""

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_linformer.model import MaskedLanguageModel
from tests.model.mechanisms import MECHANISMS
from tests.model.test_encoder import randomised, tiny

KINDS = {"full": {"attention": "full"}, "linformer": {}, "mass": {"mass_bias": True}, "lookup": {"attention": "lookup"}}
KINDS |= MECHANISMS
N = 12
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (3, N), generator=generator)
    return ids, torch.arange(N) < torch.tensor([N, 9, 5])[:, None]


@every_kind
def test_gradients_of_each_row_by_vmap(settings):
    model, (ids, mask) = randomised(tiny(local_width=3, **settings)), rows()
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights, ids, mask):
        return functional_call(model, weights, (ids[None], mask[None]))[0, :5].square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        found = vmap(grad(loss), (None, 0, 0))(weights, ids, mask)
        expected = [grad(loss)(weights, *row) for row in zip(ids, mask, strict=True)]
    for name, gradients in found.items():
        torch.testing.assert_close(gradients, torch.stack([one[name] for one in expected]), rtol=1e-7, atol=1e-9)


@every_kind
def test_shapes_on_the_meta_device(settings):
    with torch.device("meta"):
        model, ids = MaskedLanguageModel(tiny(local_width=3, **settings)), torch.zeros(2, N, dtype=torch.int64)
        logits = model.exact_logits(ids, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, N, dtype=torch.bool))
    assert logits.shape == (2, 3, 50) and logits.is_meta
