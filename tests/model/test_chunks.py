"""Rows in chunks, compared with one chunk of all tokens, which short rows are."""

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig, chunks, lookup, lsh
from tests.model.mechanisms import MECHANISMS
from tests.model.written_out import three_rows


@pytest.mark.parametrize("length", [24, 13, 5])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["sparse", "window", "lookup, window", "lookup, distance", "lookup, window, rare", "lsh"])
def test_one_chunk_gives_what_several_give(monkeypatch, name, length, padded):
    shape = {"vocab_size": 9, "max_length": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "projection_dim": 3}
    encoder = Encoder(EncoderConfig(**shape | {"initializer_range": 0.5} | MECHANISMS[name])).double().eval()
    ids, mask = torch.randint(0, 9, (3, length)), three_rows(length, padded)[1]
    real = mask if padded else torch.ones(3, length, dtype=torch.bool)
    found = []
    for whole in (False, True):
        for module in (chunks, lookup, lsh):
            monkeypatch.setattr(module, "undivided", lambda *_, whole=whole: whole)
        encoder.zero_grad()
        states = encoder(ids, mask)[real]
        states.square().sum().backward()
        maps = [part.transpose(1, 2)[real] for part in encoder(ids, mask, need_weights=True)[1].values()]
        found.append([states, *maps, *(weight.grad for weight in encoder.parameters() if weight.grad is not None)])
    for divided, undivided in zip(*found, strict=True):
        torch.testing.assert_close(undivided, divided, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("length", "chunk", "reach"), [(48, 16, 16), (32, 16, 8), (12, 4, 4), (16, 16, 0)])
def test_the_longest_row_that_is_not_divided_costs_no_more(length, chunk, reach):
    assert chunks.near_flops(length, chunk, reach, 1) == 4 * length**2 <= chunks.near_flops(length + 1, chunk, reach, 1)
    assert [chunks.columns(size, chunk, reach).shape[0] for size in (length, length + 1)] == [1, -(-(length + 1) // chunk)]
