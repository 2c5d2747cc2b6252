"""Data: sources of text, tokenizers, token files, masks and loaders that resume exactly.

What both kinds of training share: reading and tables (files and hub data sets, row by row), pieces (of long texts), tokenizer,
cache and checksums, loader (which rows a step reads), summary (what there is), datamodule. Above it pretraining/, finetuning/,
longrange/ (Long Range Arena) and recall, which is generated. Heavy imports (Lightning here; datasets, pyarrow and tokenizers
below) wait until they are used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors, and for utils/sources.py, which reads from here where each class is defined
    from lit_linformer.data.finetuning.datamodule import FineTuningData
    from lit_linformer.data.longrange.datamodule import LongRangeData
    from lit_linformer.data.pretraining.datamodule import PretrainingData
    from lit_linformer.data.recall import RecallData

HOMES = {
    "PretrainingData": "pretraining.datamodule",
    "FineTuningData": "finetuning.datamodule",
    "RecallData": "recall",
    "LongRangeData": "longrange.datamodule",
}
__all__ = ["PretrainingData", "FineTuningData", "RecallData", "LongRangeData"]  # noqa: RUF022, as messages list them


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
