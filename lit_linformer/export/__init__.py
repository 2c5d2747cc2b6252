"""Exports trained models: as safetensors, for Hugging Face, ONNX and torch.export.

python run.py export --ckpt_path runs/quickstart --format huggingface --output out/quickstart
module, tokenizer = lit_linformer.export.load("out/quickstart")
"""

from pathlib import Path
from typing import Any


def load(folder: str | Path) -> tuple[Any, Any]:
    """The model and tokenizer of a folder that `export` wrote as safetensors or huggingface; ValueError for any other.

    The model is a plain PyTorch module, MaskedLanguageModel or SequenceClassifier, in evaluation mode; the tokenizer a
    lit_linformer.data.tokenizer.Tokenizer, or None if there is none."""
    from lit_linformer.runs.exported import read_config
    from lit_linformer.runs.trained_model import read_model

    read_config(Path(folder))  # raises for runs and checkpoints, which read_model takes as well
    stored = read_model(folder, "folder")
    return stored.build(), stored.own_tokenizer
