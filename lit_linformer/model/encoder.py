"""The encoder: embeddings, then layers of attention (of any kind) and feed-forward.

Shapes: B batch, N tokens (N <= n = max_length), K = k projected slots, H heads, D hidden width, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from .attention import ATTENTIONS, Attention, LocalConvolution, check_heads, check_width
from .errors import SettingError, UserError
from .parts import FEED_FORWARDS, NORM_TYPES, POSITIONS, check_input, check_mask, check_parts, inner_width, make_norm
from .projection import SHORT_ROWS, Projection
from .ranges import Dropout, Natural, OneOf, Range, check_ranges
from .registry import check_shape
from .starts import FITS

NORMS = ("post", "pre")
Size = Annotated[int, Range(least=1, largest=2**24)]


@dataclass
class EncoderConfig:
    """Shape of an encoder. The defaults are RoBERTa-base's, with the paper's layerwise k = 128.

    Args:
        vocab_size: V, entries of the vocabulary.
        max_length: n, the longest input in tokens.
        hidden_size: D, width of the residual stream.
        num_layers: layers of attention and feed-forward.
        num_heads: H, heads in each layer; must divide hidden_size.
        intermediate_size: width of the feed-forward; 4 D in the paper. geglu uses two thirds of it, rounded to a multiple of 8.
        attention: linformer; lookup: a Linformer that also looks up where else a token's neighbour occurs; window: one that
            also sees nearby tokens; coarse: one that also sees the windows that matter most; lsh (Reformer), luna, nystrom,
            sparse: others that save time (docs/models.md); full: the Transformer, on fused attention; or the path of a class
            of your own, such as my_ideas.Window in my_ideas.py (docs/extending.md).
        attention_options: the attention's own settings, by name.
        projection_dim: k, the number of slots that keys and values are compressed to, or a list with one k for each layer.
        sharing: which projections are shared (section 4): none | headwise | key-value | layerwise; or heads (one matrix for
            each head, for both keys and values).
        projection: linear (learned E) | conv (kernel and stride n/k) | mean | max | gaussian (fixed, random) | dynamic, gated
            (computed from the input), or the path of a class of your own, such as my_ideas.Salient in my_ideas.py.
        projection_options: the projection's own settings, by name.
        projection_init: how a learned E is initialised: block_mean (slot j is the mean of window j) | split (the mean of a
            part of window j, a different one for each head, with sharing=none or heads) | strided (slot j is one token) |
            normal (N(0, 1/k)) | xavier (the authors' code) | squares (slot j is the mean of square j of an image, n as for
            position=image).
        projection_noise: standard deviation of Gaussian noise added to that initialisation, for linear and conv.
        order: compress_first (W_K (E x), fewer operations) | project_first (E (W_K x), the paper's formula).
        mass_bias: add log(mass) to a slot's scores, its mass being the share of its weight that is on real tokens: in a short
            row, empty slots get no attention; full rows don't change. Off by default, since a model trained on full rows did
            better on short ones without it (docs/LOG.md).
        short_rows: what E (linear, gaussian, conv) reads at positions beyond the end of a row: zeros (the paper's) | mean (the
            mean of the row's tokens; a model trained on full rows then does better on short ones).
        local_width: width (odd) of a depthwise convolution of each layer's input, added to the heads' output; 0: none, as in
            the paper.
        local_std: standard deviation of that convolution's initial weights; 0: all zeros, so that it adds nothing at first.
        norm: post (the paper's) | pre (stable at higher learning rates).
        norm_type: layer (LayerNorm, the paper's) | rms (RMSNorm: no mean, no bias).
        position: learned (an embedding for each of n positions, the paper's) | rotary (queries and keys are rotated by their
            positions; a Linformer then needs order=project_first) | image (for pixels, row by row: an embedding of the row
            plus one of the column; n is w², or w² + 2 with bos and eos).
        rotary_base: base of rotary positions: the slowest pair of channels rotates by about 1/base per token.
        input_size: how many numbers a token consists of, such as the pixels of a patch or sensor readings: the input is then
            (B, N, input_size) floats, which a linear layer maps to width D; 0: tokens are ids.
        feed_forward: gelu (the paper's) | geglu (gated; the same number of parameters).
        bias: whether linear layers and LayerNorms have biases.
        head_bias: whether the masked-language-model head adds a bias to each logit.
        dropout: probability, on embeddings and on the output of each sublayer.
        attention_dropout: probability, on attention weights.
        initializer_range: standard deviation with which linear and embedding weights are initialised.
        layer_norm_eps: epsilon of the encoder's norms.
        activation_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        causal: must be false: each slot mixes all positions, so no mask hides later tokens. It exists only because older
            configs and checkpoints contain it.
    """

    vocab_size: Size = 50265
    max_length: Size = 512
    hidden_size: Size = 768
    num_layers: Annotated[int, Range(least=1, most=1000)] = 12
    num_heads: Size = 12
    intermediate_size: Size = 3072
    attention: str = "linformer"
    attention_options: dict[str, Any] | None = None
    projection_dim: Size | list[Size] = 128
    sharing: str = "layerwise"
    projection: str = "linear"
    projection_options: dict[str, Any] | None = None
    projection_init: str = "block_mean"
    projection_noise: Annotated[float, Range(least=0, most=100)] = 0.0
    order: str = "compress_first"
    mass_bias: bool = False
    short_rows: Annotated[str, OneOf(SHORT_ROWS)] = "zeros"
    local_width: Natural = 0
    local_std: Annotated[float, Range(least=0, most=100)] = 0.0
    norm: Annotated[str, OneOf(NORMS)] = "post"
    norm_type: Annotated[str, OneOf(NORM_TYPES)] = "layer"
    position: Annotated[str, OneOf(POSITIONS)] = "learned"
    rotary_base: Annotated[float, Range(above=1, most=1e9)] = 10000.0
    input_size: Natural = 0
    feed_forward: Annotated[str, OneOf(FEED_FORWARDS)] = "gelu"
    bias: bool = True
    head_bias: bool = True
    dropout: Dropout = 0.1
    attention_dropout: Dropout = 0.1
    initializer_range: Annotated[float, Range(above=0, most=100)] = 0.02
    layer_norm_eps: Annotated[float, Range(above=0, most=1)] = 1e-5
    activation_checkpointing: bool = False
    causal: bool = False

    def __post_init__(self) -> None:
        check_ranges("", EncoderConfig, vars(self))
        if self.local_width:
            check_width(self.local_width)
        check_heads(self.hidden_size, self.num_heads)
        if self.causal:
            raise SettingError(
                "causal", True, "false: each slot mixes all n positions, so no mask over slots hides later tokens"
            )
        if not self.projection_dims:  # of which `arguments`, below, takes the first layer's
            raise SettingError("projection_dim", [], "one number, or one for each layer")
        kind = self.attention_kind
        ATTENTIONS.check_options(self.attention, set(kind.arguments(self, 0)), self.attention_options)
        check_parts(self)
        kind.check(self)
        if self.input_size and kind.of_ids is not Attention.of_ids:
            raise SettingError("attention", self.attention, "one that reads no ids: linformer, full", when="with input_size")

    @property
    def attention_kind(self) -> type[Attention]:
        """The class that ``attention`` names."""
        return ATTENTIONS.find(self.attention)

    @property
    def projection_dims(self) -> list[int]:
        """k of each layer."""
        if isinstance(self.projection_dim, int):
            return [self.projection_dim] * self.num_layers
        return list(self.projection_dim)

    @property
    def of_images(self) -> bool:
        """Whether tokens are the pixels of an image, so that n is the image's size."""
        return self.position == "image" or self.projection_init in FITS


# Checkpoints of a user's module contain one if it stores its arguments, as Lightning's save_hyperparameters() does.
torch.serialization.add_safe_globals([EncoderConfig])


class Encoder(nn.Module):
    """Tokens to hidden states: ``Encoder(config)(input_ids, attention_mask)``."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.tokens = nn.Linear(config.input_size, D, config.bias) if config.input_size else nn.Embedding(config.vocab_size, D)
        self.positions = POSITIONS[config.position](config.max_length, D)
        self.embedding_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        # Owned here and handed to each layer, so that it is one entry in the state dict and one parameter for DDP.
        self.E = config.attention_kind.shared(config)
        self.layers = nn.ModuleList(EncoderLayer(config, layer) for layer in range(config.num_layers))
        # With norm="pre" the residual stream leaves the last layer unnormalised.
        self.final_norm = make_norm(config) if config.norm == "pre" else None
        self.apply(self._init_weights)
        for module in self.modules():
            if isinstance(module, Attention | Projection):
                module.start()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool | Sequence[int] = False,
    ) -> Tensor | tuple[Tensor, dict[int, Tensor]]:
        """Encode.

        Args:
            input_ids: (B, N) int64, N <= max_length, padded on the right; with input_size (B, N, input_size) floats.
            attention_mask: (B, N), True (or 1) at real tokens; None when all are, which is faster.
            need_weights: also return the attention maps: True for every layer's, or the indices of some layers, -1 the last.

        Returns:
            Hidden states (B, N, D); with need_weights also {layer: maps}, (B, H, N, S), whose columns are K slots, N tokens, or
            slots followed by tokens (the attention's ``columns``).
        """
        check_input(input_ids, self.config.input_size)
        length = input_ids.shape[1]
        if length > self.config.max_length:
            raise UserError(f"the input has {length} tokens", f"up to max_length = {self.config.max_length}")
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
            check_mask(attention_mask, input_ids, self.training)
        wanted = range(len(self.layers)) if need_weights is True else self._layers(need_weights or ())
        x = self.tokens(input_ids)
        x = self.dropout(self.embedding_norm(x if self.positions is None else x + self.positions.weight[:length]))
        given = self.shared
        if first := next((layer.attention for layer in self.layers if hasattr(layer, "attention")), None):
            given = given | first.of_ids(self.config, input_ids, attention_mask)
        maps = {}
        for index, layer in enumerate(self.layers):
            if self.config.activation_checkpointing and self.training:
                found = checkpoint(layer, x, attention_mask, index in wanted, given, use_reentrant=False)
            else:
                found = layer(x, attention_mask, index in wanted, given)
            x, weights, handed_on = found
            given = given | handed_on
            if weights is not None:
                maps[index] = weights
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if need_weights is False else (x, maps)

    def _layers(self, indices: Sequence[int]) -> list[int]:
        """The indices from 0; negative ones count from the end."""
        count = len(self.layers)
        if outside := [index for index in indices if not -count <= index < count]:
            raise UserError(f"need_weights names layer {outside[0]}", f"0 to {count - 1}, or -1 (the last) to {-count}")
        return [index % count for index in indices]

    @property
    def shared(self) -> dict[str, nn.Module]:
        """Further arguments for every attention: {"shared": E} if all layers share it, else {}."""
        return {} if self.E is None else {"shared": self.E}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, LocalConvolution) and self.config.local_std:
            nn.init.normal_(module.weight, std=self.config.local_std)


PIECE = 8192  # tokens


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each with its residual and norm."""

    def __init__(self, config: EncoderConfig, index: int):
        super().__init__()
        self.config = config
        self.pre_norm = config.norm == "pre"
        self.attention = config.attention_kind.from_config(config, index)
        self.gives_maps = "need_weights" in inspect.signature(self.attention.forward).parameters
        self.attention_norm = make_norm(config)
        D, inner = config.hidden_size, inner_width(config)
        self.gate = nn.Linear(D, inner, config.bias) if config.feed_forward == "geglu" else None
        self.up = nn.Linear(D, inner, config.bias)
        self.down = nn.Linear(inner, D, config.bias)
        self.feed_forward_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, need_weights: bool, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        """(B, N, D), (B, N) bool or None → (B, N, D), the attention maps if asked for, and what is passed to the next layer.

        given: further arguments of the attention: ``Encoder.shared``, what ``of_ids`` returned, and what the previous layer
        passed on.
        """
        h = self.attention_norm(x) if self.pre_norm else x
        if need_weights and self.gives_maps:
            given = given | {"need_weights": True}
        found = self.attention(h, attention_mask, **given)
        attended, weights, *more = found if isinstance(found, tuple) and len(found) in (2, 3) else (found, None)
        check_shape(ATTENTIONS, self.attention, attended, tuple(x.shape), "as its input")
        handed_on = more[0] if more else {}
        if not isinstance(handed_on, dict):
            said = f"forward of attention {ATTENTIONS.name(type(self.attention))} returns a third result"
            raise UserError(f"{said}, a {type(handed_on).__name__}", "a dict, arguments of the next layer's forward, or none")
        x = x + self.dropout(attended)
        x = x if self.pre_norm else self.attention_norm(x)
        h = self.feed_forward_norm(x) if self.pre_norm else x
        x = x + self.dropout(self.feed_forward(h))
        return x if self.pre_norm else self.feed_forward_norm(x), weights, handed_on

    def feed_forward(self, h: Tensor) -> Tensor:
        """(B, N, D) → (B, N, D), between the norm and dropout; a subclass may have another."""
        if not (self.config.activation_checkpointing and self.training) or h.shape[1] <= PIECE:
            return self.down(self._inner(h))
        # While a layer is recomputed, its inner activations take most of the memory, so a long row is computed in pieces.
        pieces = (checkpoint(lambda x: self.down(self._inner(x)), part, use_reentrant=False) for part in h.split(PIECE, 1))
        return torch.cat(list(pieces), 1)

    def _inner(self, h: Tensor) -> Tensor:
        if self.gate is None:
            return functional.gelu(self.up(h))
        return functional.gelu(self.gate(h)) * self.up(h)  # GeGLU (Shazeer, 2020, "GLU variants improve Transformer")


@contextmanager
def layer_outputs(encoder: Encoder) -> Iterator[list[Tensor]]:
    """A list that a forward pass inside the context fills with the embeddings, then each layer's output, (B, N, D) each."""
    states: list[Tensor] = []
    hooks = [encoder.dropout.register_forward_hook(lambda module, inputs, output: states.append(output))]
    hooks += [layer.register_forward_hook(lambda module, inputs, output: states.append(output[0])) for layer in encoder.layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def count_parameters(module: nn.Module, trainable: bool = True) -> int:
    """The number of parameters that are trainable, or that are not; shared ones count once, and those of a lazy layer once it
    has a shape."""
    found = (parameter for parameter in module.parameters() if not isinstance(parameter, UninitializedParameter))
    return sum(parameter.numel() for parameter in found if parameter.requires_grad == trainable)
