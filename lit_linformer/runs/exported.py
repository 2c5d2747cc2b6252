"""An exported folder, as `export` writes it with --format safetensors or huggingface: config.json and model.safetensors.

SHA256SUMS holds the checksums of the weights and the tokenizer, in the form of `sha256sum -c`; they are checked when the folder
is read.
"""

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_linformer.model import EncoderConfig
from lit_linformer.utils.errors import SettingError

CONFIG, WEIGHTS, SUMS = "config.json", "model.safetensors", "SHA256SUMS"
SUMMED = re.compile(r"model\..+|tokenizer\.json")  # files on which the model's output depends
# How transformers' model classes name what the plain modules call encoder and head (see export/huggingface.py).
PREFIXES = {"linformer.encoder.": "encoder.", "lm_head.": "head.", "classifier.": "head."}


def is_exported(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def check_format(folder: Path, setting: str) -> None:
    """Raises ValueError, in one line, for a folder with a model's config.json but no weights, such as an export to ONNX."""
    if (folder / CONFIG).is_file() and not (folder / WEIGHTS).is_file():
        read_config(folder, setting)  # another project's is refused with a hint
        allowed = "an export of the format safetensors or huggingface"
        raise SettingError(setting, folder, allowed, more=f", which has no {WEIGHTS}")


def write_sums(folder: Path) -> None:
    """Writes the SHA256SUMS of a folder."""
    names = sorted(path.name for path in folder.iterdir() if SUMMED.fullmatch(path.name))
    (folder / SUMS).write_text("".join(f"{_sha256(folder / name)}  {name}\n" for name in names), encoding="utf-8")


def check_sums(folder: Path, setting: str) -> None:
    """Raises ValueError, in one line, for a file whose checksum has changed; without SHA256SUMS nothing is checked."""
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition("  ")
        if SUMMED.fullmatch(name) and (folder / name).is_file() and (found := _sha256(folder / name)) != expected:
            raise SettingError(
                setting,
                folder,
                f"an undamaged copy (or, if it was changed on purpose, no {SUMS})",
                more=f", whose {name} has the SHA-256 {found[:12]}…, in {SUMS} {expected[:12]}…",
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_config(folder: Path, setting: str = "folder") -> dict[str, Any]:
    """config.json in the form of `TrainedModel.config`, from the safetensors and the huggingface format alike."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(setting, folder, "an exported model", more=f", whose {CONFIG} cannot be read ({error})") from error
    if isinstance(config, dict) and config.get("model_type") == "lit_linformer":
        encoder = {name: config[name] for name in EncoderConfig.__dataclass_fields__ if name in config}
        encoder["max_length"] = config["max_position_embeddings"]
        classifies = "LinformerForSequenceClassification" in (config.get("architectures") or [])
        config |= {"encoder": encoder, "task": "sequence-classification" if classifies else "masked-lm"}
        config |= {"num_labels": len(config.get("id2label") or ("", "")), "max_length": config.get("longest_row")}
    if not isinstance(config, dict) or not isinstance(config.get("encoder"), dict) or "task" not in config:
        allowed = "what export wrote"
        if isinstance(config, dict) and "model_type" in config:
            typed = shlex.quote(str(folder))
            allowed += f", or the run that `python run.py convert --from {typed}` makes of RoBERTa, BERT or DistilBERT"
        raise SettingError(setting, folder, allowed, more=f", whose {CONFIG} is another project's")
    return config


def read_weights(folder: Path, setting: str = "folder") -> dict[str, Tensor]:
    """The state dict of MaskedLanguageModel or SequenceClassifier, in the dtype that it is stored in."""
    check_sums(folder, setting)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise SettingError(setting, folder, "a whole one", more=f", whose {WEIGHTS} cannot be read ({error})") from error
    renamed = {}
    for name, tensor in weights.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        renamed[PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed
