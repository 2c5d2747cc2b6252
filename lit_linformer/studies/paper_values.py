"""What Linformer (arXiv 2006.04768) says of its own efficiency: Table 3 as data, and the operations that its model needs.

Table 3 is inference with layerwise sharing on one 16 GB V100, against a Transformer whose softmax is written out: fused
attention came later. Memory saved is the ratio of the largest batches that fit.
"""

PROJECTION_DIMS = (128, 256, 512, 1024, 2048)

_TIME = {
    512: (1.5, 1.3),
    1024: (1.7, 1.6, 1.3),
    2048: (2.6, 2.4, 2.1, 1.3),
    4096: (3.4, 3.2, 2.8, 2.2, 1.3),
    8192: (5.5, 5.0, 4.4, 3.5, 2.1),
    16384: (8.6, 7.8, 7.0, 5.6, 3.3),
    32768: (13, 12, 11, 8.8, 5.0),
    65536: (20, 18, 16, 14, 7.9),
}
_MEMORY = {
    512: (1.7, 1.5),
    1024: (3.0, 2.9, 1.8),
    2048: (6.1, 5.6, 3.6, 2.0),
    4096: (14, 13, 8.3, 4.3, 2.3),
    8192: (28, 26, 17, 8.5, 4.5),
    16384: (56, 48, 32, 16, 8),
    32768: (56, 48, 36, 18, 16),
    65536: (60, 52, 40, 20, 18),
}
# n → k → times as fast, or as large a batch, as the Transformer; the paper leaves k ≥ n blank.
TIME_SAVED = {n: dict(zip(PROJECTION_DIMS, row, strict=False)) for n, row in _TIME.items()}
MEMORY_SAVED = {n: dict(zip(PROJECTION_DIMS, row, strict=False)) for n, row in _MEMORY.items()}


def operations(
    n: int,
    hidden_size: int,
    intermediate_size: int,
    projection_dim: int | None = None,
    sharing: str = "layerwise",
    order: str = "compress_first",
    local_width: int = 0,
) -> float:
    """Floating-point operations a token and layer of the forward pass, matrix products only; projection_dim None: Transformer.

    With a feed-forward of 4 D: 24 D² + 4 n D for the Transformer; 24 D² + 8 k D for project first; 20 D² + 6 k D + 4 D² k/n
    for compress first with E = F (the last term, W_K and W_V of the k slots, vanishes with k/n); 2 k D more with an F.
    """
    D, k = hidden_size, projection_dim
    common = 4 * D * intermediate_size + 4 * D * D + 2 * local_width * D  # feed-forward, W_Q and W_O, convolution
    if k is None:
        return common + 4 * D * D + 4 * n * D
    if order == "project_first" or sharing == "none":
        return common + 4 * D * D + 4 * k * D + 4 * k * D  # W_K and W_V of all tokens, E and F, attention
    compressed = 1 if sharing in ("key-value", "layerwise") else 2
    return common + 2 * k * D * compressed + 4 * D * D * k / n + 4 * k * D


def allowed_ratio(n: int, projection_dim: int, hidden_size: int, intermediate_size: int, **shape: str | int) -> float:
    """How many times as fast as the Transformer this Linformer would be if each operation took the same time."""
    width = shape.get("local_width", 0)
    full = operations(n, hidden_size, intermediate_size, local_width=width)
    return full / operations(n, hidden_size, intermediate_size, projection_dim, **shape)
