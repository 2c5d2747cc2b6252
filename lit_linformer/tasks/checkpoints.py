"""Checkpoints on disk: checked, found by name in a run directory, and read as the start of a fine-tuning run."""

import pickle
import re
import sys
import zipfile
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model import EncoderConfig
from lit_linformer.tasks.sharding import META, check_sharded, load_sharded

TOKENIZER = "tokenizer.json"
BEST = re.compile(r"best-\d+-(-?\d+\.\d+|nan)\.ckpt")  # best-STEP-METRIC.ckpt
# What torch.load raises for a file that is damaged or another kind's.
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile)
# What a run may set anew without becoming another encoder; vocab_size comes from the tokenizer.
FREE = {"vocab_size", "dropout", "attention_dropout", "activation_checkpointing"}


def check_checkpoint(path: Path, setting: str = "ckpt_path", whole: bool = True) -> dict:
    """The checkpoint, its tensors left on disk; ValueError, in one line, for what is missing, truncated or none.

    Of a sharded one, which is a folder, the tensors are read, unless ``whole`` is false.
    """
    if not path.exists():
        raise ValueError(f"{setting} is {path}, which is no file; allowed: a checkpoint file, 'last' or 'best'")
    try:
        if path.is_dir():
            return load_sharded(path) if whole else check_sharded(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{setting} is {path}, which holds other objects than weights and plain values: they are not loaded, for that may "
            "run code; allowed: a checkpoint of this project"
        ) from error
    except UNREADABLE as error:
        raise ValueError(f"{setting} is {path}, which is truncated or no checkpoint: {first_line(error)}") from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{setting} is {path}, which holds no training state; allowed: a checkpoint of this project")
    return checkpoint


def find_checkpoint(run_dir: Path, which: str) -> Path | None:
    """The run's checkpoint file: ``last`` is the newest that can be read, ``best`` the one of the best validation."""
    folder = run_dir / "checkpoints"
    if which == "best":
        scored = [(float(found[1]), path) for path in folder.glob("best-*.ckpt") if (found := BEST.fullmatch(path.name))]
        better = max if _best_mode(run_dir) == "max" else min
        return better((pair for pair in scored if pair[0] == pair[0]), default=(0.0, None))[1]
    for path in (folder / "last.ckpt", folder / "previous.ckpt"):
        if not path.exists():
            continue
        try:
            check_checkpoint(path, whole=False)
            return path
        except ValueError as error:
            print(f"warning: {error}; falling back to the one before it", file=sys.stderr, flush=True)
    return None


@dataclass
class Pretrained:
    """What a run that starts from another model takes over.

    Args:
        path: the checkpoint file, or the exported folder.
        encoder: the encoder's settings.
        weights: the state dict of the whole model, encoder and head.
        tokenizer: what `load_tokenizer` reads; None: the checkpoint carries none and lies beside none.
    """

    path: Path
    encoder: EncoderConfig
    weights: dict[str, Tensor]
    tokenizer: str | None

    @property
    def encoder_weights(self) -> dict[str, Tensor]:
        """The encoder's state dict."""
        prefix = "encoder."
        return {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(prefix)}

    @cached_property
    def own_tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.tokenizer) if self.tokenizer is not None else None


def read_pretrained(path: str | Path, setting: str = "model.pretrained") -> Pretrained:
    """Reads a run directory's best checkpoint (its last, where there is no best), a checkpoint file, or an exported folder."""
    path = Path(path)
    if (path / "model.safetensors").is_file():
        from lit_linformer.interop.folder import read_config, read_weights

        encoder = EncoderConfig(**read_config(path, setting)["encoder"])
        return Pretrained(path, encoder, read_weights(path, setting), str(path) if (path / TOKENIZER).is_file() else None)
    if path.is_dir() and not (path / META).is_file():
        found = find_checkpoint(path, "best") or find_checkpoint(path, "last")
        if found is None:
            raise ValueError(f"{setting} is {path}, a folder without checkpoints/; allowed: a run that was trained")
        path = found
    elif not path.exists():
        raise ValueError(f"{setting} is {path}, which does not exist; allowed: a run directory or a checkpoint file")
    checkpoint = check_checkpoint(path, setting)
    settings = checkpoint.get("hyper_parameters", {}).get("encoder")
    prefix = "net."
    weights = {n.removeprefix(prefix): t for n, t in checkpoint["state_dict"].items() if n.startswith(prefix)}
    if not isinstance(settings, dict) or not weights:
        raise ValueError(f"{setting} is {path}, which holds no encoder; allowed: a checkpoint of this project")
    beside = path.parent.parent / TOKENIZER
    tokenizer = str(path) if "tokenizer" in checkpoint and path.is_file() else str(beside) if beside.is_file() else None
    return Pretrained(path, EncoderConfig(**settings), weights, tokenizer)


def pretrained_encoder(source: Pretrained, asked: EncoderConfig | None, vocab_size: int | None) -> EncoderConfig:
    """The pretrained encoder's settings, with those of ``asked`` that are free.

    Args:
        asked: what model.encoder says, if anything.
        vocab_size: tokens of the data's tokenizer.

    Raises ValueError for the first other setting in which the two differ, and for another vocabulary.
    """
    tokens = source.encoder.vocab_size if source.own_tokenizer is None else len(source.own_tokenizer)
    if vocab_size not in (None, tokens):
        raise ValueError(
            f"data.tokenizer has {vocab_size} tokens, model.pretrained={source.path} {tokens}; "
            "allowed: that checkpoint's own tokenizer (leave data.tokenizer out)"
        )
    if asked is None:
        return source.encoder
    for field in fields(asked):
        wanted, there = getattr(asked, field.name), getattr(source.encoder, field.name)
        if field.name not in FREE and wanted != there:
            raise ValueError(
                f"model.encoder.{field.name} is {wanted!r}, in the checkpoint {source.path} {there!r}; allowed: the same "
                "(leave model.encoder out, and the checkpoint's settings are taken over)"
            )
    return replace(asked, vocab_size=source.encoder.vocab_size)


def check_same_tokenizer(data: Any, own: Tokenizer | None) -> None:
    """ValueError where a data module's tokenizer is another than the pretrained model's own."""
    tokenizer = getattr(data, "tokenizer", None)
    if own is not None and tokenizer is not None and tokenizer.sha256 != own.sha256:
        raise ValueError(
            f"data.tokenizer={data.tokenizer_name!r} is another tokenizer than the one that model.pretrained was trained "
            "with; allowed: that one (leave data.tokenizer out)"
        )


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _best_mode(run_dir: Path) -> str:
    """min, or max where the run's config.yaml says that higher is better."""
    try:
        return yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["best"]["mode"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return "min"
