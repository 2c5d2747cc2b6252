"""A checkpoint as the start of another run: its encoder, its weights, its tokenizer."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import check_checkpoint, encoder_of, find_checkpoint, is_sharded, stored_encoder
from lit_linformer.runs.folder import TOKENIZER
from lit_linformer.utils.finite import check_finite

# What a run may set anew without becoming another encoder; vocab_size comes from the tokenizer.
FREE = {"vocab_size", "dropout", "attention_dropout", "activation_checkpointing"}


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
        from lit_linformer.export.safetensors_folder import read_config, read_weights

        encoder = stored_encoder(read_config(path, setting)["encoder"], path, setting)
        weights = read_weights(path, setting)
        check_finite(weights, f"{setting} is {path}")
        return Pretrained(path, encoder, weights, str(path) if (path / TOKENIZER).is_file() else None)
    if path.is_dir() and not is_sharded(path):
        found = find_checkpoint(path, "best") or find_checkpoint(path, "last")
        if found is None:
            raise ValueError(f"{setting} is {path}, a folder without checkpoints/; allowed: a run that was trained")
        path = found
    elif not path.exists():
        raise ValueError(f"{setting} is {path}, which does not exist; allowed: a run directory or a checkpoint file")
    checkpoint = check_checkpoint(path, setting)
    encoder = encoder_of(checkpoint, path, setting)
    prefix = "net."
    weights = {n.removeprefix(prefix): t for n, t in checkpoint["state_dict"].items() if n.startswith(prefix)}
    if not weights:
        raise ValueError(f"{setting} is {path}, which holds no encoder; allowed: a checkpoint of this project")
    check_finite(weights, f"{setting} is {path}")
    beside = path.parent.parent / TOKENIZER
    tokenizer = str(path) if "tokenizer" in checkpoint and path.is_file() else str(beside) if beside.is_file() else None
    return Pretrained(path, encoder, weights, tokenizer)


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
