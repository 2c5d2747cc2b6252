"""Exports trained models: as safetensors, for Hugging Face, ONNX and torch.export.

python run.py export --ckpt_path runs/quickstart --format huggingface --output out/quickstart
module, tokenizer = lit_linformer.export.load("out/quickstart")
"""

from pathlib import Path
from typing import Any


def load(folder: str | Path) -> tuple[Any, Any]:
    """The plain PyTorch module, in evaluation mode, and the tokenizer, if it has one, of a folder that `export` wrote as
    safetensors or huggingface: (MaskedLanguageModel or SequenceClassifier, lit_linformer.data.tokenizer.Tokenizer or None).
    ValueError for another."""
    from lit_linformer.runs.exported import read_config
    from lit_linformer.runs.trained_model import read_model

    read_config(Path(folder))  # for read_model takes runs and checkpoints as well
    stored = read_model(folder, "folder")
    return stored.build(), stored.own_tokenizer
