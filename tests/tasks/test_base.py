"""What all tasks share."""

import traceback
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.model import EncoderConfig
from lit_linformer.tasks import MLM, TrainingModule
from lit_linformer.tasks.base import seed_torch


@pytest.fixture
def stacks(monkeypatch):
    """How often the stack is formatted."""
    found = []
    real = traceback.format_stack
    monkeypatch.setattr(traceback, "format_stack", lambda *args, **more: found.append(1) or real(*args, **more))
    return found


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_batch_is_seeded_as_torch_seeds_it(seed, stacks):
    torch.manual_seed(seed)
    expected, noted = torch.rand(4), len(stacks)
    seed_torch(seed)
    assert noted and len(stacks) == noted, "it noted the stack for a device that is not there"
    assert torch.equal(torch.rand(4), expected)


def test_devices_in_use_are_seeded_too(monkeypatch):
    seeded = []
    device = SimpleNamespace(is_initialized=lambda: True, manual_seed_all=seeded.append)
    monkeypatch.setattr(torch, "cuda", device)
    seed_torch(5)
    assert seeded == [5]


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
