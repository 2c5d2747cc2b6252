"""Data: sources of text, tokenizers, token files, masks and loaders that resume exactly.

Ground floor first: files, pieces (of long texts), tokenizer, cache and checksums, loader (which rows a step reads). For
pretraining: corpus (source → documents), blocks (documents → memory-mapped tokens), masking. For fine-tuning: text_tasks
(the table of tasks), rows (source → labelled texts), encoding (→ memory-mapped tokens), layout (→ rows of tokens). On top
the LightningDataModules. Heavy imports (Lightning here; datasets, pyarrow and tokenizers below) wait until they are used.
"""

__all__ = ["FineTuningData", "PretrainingData"]


def __getattr__(name: str):
    if name == "FineTuningData":
        from lit_linformer.data.finetuning import FineTuningData

        return FineTuningData
    if name == "PretrainingData":
        from lit_linformer.data.pretraining import PretrainingData

        return PretrainingData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
