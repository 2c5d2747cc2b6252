"""Floating-point operations of the model, by formula: what model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) counts.

Matrix products and convolutions are counted, 2 for a multiplication and its addition. Not counted: embedding lookups, norms,
softmax, GELU, dropout, biases, pooling, and recomputation to save memory. Forward pass of one row of N tokens, with D hidden
width, I width of the feed-forward, K slots, w width of the local convolution, M masked tokens, V vocabulary:

    feed-forward         4 N D I; GeGLU 6 N D I
    W_Q and W_O          4 N D²
    Transformer          4 N D² (W_K, W_V) + 4 N² D (q kᵀ and P v)
    Linformer            4 K N D (q K̄ᵀ and P̄ V̄), and W_K, W_V, E, F:
      compress first       4 K D² + 2 K N D, or with a separate F 4 K D² + 4 K N D; if N < K as project first
      project first        4 N D² + 4 K N D
      E a convolution      instead of each 2 K N D above: 2 n D; pooling: nothing
    dynamic              2 K N D to compute each E from the input, H times that with an E for each head
    gated                2 N D G for the gates
    coarse               4 n b n/K D + 2 K² D (which has no gradient), in addition to the Linformer's
    nearby tokens        4 ⌈N/c⌉ c (c + 2 r) D for chunks of c tokens, each with r on both sides: window (c = w, r = w/2); lsh,
                         R times, and 2 N D R p for the hashes; sparse, with half of D (c = r), and 4 l ⌈N/l⌉² D/2
    Luna                 4 N D² and 2 K D² (packing's), 4 K D² (W_K, W_V) + 8 K N D
    Nyström              8 K N D + 4 K² D and 8 K³ H for each step towards the inverse
    lookup               12 ⌈N/c⌉ c² D in addition to the Linformer's, with compress first 4 N D² (W_K, W_V of all tokens), and
                         with rare 4 R N D
    local convolution    2 w N D
    input_size           2 N D · input_size, if tokens are not ids
    masked tokens' head  M (2 D² + 2 D V)

The backward pass is twice the forward pass: one product for the input's gradient, one for the weight's; a fixed E needs no
gradient, nor does the model's input. Frozen layers below the first one that learns have no backward pass; that one is counted
in full, though its input needs no gradient either.
"""

from torch import nn

from .encoder import Encoder
from .parts import inner_width


def forward_flops(encoder: Encoder, length: int, masked: int = 0, labels: int = 0) -> int | None:
    """Operations of the forward pass of one row of ``length`` tokens; None if the attention does not count its own.

    Includes the masked-language-model head at ``masked`` tokens, and a classifier's head for ``labels`` classes; 0: neither.
    """
    D = encoder.config.hidden_size
    total = _input(encoder, length) + masked * (2 * D * D + 2 * D * encoder.config.vocab_size)
    total += 2 * D * D + 2 * D * labels if labels else 0
    for layer in encoder.layers:
        if (one := _layer(encoder, layer, length)) is None:
            return None
        total += one
    return total


def training_flops(encoder: Encoder, length: int, masked: int = 0, labels: int = 0) -> int | None:
    """Operations of the forward and backward pass, with the arguments of ``forward_flops``."""
    forward = forward_flops(encoder, length, masked, labels)
    if forward is None:
        return None
    saved, learns = _input(encoder, length), any(map(_learns, set(encoder.children()) - {encoder.layers, encoder.final_norm}))
    saved += 0 if learns else _input(encoder, length)
    for layer in encoder.layers:
        fixed, learns = layer.attention.fixed_flops(length, **encoder.shared), learns or _learns(layer)
        saved += fixed if learns else 2 * (_layer(encoder, layer, length) or 0)
    saved += 0 if learns else 2 * (masked + bool(labels)) * encoder.config.hidden_size**2  # of the head's input
    return 3 * forward - saved


def _learns(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _layer(encoder: Encoder, layer: nn.Module, length: int) -> int | None:
    if not hasattr(layer, "attention"):  # a layer of the user's own
        return None
    attention = layer.attention.flops(length, **encoder.shared)
    inner = (4 if layer.gate is None else 6) * length * encoder.config.hidden_size * inner_width(encoder.config)
    return None if attention is None else attention + inner


def _input(encoder: Encoder, length: int) -> int:
    return 2 * length * encoder.config.hidden_size * encoder.config.input_size
