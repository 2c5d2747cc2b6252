"""Every kind of model as a transformers model: the same weights, the same logits."""

import pytest

from lit_linformer.export.verify import largest_difference
from tests.export.models import NAMES, ROUNDING, VARIANTS, model_of
from tests.helpers import assert_same


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
def test_transformers_model_has_equal_weights_whatever_the_model(settings, tmp_path):
    pytest.importorskip("transformers")
    from lit_linformer.export import huggingface_folder as hf_folder
    from lit_linformer.runs.exported import read_weights

    for classes in (None, 1):
        model = model_of(settings, classes)
        hf_folder.write(model, tmp_path / str(classes))
        assert_same(dict(model.net.state_dict()), read_weights(tmp_path / str(classes)))
        assert largest_difference(model, hf_folder.logits(model, tmp_path / str(classes))) <= ROUNDING
