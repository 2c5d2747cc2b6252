"""The models that `benchmark` compares, of equal shape and equal weights.

Shapes: B batch, N tokens, H heads, D hidden width, d = D/H.
"""

import contextlib
import math
from dataclasses import fields
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_linformer.model import ATTENTIONS, Encoder, EncoderConfig, EncoderLayer, SelfAttention
from lit_linformer.model.flops import forward_flops
from lit_linformer.utils import compat
from lit_linformer.utils.errors import SettingError

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {
    "fused flash": SDPBackend.FLASH_ATTENTION,
    "fused cudnn": SDPBackend.CUDNN_ATTENTION,
    "fused efficient": SDPBackend.EFFICIENT_ATTENTION,
    "fused math": SDPBackend.MATH,
}
TRANSFORMERS = ("written-out", "fused")  # ways to compute full attention
OPTIONS = ("attention_options", "projection_options")
SET_HERE = ("attention", "projection_dim", "max_length", "dropout", "attention_dropout")  # not by a word of --models


class WrittenOutAttention(SelfAttention):
    """The Transformer's attention as the paper had it: scores and softmax are (B, H, N, N) tensors in memory."""

    def forward(self, x: Tensor, attention_mask: None = None, need_weights: bool = False) -> tuple[Tensor, None]:
        q, k, v = self.heads(x)
        # Scaling q instead of the scores saves one more N x N tensor; a baseline should be a fair one.
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        return self.output(scores.softmax(-1) @ v, x, None), None


class Layers(nn.Module):
    """An encoder without embeddings: (B, N, D) → (B, N, D). ``backend``: the attention kernel, None: what torch picks."""

    def __init__(self, config: EncoderConfig, written_out: bool = False, backend: SDPBackend | None = None):
        super().__init__()
        self.backend = backend
        self.config, self.E = config, config.attention_kind.shared(config)
        # For an attention that reads ids.
        self.register_buffer("ids", torch.randint(0, 8192, (1, config.max_length)), persistent=False)
        self.layers = nn.ModuleList(EncoderLayer(config, index) for index in range(config.num_layers))
        if written_out:
            for layer in self.layers:
                shape = (config.hidden_size, config.num_heads, config.max_length, config.local_width)
                layer.attention = WrittenOutAttention(*shape)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            given = self.layers[0].attention.of_ids(self.config, self.ids[:, : x.shape[1]].expand(len(x), -1), None)
            given = given if self.E is None else {"shared": self.E, **given}
            for layer in self.layers:
                x, _, handed_on = layer(x, None, False, given)
                given = given | handed_on
        return x


def kind_settings(word: str) -> dict[str, Any]:
    """EncoderConfig's settings from one word of --models, which names an attention and its settings.

    NAME or NAME:SETTING=VALUE+…, such as window:window=64+projection=dynamic. A SETTING is one of EncoderConfig's, or of
    attention_options, or projection_options.SETTING. ValueError for any other form.
    """
    name, _, rest = word.partition(":")
    known, found = {field.name for field in fields(EncoderConfig)}, {"attention": name}
    for part in rest.split("+") if rest else ():
        key, equals, text = part.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            equals = ""
        options, _, option = key.rpartition(".")
        if not equals or not option or key in SET_HERE or (options and options not in OPTIONS):
            raise SettingError("models", word, "NAME, or NAME:SETTING=VALUE+… as window:window=64+sharing=heads")
        if key in known:
            found[key] = value
        else:
            found.setdefault(options or "attention_options", {})[option] = value
    return found


def encoder_config(name: str, settings: dict[str, Any], n: int) -> EncoderConfig:
    """The config of a model that `build` knows, in the shape that the settings describe."""
    kind, _, k = name.partition(" ")
    attention = {**dict.fromkeys(TRANSFORMERS, "full"), "peer": "linformer"}.get(kind, kind)
    shape = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "sharing", "order", "projection", "local_width")
    described = {key: settings[key] for key in shape} | {"projection_dim": int(k) if k.isdecimal() else 1}
    return EncoderConfig(max_length=n, dropout=0.0, attention_dropout=0.0, **described | kind_settings(attention))


def operations(name: str, settings: dict[str, Any], n: int) -> float | None:
    """Operations per token and layer of a model's forward pass, matrix products only; None if its attention does not count.

    The mean of the layers, which may differ (lookup's do). With a feed-forward of 4 D: 24 D² + 4 n D for the Transformer;
    24 D² + 8 k D for project first; 20 D² + 6 k D + 4 D² k/n for compress first with E = F (the last term, W_K and W_V of the k
    slots, vanishes with k/n); 2 k D more with a separate F.
    """
    with torch.device("meta"):  # for its formulas alone
        flops = forward_flops(Encoder(encoder_config(name, settings, n)), n)
    return None if flops is None else flops / n / settings["num_layers"]


def has_slots(attention: str) -> bool:
    """Whether an attention, as given in --models, takes a k."""
    return "projection_dim" in ATTENTIONS.find(kind_settings(attention)["attention"]).settings


def build(name: str, settings: dict[str, Any], n: int, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """The model ``name``: written-out, fused, fused BACKEND, linformer K, peer K, or the class path of an attention, and its K.

    ``weights`` of another model are shared where they fit, not copied, so that many models take little memory.
    """
    kind, _, detail = name.partition(" ")
    torch.manual_seed(0)
    with torch.device(settings["device"]):
        if kind == "peer":
            from linformer import Linformer

            D, k, heads = settings["hidden_size"], int(detail), settings["num_heads"]
            model = Linformer(D, n, settings["num_layers"], k=k, heads=heads)
        else:
            model = Layers(encoder_config(name, settings, n), kind == "written-out", BACKENDS.get(name))
            if weights is not None:
                own = model.state_dict()
                fitting = {key: weight for key, weight in weights.items() if key in own and own[key].shape == weight.shape}
                model.load_state_dict(fitting, strict=False, assign=True)
    model = model.to(DTYPES[settings["precision"]]).eval()
    if settings["compile"]:
        # All models share one code object: at the default recompilation limit the ninth would silently run uncompiled.
        compat.many_recompilations()
        model.compile(dynamic=False)
    return model
