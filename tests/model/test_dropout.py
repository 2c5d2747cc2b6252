"""Dropout: where it is, and that each head of every attention drops weights, in training alone."""

import pytest
import torch

from lit_linformer.model import Encoder, SequenceClassifier
from tests.model.mechanisms import MECHANISMS
from tests.model.test_encoder import tiny


def test_dropout_acts_only_in_training():
    encoder = Encoder(tiny(dropout=0.5, attention_dropout=0.5))
    ids = torch.randint(0, 50, (2, 16))
    assert not torch.equal(encoder(ids), encoder(ids))
    encoder.eval()
    assert torch.equal(encoder(ids), encoder(ids))


DROPPING = {"full": {"attention": "full"}, "linformer": {}, "lookup": {"attention": "lookup"}, **MECHANISMS}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", DROPPING)
def test_every_head_drops_attention_weights_in_training(name, need_weights):
    torch.manual_seed(0)
    encoder = Encoder(tiny(num_layers=1, attention_dropout=0.5, **DROPPING[name]))
    ids, found = torch.randint(0, 50, (2, 16)), []
    encoder.layers[0].attention.out.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    for _ in range(2):
        encoder(ids, need_weights=need_weights)
    first, second = (x.unflatten(-1, (2, -1)) for x in found)  # (B, N, H, d)
    assert (first != second).any(-1).any(1).all()


def test_dropout_is_on_the_embeddings_and_on_the_output_of_each_sublayer():
    encoder = Encoder(tiny(dropout=0.5))
    calls = []
    for name, module in encoder.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output, name=name: calls.append(name))
    encoder(torch.randint(0, 50, (2, 16)))
    assert calls == ["dropout", *["layers.0.dropout"] * 2, *["layers.1.dropout"] * 2]


def test_a_classifier_drops_before_and_after_its_dense_layer():
    model, calls = SequenceClassifier(tiny(), 3), []
    model.head.dropout.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randint(0, 50, (2, 9)))
    assert len(calls) == 2
