"""torch.export: one program for every length."""

import pytest
import torch
from torch.nn import functional

from lit_linformer.export import graph
from lit_linformer.export.verify import largest_difference
from lit_linformer.model import Projection, lookup
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


class Sliced(Projection):
    """A fixed E of a user's own."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.register_buffer("E", torch.randn(self.projection_dim, self.max_length))

    def forward(self, x, mask=None):
        return self.E[:, : x.shape[-2]] @ x


class Padded(Sliced):
    def forward(self, x, mask=None):
        return self.E @ functional.pad(x, (0, 0, 0, self.max_length - x.shape[-2]))


class Replaced(Sliced):
    def forward(self, x, mask=None):
        return Sliced.forward(self, x, mask)

    def any_length(self):
        padded = Padded(max_length=self.max_length, projection_dim=self.projection_dim)
        padded.load_state_dict(self.state_dict())
        return padded


def test_a_slice_of_columns_is_refused_with_the_way_out_which_padding_is():
    model = model_of({"projection": f"{__name__}.Sliced"})
    way_out = r"Sliced cannot be traced .*, and without a slice E\[:, :length\] \(pad x to n instead\)$"
    with pytest.raises(ValueError, match=way_out), graph.traceable(model, "onnx"):
        graph.traced(model)
    for name in ("Padded", "Replaced"):
        model = model_of({"projection": f"{__name__}.{name}"})
        assert largest_difference(model, graph.traced(model).module()) < 1e-5
