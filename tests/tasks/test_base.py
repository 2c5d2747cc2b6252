"""What all tasks share."""

from types import SimpleNamespace

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.tasks import MLM, SequenceClassification, TrainingModule
from lit_linformer.tasks.sharding import check_whole
from lit_linformer.utils.errors import UserError

SHAPE = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8, "projection_dim": 4}


@pytest.mark.parametrize("equal", [True, False])
def test_cudnn_s_attention_is_for_rows_of_one_length_and_never_for_the_texts_of_predict(equal):
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **SHAPE))
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


@pytest.mark.parametrize("task", [MLM, SequenceClassification])
def test_what_a_subclass_has_beside_its_net_is_trained_too(task):
    class Own(task):
        def __init__(self, encoder, **more):
            super().__init__(encoder=encoder, **more)
            self.generator = Encoder(encoder)
            self.generator.tokens = self.net.encoder.tokens  # shared embeddings

    more = {"num_labels": 2} if task is SequenceClassification else {}
    module = Own(encoder=EncoderConfig(vocab_size=9, max_length=8, **SHAPE), **more)
    trained = [weight for group in module.parameter_groups() for weight in group["params"]]
    assert len(trained) == len(set(trained)) and set(trained) == set(module.parameters())
    check_whole(module.net, module.net)
    with pytest.raises(UserError, match=r"generator\.positions.weight, and trainer.strategy shards"):
        check_whole(module, module.net)
