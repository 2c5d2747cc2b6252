"""The safetensors format: model.safetensors, config.json, tokenizer.json, and its way back into plain PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.runs.exported import CONFIG, WEIGHTS, read_config
from lit_linformer.runs.trained_model import TrainedModel, read_model


def write(model: TrainedModel, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors."""
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


def load(folder: str | Path) -> tuple[nn.Module, Tokenizer]:
    """The module, in evaluation mode, and the tokenizer; ValueError for a folder that `export` did not write."""
    read_config(Path(folder))  # for read_model takes runs and checkpoints as well
    stored = read_model(folder, "folder")
    return stored.build("folder"), stored.own_tokenizer
