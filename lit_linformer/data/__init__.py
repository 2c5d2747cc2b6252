"""Data: sources of text, tokenizers, token files, masks and loaders that resume exactly.

Ground floor first: corpus (source → documents), tokenizer, blocks (documents → memory-mapped tokens), masking, loader
(which block a step reads), and on top the LightningDataModules. Heavy imports (Lightning here; datasets, pyarrow and
tokenizers below) wait until they are used.
"""

__all__ = ["PretrainingData"]


def __getattr__(name: str):
    if name == "PretrainingData":
        from lit_linformer.data.pretraining import PretrainingData

        return PretrainingData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
