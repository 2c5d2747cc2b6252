"""Starting a run from a trained model: which of its settings may change, and which must not."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.runs.trained_model import StoredModel
from lit_linformer.utils.errors import SettingError, UserError

# Settings that a run may change without changing the encoder's weights; vocab_size comes from the tokenizer.
FREE = {"vocab_size", "dropout", "attention_dropout", "activation_checkpointing", "short_rows"}


def pretrained_encoder(source: StoredModel, asked: EncoderConfig | None, vocab_size: int | None) -> EncoderConfig:
    """The pretrained encoder's settings, overridden by those of ``asked`` that are FREE.

    Args:
        source: the pretrained model.
        asked: model.encoder; None: not given.
        vocab_size: number of tokens of the data's tokenizer; None: not known.

    Raises ValueError for the first other setting in which the two differ, and for another vocabulary.
    """
    tokens = source.encoder.vocab_size if source.own_tokenizer is None else len(source.own_tokenizer)
    if vocab_size not in (None, tokens):
        raise UserError(
            f"data.tokenizer has {vocab_size} tokens, model.pretrained={source.path} {tokens}",
            "that checkpoint's own tokenizer (leave data.tokenizer out)",
        )
    if asked is None:
        return source.encoder
    for field in fields(asked):
        wanted, there = getattr(asked, field.name), getattr(source.encoder, field.name)
        if field.name not in FREE and wanted != there:
            raise SettingError(
                f"model.encoder.{field.name}",
                wanted,
                "the same (--model.encoder null --data.max_length N takes the checkpoint's settings over)",
                more=f", in the checkpoint {source.path} {there!r}",
            )
    return replace(asked, vocab_size=source.encoder.vocab_size)


def load_masked_model(net: MaskedLanguageModel, source: StoredModel, path: str) -> None:
    """Loads the weights of ``source`` into ``net``; SettingError, naming ``path``, for anything but a masked language model."""
    if "head.norm.weight" not in source.weights:
        its_config = ", or a classifier with its run's config, --config runs/NAME/config.yaml"
        allowed = f"one of MLM{its_config if 'num_labels' in source.settings else ''}"
        raise SettingError(source.setting, Path(path), allowed, more=", which has no masked-language-model head")
    source.fill(net, source.weights)


def check_same_tokenizer(data: Any, own: Tokenizer | None, setting: str = "model.pretrained", allowed: str = "") -> None:
    """Raises ValueError if a data module has another tokenizer than ``own``, that of the model that ``setting`` names.

    The data module may be the user's own, with no more than a LightningDataModule has, and so may the tokenizer.
    """
    same_ids = getattr(getattr(data, "tokenizer", None), "same_ids", None)
    if own is not None and same_ids is not None and not same_ids(own):
        name = getattr(data, "tokenizer_name", type(data).__name__)
        raise UserError(
            f"data.tokenizer={name!r} is another tokenizer than the one that {setting} was trained with",
            allowed or "that one (leave data.tokenizer out)",
        )
