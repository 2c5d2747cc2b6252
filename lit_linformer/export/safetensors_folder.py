"""The safetensors format: model.safetensors, config.json, tokenizer.json, and its way back into plain PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model import EncoderConfig, MaskedLanguageModel, SequenceClassifier
from lit_linformer.runs.checkpoints import stored_encoder
from lit_linformer.runs.trained_model import TrainedModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# How transformers' model classes name what the plain modules call encoder and head (see huggingface.py).
PREFIXES = {"linformer.encoder.": "encoder.", "lm_head.": "head.", "classifier.": "head."}


def write(model: TrainedModel, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors."""
    from safetensors.torch import save_file

    write_config(model, folder)
    weights = {name: tensor.contiguous() for name, tensor in model.net.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def logits(model: TrainedModel, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """What was written, as a function of input_ids and attention_mask (B, N)."""
    net, _ = load(folder)
    return lambda ids, mask: net(ids, mask.bool())


def write_config(model: TrainedModel, folder: Path) -> None:
    """config.json and tokenizer.json."""
    text = json.dumps(model.config(), indent=2, ensure_ascii=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    model.tokenizer.save(folder / "tokenizer.json")


def is_folder(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


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


def load(folder: str | Path) -> tuple[nn.Module, Tokenizer]:
    """The module, in evaluation mode, and the tokenizer; ValueError for a folder that `export` did not write."""
    folder = Path(folder)
    config = read_config(folder)
    encoder = stored_encoder(config["encoder"], folder, "folder")
    if config["task"] == "sequence-classification":
        net = SequenceClassifier(encoder, config["num_labels"], config["pooling"])
    else:
        net = MaskedLanguageModel(encoder)
    net.load_state_dict(read_weights(folder))
    return net.eval(), load_tokenizer(str(folder))
