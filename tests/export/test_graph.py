"""torch.export: one program for every length."""

import pytest

from lit_linformer.export import graph
from lit_linformer.export.verify import largest_difference
from lit_linformer.model import lookup
from tests.export.models import VARIANTS, model_of
from tests.helpers import slow
from tests.model.mechanisms import MECHANISMS, MODERNS

# Each of these is a part of another one.
PARTS = [*(MECHANISMS[name] for name in ("window", "lookup, window", "coarse", "gated")), MODERNS["modern window"]]
CASES = [settings for settings in VARIANTS if settings not in PARTS]


@pytest.mark.parametrize(
    "settings", [CASES[0], *map(slow, CASES[1:-1]), CASES[-1]], ids=lambda settings: " ".join(map(str, settings.values()))
)
def test_one_program_for_every_length_whatever_the_model(settings):
    model = model_of(settings, classes=3)
    assert largest_difference(model, graph.traced(model).module()) < 1e-5


@pytest.mark.slow
def test_lookup_is_one_program_for_rows_that_it_reads_by_pairs_of_heads(tmp_path, monkeypatch):
    """To save memory it does so for rows of more than LONG tokens, here 8 of up to 16."""
    monkeypatch.setattr(lookup, "LONG", 8)
    model = model_of(MECHANISMS["lookup, window"] | {"num_layers": 2})
    graph.write(model, tmp_path)
    assert largest_difference(model, graph.logits(model, tmp_path)) < 1e-5


def test_a_masked_model_whose_program_has_other_logits_at_pads(tmp_path):
    """The program attends to all pairs, the model in chunks: logits agree at tokens, and those of padding are never read."""
    model = model_of(MECHANISMS["sparse"] | {"num_heads": 4})
    graph.write(model, tmp_path)
    written = graph.logits(model, tmp_path)
    assert largest_difference(model, written) < 1e-5
    for wrong in (0.01, float("nan")):
        with pytest.raises(ValueError, match="the export differs from the checkpoint by"):
            largest_difference(model, lambda ids, mask, wrong=wrong: written(ids, mask) + wrong * mask[..., None])
