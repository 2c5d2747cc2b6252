"""The formulas of model/flops.py compared with torch's own count on the real model."""

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_linformer.model import Encoder, EncoderConfig, Linear, MaskedLanguageModel, SequenceClassifier
from lit_linformer.model.flops import forward_flops, training_flops
from lit_linformer.studies.benchmark.models import operations
from lit_linformer.tasks import SequenceClassification
from tests.model.mechanisms import MECHANISMS, MODERNS
from tests.studies.conftest import settings_of

B, N, M, V = 3, 32, 5, 40
SHARINGS = ("none", "heads", "headwise", "key-value", "layerwise")
CASES = [
    {"attention": "full"},
    *({"sharing": sharing, "order": order} for sharing in SHARINGS for order in ("compress_first", "project_first")),
    *({"sharing": sharing, "projection": "gaussian"} for sharing in SHARINGS),
    {"sharing": "headwise", "projection": f"{__name__}.Frozen"},
    {"sharing": "key-value", "projection_dim": [8, 4]},
    *({"attention": "lookup", "sharing": sharing, "attention_options": {"chunk": 12}} for sharing in SHARINGS),
    {"sharing": "headwise", "projection": "mean"},
    *MECHANISMS.values(),
    *(settings | {"local_width": 0} for settings in MODERNS.values()),
]


class Frozen(Linear):
    def __init__(self, **shape):
        super().__init__(**shape)
        self.weight.requires_grad_(False)


def config(**settings):
    shape = {"vocab_size": V, "max_length": N, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    return EncoderConfig(**{**shape, "projection_dim": 8, "dropout": 0.0, "attention_dropout": 0.0, **settings})


def counted(action):
    # Torch does not count the fused CPU kernel; it does count the same products unfused.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        action()
    return counter.get_total_flops()


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: " ".join(map(str, settings.values())))
def test_counts_are_torchs(settings):
    c = config(**settings)
    model = MaskedLanguageModel(c)
    ids, positions, labels = (torch.randint(1, V, (B, n)) for n in (N, M, M))
    positions = positions.clamp(max=N - 1)
    assert counted(lambda: model(ids, None, positions)) == B * forward_flops(model.encoder, N, M)
    assert counted(lambda: model.loss(ids, positions, labels).backward()) == B * training_flops(model.encoder, N, M)


def test_counts_of_tokens_that_are_numbers():
    model, tokens = SequenceClassifier(config(input_size=6), 3), torch.randn(B, N, 6)
    assert counted(lambda: model(tokens)) == B * forward_flops(model.encoder, N, labels=3)
    assert counted(lambda: model(tokens).sum().backward()) == B * training_flops(model.encoder, N, labels=3)


@pytest.mark.parametrize("length", [4, 20])  # fewer tokens than slots, and more
def test_counts_of_shorter_rows_and_of_a_classifier(length):
    for settings in ({}, {"short_rows": "mean"}, {"sharing": "headwise"}, {"order": "project_first"}, {"attention": "full"}):
        c = config(**settings)
        model, ids = SequenceClassifier(c, 3), torch.randint(1, V, (B, length))
        assert counted(lambda model=model, ids=ids: model(ids)) == B * forward_flops(model.encoder, length, labels=3)
        assert counted(lambda model=model, ids=ids: model(ids).sum().backward()) == B * training_flops(
            model.encoder, length, labels=3
        )


@pytest.mark.parametrize("learning", [0, 1, 2])
@pytest.mark.parametrize("settings", [{}, {"sharing": "headwise"}, {"attention": "full"}, {"input_size": 6}], ids=str)
def test_counts_with_frozen_layers(settings, learning):
    shape = {"encoder": config(norm="pre", **settings), "num_labels": 3, "dropout": 0.0, "attention_dropout": 0.0}
    model = SequenceClassification(trained_layers=learning, **shape).net
    tokens = torch.randn(B, N, 6) if "input_size" in settings else torch.randint(1, V, (B, N))
    assert counted(lambda: model(tokens).sum().backward()) == B * training_flops(model.encoder, N, labels=3)


def test_counts_of_the_convolutions():
    ids = torch.randint(1, V, (B, 20))
    c = config(local_width=3)  # forward alone: of a grouped convolution's backward pass torch counts every pair of channels
    encoder = Encoder(c)
    assert counted(lambda: encoder(ids)) == B * forward_flops(encoder, 20)
    # A convolutional E is computed as a product and a sum, which torch does not count: 2 D for each of N tokens and layer, or
    # of n where short rows are filled.
    for short_rows, tokens in (("zeros", 20), ("mean", N)):
        encoder = Encoder(config(projection="conv", short_rows=short_rows))
        assert counted(partial(encoder, ids)) == B * (forward_flops(encoder, 20) - 2 * 2 * tokens * 16)


def test_studies_count_the_same():
    settings = settings_of("--hidden_size", "768", "--num_heads", "12", "--local_width", "5")
    encoder = Encoder(EncoderConfig(vocab_size=9, num_layers=1, local_width=5, max_length=1024))
    assert forward_flops(encoder, 1024) == 1024 * operations("linformer 128", settings, 1024)
    with torch.device("meta"):
        base = Encoder(EncoderConfig(vocab_size=50000, attention="full"))
    # By hand: 12 layers of 24 D² + 4 n D per token, and the head at 77 of 512 tokens.
    assert forward_flops(base, 512, 77) == 12 * 512 * (24 * 768**2 + 4 * 512 * 768) + 77 * (2 * 768**2 + 2 * 768 * 50000)
