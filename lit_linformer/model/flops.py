"""Floating-point operations of the model, by formula: what model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) counts.

Counted are matrix products and convolutions, 2 for a multiplication and its addition. Not counted: embedding lookups, norms,
softmax, GELU, dropout, biases, pooling, and whatever is computed twice to save memory. Of one row of N tokens, forward, with
D hidden width, I inside the feed-forward, K slots, w width of the local convolution, M masked tokens, V vocabulary:

    feed-forward         4 N D I
    W_Q and W_O          4 N D²
    Transformer          4 N D² (W_K, W_V) + 4 N² D (q kᵀ and P v)
    Linformer            4 K N D (q K̄ᵀ and P̄ V̄), and W_K, W_V, E, F:
      compress first       4 K D² + 2 K N D, or with an F of its own 4 K D² + 4 K N D; with N < K as project first
      project first        4 N D² + 4 K N D
      E a convolution      instead of each 2 K N D above: 2 n D; pooling: nothing
    local convolution    2 w N D
    masked tokens' head  M (2 D² + 2 D V)

The backward pass is twice the forward pass: one product for the input's gradient, one for the weight's; a fixed E has no
gradient of its own.
"""

from lit_linformer.model.encoder import EncoderConfig


def layer_flops(
    length: int,
    hidden_size: int,
    intermediate_size: int,
    projection_dim: int | None = None,
    sharing: str = "layerwise",
    order: str = "compress_first",
    local_width: int = 0,
    projection: str = "linear",
    max_length: int | None = None,
) -> tuple[int, int]:
    """Forward pass of one layer on one row: (all operations, those among them that apply a fixed E).

    Args:
        length: N.
        hidden_size: D.
        intermediate_size: I.
        projection_dim: K; None: a Transformer's layer.
        sharing: as in ``EncoderConfig``, like order, local_width and projection.
        max_length: n; None: N. Convolutions work on rows that are filled up to it.
    """
    N, D, K = length, hidden_size, projection_dim
    common = 4 * N * D * intermediate_size + 4 * N * D * D + 2 * local_width * N * D
    if K is None:
        return common + 4 * N * D * D + 4 * N * N * D, 0
    matrix = projection in ("linear", "gaussian")
    once = 2 * K * N * D if matrix else 2 * (max_length or N) * D if projection == "conv" else 0
    first = order == "compress_first" and sharing != "none"
    if first and not (matrix and N < K):
        rows, times = K, 1 if sharing in ("key-value", "layerwise") else 2
    else:
        rows, times = N, 2
    fixed = times * once if projection == "gaussian" else 0
    return common + 4 * rows * D * D + times * once + 4 * K * N * D, fixed


def forward_flops(config: EncoderConfig, length: int, masked: int = 0, labels: int = 0) -> int:
    """Forward pass of one row of ``length`` tokens, with the head at ``masked`` tokens, or a classifier's with ``labels``."""
    return _encoder(config, length)[0] + _heads(config, masked, labels)


def training_flops(config: EncoderConfig, length: int, masked: int = 0, labels: int = 0) -> int:
    """Forward and backward pass of the same row."""
    encoder, fixed = _encoder(config, length)
    return 3 * (encoder + _heads(config, masked, labels)) - fixed


def _encoder(config: EncoderConfig, length: int) -> tuple[int, int]:
    dims = config.projection_dims if config.attention == "linformer" else [None] * config.num_layers
    shape = (config.hidden_size, config.intermediate_size)
    kind = (config.sharing, config.order, config.local_width, config.projection, config.max_length)
    layers = [layer_flops(length, *shape, dim, *kind) for dim in dims]
    return sum(all_of for all_of, _ in layers), sum(fixed for _, fixed in layers)


def _heads(config: EncoderConfig, masked: int, labels: int) -> int:
    D = config.hidden_size
    language_model = masked * (2 * D * D + 2 * D * config.vocab_size)
    return language_model + (2 * D * D + 2 * D * labels if labels else 0)
