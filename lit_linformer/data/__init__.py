"""Data: sources of text, tokenizers, token files, masks and loaders that resume exactly.

Shared by all kinds of training: reading and tables (files and hub data sets, row by row), pieces (of long texts), tokenizer,
cache and checksums, loader (which rows a step reads), summary (of the data), datamodule. Built on these: pretraining/,
finetuning/, longrange/ (Long Range Arena) and recall, which is generated. Heavy imports (Lightning here; datasets, pyarrow and
tokenizers in the modules) are deferred until they are needed.
"""

__all__ = ["PretrainingData", "FineTuningData", "RecallData", "LongRangeData"]  # noqa: RUF022, as messages list them


def __getattr__(name: str):
    if name == "FineTuningData":
        from lit_linformer.data.finetuning.datamodule import FineTuningData

        return FineTuningData
    if name == "LongRangeData":
        from lit_linformer.data.longrange.datamodule import LongRangeData

        return LongRangeData
    if name == "PretrainingData":
        from lit_linformer.data.pretraining.datamodule import PretrainingData

        return PretrainingData
    if name == "RecallData":
        from lit_linformer.data.recall import RecallData

        return RecallData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
