"""The Linformer paper (arXiv 2006.04768): Tables 2 and 3 as data, and its claims.

Table 3 is inference with layerwise sharing on one 16 GB V100, against a Transformer with unfused softmax: fused attention came
later. Memory saved is the ratio of the largest batches that fit.
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
# {n: {k: speed, or largest batch, relative to the Transformer's}}; the paper leaves k ≥ n blank.
TIME_SAVED = {n: dict(zip(PROJECTION_DIMS, row, strict=False)) for n, row in _TIME.items()}
MEMORY_SAVED = {n: dict(zip(PROJECTION_DIMS, row, strict=False)) for n, row in _MEMORY.items()}

# Table 2: {(n, model): dev accuracies in percent after fine-tuning (of IMDB test accuracy), and their average, as printed}.
TASKS = ("SST-2", "IMDB", "QNLI", "QQP")
TABLE2 = {
    (512, "RoBERTa-base"): (93.1, 94.1, 90.9, 90.9, 92.25),
    (512, "Linformer, 128"): (92.4, 94.0, 90.4, 90.2, 91.75),
    (512, "Linformer, 128, shared kv"): (93.4, 93.4, 90.3, 90.3, 91.85),
    (512, "Linformer, 128, shared kv, layer"): (93.2, 93.8, 90.1, 90.2, 91.83),
    (512, "Linformer, 256"): (93.2, 94.0, 90.6, 90.5, 92.08),
    (512, "Linformer, 256, shared kv"): (93.3, 93.6, 90.6, 90.6, 92.03),
    (512, "Linformer, 256, shared kv, layer"): (93.1, 94.1, 91.2, 90.8, 92.30),
    (512, "BERT-base"): (92.7, 93.5, 91.8, 89.6, 91.90),
    (512, "DistilBERT"): (91.3, 92.8, 89.2, 88.5, 90.45),
    (1024, "Linformer, 256"): (93.0, 93.8, 90.4, 90.4, 91.90),
    (1024, "Linformer, 256, shared kv"): (93.0, 93.6, 90.3, 90.4, 91.83),
    (1024, "Linformer, 256, shared kv, layer"): (93.2, 94.2, 90.8, 90.5, 92.18),
}
# What the paper says about its figures, whose values it does not print.
FIGURE1 = (
    "The paper (RoBERTa, n = 512, WikiText-103 and IMDB): the first 128 of the 512 singular values hold most of their sum, "
    "about 0.9 in the middle layers, and in higher layers more than in lower ones."
)
FIGURE3 = (
    "The paper (RoBERTa-base's size, 3,300 M words, up to 250,000 updates) prints no perplexities. It says: a larger k is "
    "better; k = 128 at n = 512 and k = 256 at n = 1024 are nearly on par with the Transformer; layerwise sharing almost "
    "matches none; at a fixed k the final perplexity hardly depends on n."
)
