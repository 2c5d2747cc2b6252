"""Reads a RoBERTa, BERT or DistilBERT from its Hugging Face folder: the same model as this project's Transformer.

The folder is read without transformers: config.json, then model.safetensors or pytorch_model.bin (weights only, in one file or
in shards with an index), its tensors renamed. Position i of a RoBERTa is row pad_token_id + 1 + i of its table. The first
token type's embedding, which every token of a single text gets, is added to the position embeddings, not to the token
embeddings, which are the output matrix as well.
"""

import contextlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_linformer.convert.families import EMBEDDINGS, FAMILIES, TYPES, Family
from lit_linformer.data.tokenizer import load_tokenizer
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.runs.checkpoints import UNREADABLE
from lit_linformer.runs.trained_model import TrainedModel, version
from lit_linformer.utils.errors import SettingError, UserError, first_line
from lit_linformer.utils.weights import check_finite

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

POINTER = b"version https://git-lfs"  # the beginning of a file that was cloned without Git LFS


def from_hub(name: str) -> Path:
    """The local folder of a model on the Hugging Face hub, downloaded if needed; ValueError if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=[*patterns, CONFIG, "tokenizer*.json", "vocab.*", "merges.txt"]))

    try:
        folder = fetch("model*.safetensors", "model.safetensors.index.json")
        return folder if any(folder.glob("*.safetensors")) else fetch("pytorch_model*.bin", "pytorch_model.bin.index.json")
    except LocalEntryNotFoundError as error:
        raise UserError(f"from is hub:{name}, which is not here, and the hub cannot be reached", "a folder") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"from is hub:{name}, which cannot be read ({first_line(error)})", "hub:OWNER/NAME") from error


def is_folder(path: Path) -> bool:
    """Whether a folder's config.json names any architecture other than this project's."""
    return (path / CONFIG).is_file() and _json(path / CONFIG, path).get("model_type") not in (None, "lit_linformer")


def open_folder(folder: Path, tokenizer: str | None = None) -> tuple[TrainedModel, list[str]]:
    """The model, float32, in evaluation mode, and lines that say what was left out or is new.

    Args:
        folder: a Hugging Face folder.
        tokenizer: one that `load_tokenizer` reads, if the folder has none; None: the folder's.

    Raises ValueError, in one line that names `from`, for an architecture, a setting or a file that cannot be converted.
    """
    settings = _json(folder / CONFIG, folder)
    family = _family(folder, settings)
    encoder, offset = _encoder(folder, settings, family)
    weights = {_modern(name): tensor.float() for name, tensor in _weights(folder).items()}
    found, lines = _renamed(folder, weights, family, settings, offset)
    facts = {"version": version(), "step": 0}
    net = MaskedLanguageModel(encoder)
    expected = net.state_dict()
    if not any(name.startswith("head.") for name in found):
        lines.append("no masked-language-model head there: one with random weights was made")
        facts["new_head"] = True
        found |= {name: tensor for name, tensor in expected.items() if name.startswith("head.")}
    for name, tensor in expected.items():
        if name not in found:
            raise SettingError("from", folder, "a whole checkpoint", more=f", which lacks {name} of this project's Transformer")
        if found[name].shape != tensor.shape:
            more = f", whose {name} is {list(found[name].shape)}, by its {CONFIG} {list(tensor.shape)}"
            raise SettingError("from", folder, "weights and settings that fit", more=more)
    if beyond := [name for name in found if name not in expected]:
        more = f", which holds {beyond[0]}: nothing that a model of its {CONFIG} has"
        raise SettingError("from", folder, "weights and settings that fit", more=more)
    net.load_state_dict(found)
    text = load_tokenizer(tokenizer or str(folder))
    if len(text) > encoder.vocab_size:
        raise UserError(
            f"tokenizer has {len(text)} tokens, the model of {folder} {encoder.vocab_size}",
            "the tokenizer that it was trained with",
        )
    return TrainedModel(folder.resolve().name, net.eval(), text, encoder.max_length, facts=facts), lines


def _json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"from is {folder}, whose {path.name} cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise SettingError("from", folder, "a Hugging Face model's folder", more=f", whose {path.name} is no object")
    return found


def _family(folder: Path, settings: dict[str, Any]) -> Family:
    """A model's family; ValueError for anything but an encoder of one of the FAMILIES."""
    kind, families = settings.get("model_type"), ", ".join(FAMILIES)
    if kind not in FAMILIES:
        raise SettingError("from", folder, families, more=f", whose architecture is {kind!r}")
    for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
        if settings.get(name):
            allowed = f"{families}, bidirectional, alone"
            raise SettingError("from", folder, allowed, more=f", whose {name} is true: no encoder")
    if (positions := settings.get("position_embedding_type", "absolute")) != "absolute":
        raise SettingError("from", folder, "absolute", more=f", whose position_embedding_type is {positions!r}")
    family = FAMILIES[kind]
    if (activation := settings.get(family.settings["activation"], "gelu")) != "gelu":
        raise SettingError("from", folder, "gelu", more=f", whose {family.settings['activation']} is {activation!r}")
    return family


def _encoder(folder: Path, settings: dict[str, Any], family: Family) -> tuple[EncoderConfig, int]:
    """The encoder's settings, and the row of the position table that belongs to the first token."""
    try:
        offset = settings.get("pad_token_id", 1) + 1 if settings["model_type"] == "roberta" else 0
        taken = {ours: settings[theirs] for ours, theirs in family.settings.items() if ours != "activation"}
        return EncoderConfig(
            vocab_size=settings["vocab_size"],
            max_length=settings["max_position_embeddings"] - offset,
            attention="full",
            norm="post",
            layer_norm_eps=settings.get("layer_norm_eps", 1e-12),
            initializer_range=settings.get("initializer_range", 0.02),
            **taken,
        ), offset
    except KeyError as error:
        raise SettingError("from", folder, "a whole one", more=f", whose {CONFIG} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"from is {folder}, whose {CONFIG} makes no encoder: {first_line(error)}") from error


def _renamed(
    folder: Path, weights: dict[str, Tensor], family: Family, settings: dict[str, Any], offset: int
) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict for MaskedLanguageModel, without a head if there is none; and lines about weights that were not taken."""
    base = f"{settings['model_type']}."
    weights = {name.removeprefix(base): tensor for name, tensor in weights.items()}
    table = weights.get("embeddings.word_embeddings.weight")
    output, bias = weights.pop(f"{family.decoder}.weight", None), weights.get(f"{family.decoder}.bias")
    untied = not settings.get("tie_word_embeddings", True)
    if output is None and untied and any(name.startswith(tuple(family.head)) for name in weights):
        raise UserError(f"from is {folder}, whose head is untied by its {CONFIG}, but {family.decoder}.weight is not there")
    if output is not None and table is not None and not torch.equal(output, table):
        said = "false" if untied else "true, but they differ"
        raise SettingError(
            "from", folder, "tied", more=f", whose output matrix is not its token embedding (tie_word_embeddings is {said})"
        )
    found, left = {}, []
    for name, tensor in weights.items():
        if (ours := _our_name(name, family)) is not None:
            found[ours] = tensor
        elif name not in (TYPES, f"{family.decoder}.bias"):
            left.append(name)
    if bias is not None and (untied or "head.bias" not in found):  # else both are one parameter, and either may be in the file
        found["head.bias"] = bias
    if strange := [name for name in left if not name.startswith(family.spare)]:
        more = f", which holds {strange[0]}: nothing that a {settings['model_type']} has"
        raise SettingError("from", folder, "a plain model, without adapters or cross-attention", more=more)
    if (positions := found.get("encoder.positions.weight")) is not None:
        types = weights.get(TYPES)
        found["encoder.positions.weight"] = positions[offset:] + (0.0 if types is None else types[0])
    spare = sorted({name.rpartition(".")[0] or name for name in left if "position_ids" not in name})
    return found, [f"not taken: {', '.join(spare)}"] if spare else []


def _our_name(name: str, family: Family) -> str | None:
    if name in EMBEDDINGS:
        return EMBEDDINGS[name]
    if name in family.head:
        return family.head[name]
    module, _, kind = name.rpartition(".")
    if module in family.head:
        return f"{family.head[module]}.{kind}"
    if layer := re.fullmatch(re.escape(family.layers) + r"(\d+)\.(.+)", module):
        if (ours := family.layer.get(layer[2])) is not None:
            return f"encoder.layers.{layer[1]}.{ours}.{kind}"
    return None


def _modern(name: str) -> str:
    """Replaces TensorFlow's names for a LayerNorm's parameters, which checkpoints of 2018 have."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda old: f"LayerNorm.{'weight' if old[1] == 'gamma' else 'bias'}", name)


def _weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's first set of weights: safetensors before pickled ones."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise SettingError("from", folder, f"a folder with one of {', '.join(WEIGHTS)}", more=", which holds no weights")
    files = [file.name]
    if file.suffix == ".json":
        shards = _json(file, folder).get("weight_map")
        if not isinstance(shards, dict):
            raise SettingError("from", folder, "a whole index", more=f", whose {file.name} has no weight_map")
        if strange := [shard for shard in shards.values() if not isinstance(shard, str) or Path(shard).name != shard]:
            raise SettingError("from", folder, "files of that folder", more=f", whose {file.name} names {strange[0]!r}")
        files = sorted(set(shards.values()))
    weights = {name: tensor for file in files for name, tensor in _read(folder / file, folder).items()}
    check_finite(weights, f"from is {folder}")
    return weights


def _read(file: Path, folder: Path) -> dict[str, Tensor]:
    with contextlib.suppress(OSError), open(file, "rb") as content:
        if content.read(len(POINTER)) == POINTER:
            more = f", whose {file.name} only points to the weights"
            raise SettingError("from", folder, "what `git lfs pull` makes of it", more=more)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = "they are not loaded, since that may run code"
        more = f", whose {file.name} holds other objects than weights and plain values: {reason}"
        raise SettingError("from", folder, "weights only, better as safetensors", more=more) from error
    except (*UNREADABLE, SafetensorError) as error:
        raise UserError(f"from is {folder}, whose {file.name} cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise SettingError("from", folder, "names and tensors alone", more=f", whose {file.name} is no state dict")
    return found
