"""A command that exports, and models of every kind with random weights."""

import pytest
import torch

from lit_linformer.model import EncoderConfig, MaskedLanguageModel, SequenceClassifier
from lit_linformer.runs.trained_model import TrainedModel
from tests.helpers import output
from tests.model.mechanisms import IMAGE, MECHANISMS, MODERNS

NEEDED = {"safetensors": "safetensors", "huggingface": "transformers", "onnx": "onnxruntime", "torch": "torch"}
SHAPE = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
# For logits of equal weights: memory mapped from a file has other addresses than torch's own, so sums are computed in
# another order. 16 float32 roundings of numbers up to 4.
ROUNDING = 16 * 4 * 2**-24
VARIANTS = [
    {"attention": "full", "local_width": 3, "norm": "pre"},
    {"sharing": "layerwise", "norm": "post"},
    {"sharing": "none", "mass_bias": True},
    {"sharing": "headwise", "order": "project_first"},
    {"sharing": "key-value", "num_layers": 2, "projection_dim": [4, 8], "local_width": 3, "norm": "pre", "mass_bias": True},
    {"projection": "conv", "sharing": "none"},
    {"projection": "mean", "mass_bias": True},
    {"projection": "max"},
    {"projection": "gaussian", "sharing": "headwise", "short_rows": "mean"},
    {"short_rows": "mean"},
    {"sharing": "none", "short_rows": "mean"},
    {"projection": "conv", "short_rows": "mean"},
    IMAGE,
    *MECHANISMS.values(),
    *(MODERNS[f"modern {name}"] for name in ("full", "linformer", "window")),
    MODERNS["modern lookup"] | {"num_layers": 2},
    {"attention": "lookup", "num_layers": 2, "num_heads": 4, "attention_options": {"chunk": 4}},
]
NAMES = [" ".join(map(str, settings.values())) for settings in VARIANTS]


def export(run, form, folder, tmp_path, *extra, status=0):
    pytest.importorskip(NEEDED[form])
    argv = ["export", "--ckpt_path", str(run), "--format", form, "--output", str(folder), *extra]
    return output(argv, tmp_path, status)


def model_of(settings, classes=None):
    """A model with random weights, as `open_checkpoint` returns a trained one."""
    torch.manual_seed(0)
    config = EncoderConfig(**{**SHAPE, "projection_dim": 4, **settings})
    net = MaskedLanguageModel(config) if classes is None else SequenceClassifier(config, classes, "mean")
    for tensor in net.state_dict().values():
        tensor.add_(0.2 * torch.randn_like(tensor))
    return TrainedModel("random", net.eval(), None, config.max_length)
