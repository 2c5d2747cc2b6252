"""Names and initialisation of every kind's weights, as of the commit before the kinds became classes of their own."""

import json
from pathlib import Path

import pytest
import torch

from lit_linformer.model import EncoderConfig, MaskedLanguageModel

STORED = json.loads(Path(__file__).with_name("starts.json").read_text())


def number(tensor):
    """A checksum of all values and their order."""
    flat = tensor.detach().double().flatten()
    return float((flat * torch.linspace(1, 2, len(flat), dtype=torch.float64)).sum())


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: " ".join(map(str, case["settings"].values())))
def test_names_shapes_starts_and_logits_are_the_old_ones(case):
    torch.manual_seed(0)
    net = MaskedLanguageModel(EncoderConfig(**STORED["shape"] | case["settings"])).eval()
    state = net.state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == STORED["common"] | case["shapes"]
    weights = sum(place * number(tensor) for place, tensor in enumerate(state.values(), 1))
    assert weights == pytest.approx(case["weights"], rel=1e-6)
    ids, mask = torch.arange(48).reshape(3, 16) * 7 % 20, torch.arange(16) < torch.tensor([[16], [9], [2]])
    with torch.no_grad():
        logits = [number(net(ids, mask)), number(net(ids[:, :3]))]
    assert logits == pytest.approx(case["logits"], rel=1e-4)
