"""An exported folder, as `export` writes it with --format safetensors or huggingface: config.json and model.safetensors."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_linformer.model import EncoderConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# How transformers' model classes name what the plain modules call encoder and head (see export/huggingface.py).
PREFIXES = {"linformer.encoder.": "encoder.", "lm_head.": "head.", "classifier.": "head."}


def is_exported(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def read_config(folder: Path, setting: str = "folder") -> dict[str, Any]:
    """config.json as `TrainedModel.config` has it, of the safetensors and of the huggingface format alike."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{setting} is {folder}, whose {CONFIG} cannot be read ({error}); allowed: an exported model"
        ) from error
    if isinstance(config, dict) and config.get("model_type") == "lit_linformer":
        encoder = {name: config[name] for name in EncoderConfig.__dataclass_fields__ if name in config}
        encoder["max_length"] = config["max_position_embeddings"]
        classifies = "LinformerForSequenceClassification" in (config.get("architectures") or [])
        config |= {"encoder": encoder, "task": "sequence-classification" if classifies else "masked-lm"}
        config |= {"num_labels": len(config.get("id2label") or ("", ""))}
    if not isinstance(config, dict) or not isinstance(config.get("encoder"), dict) or "task" not in config:
        raise ValueError(f"{setting} is {folder}, whose {CONFIG} is another project's; allowed: what export wrote")
    return config


def read_weights(folder: Path, setting: str = "folder") -> dict[str, Tensor]:
    """The state dict of MaskedLanguageModel or SequenceClassifier."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ValueError(f"{setting} is {folder}, which needs safetensors; allowed after: pip install safetensors") from error
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{setting} is {folder}, whose {WEIGHTS} cannot be read ({error}); allowed: a whole one") from error
    renamed = {}
    for name, tensor in weights.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        renamed[PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed
