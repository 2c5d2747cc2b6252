"""What all tasks share."""

from types import SimpleNamespace

import pytest
import torch

from lit_linformer.model import EncoderConfig
from lit_linformer.tasks import MLM, TrainingModule


@pytest.mark.parametrize("equal", [True, False])
def test_cudnn_s_attention_is_for_rows_of_one_length_and_never_for_the_texts_of_predict(equal):
    shape = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8, "projection_dim": 4}
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **shape))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(equal_rows=equal))
    module.trainer = trainer
    found = {}
    for stage in ("fit", "validate", "test", "predict"):
        module.setup(stage)
        found[stage] = torch.backends.cuda.cudnn_sdp_enabled()
        module.teardown(stage)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert found == {"fit": equal, "validate": equal, "test": equal, "predict": False}


def test_a_setup_of_one_s_own_need_not_call_ours():
    class Own(TrainingModule):
        def setup(self, stage):
            pass

    module = Own()
    module.setup("fit")
    module.teardown("fit")
    assert torch.backends.cuda.cudnn_sdp_enabled()
