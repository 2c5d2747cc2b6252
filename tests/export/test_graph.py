"""torch.export: one program for every length."""

import pytest

from lit_linformer.export import graph
from lit_linformer.export.verify import largest_difference
from tests.export.models import NAMES, VARIANTS, model_of

SLOW = [pytest.param(settings, marks=pytest.mark.slow) for settings in VARIANTS[1:-1]]


@pytest.mark.parametrize("settings", [VARIANTS[0], *SLOW, VARIANTS[-1]], ids=NAMES)
def test_one_program_for_every_length_whatever_the_model(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "write_config", lambda model, folder: None)
    model = model_of(settings, classes=3)
    graph.write(model, tmp_path)
    assert largest_difference(model, graph.logits(model, tmp_path)) < 1e-5
