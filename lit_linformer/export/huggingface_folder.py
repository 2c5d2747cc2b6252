"""The huggingface format: what AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer and pipelines load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.export.huggingface import (
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerPreTrainedModel,
    PreTrainedTokenizerFast,
)
from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.utils.files import write_json
from lit_linformer.utils.quiet import quiet


def write(model: TrainedModel, folder: Path) -> None:
    """Writes config.json, model.safetensors and, if there is a tokenizer, tokenizer.json and tokenizer_config.json.

    With a tokenizer, and except for a classifier, also writes what Sentence Transformers reads: mean pooling over all tokens,
    normalised to length 1, as in `embed`."""
    with quiet():
        as_transformers(model).save_pretrained(folder)
    if model.tokenizer is None:
        return
    fast_tokenizer(model).save_pretrained(folder)
    if not model.classifies:
        modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        listed = [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
            for place, (name, path) in enumerate(modules.items())
        ]
        pooling = {"word_embedding_dimension": model.encoder.hidden_size, "pooling_mode_mean_tokens": True}
        pooling |= {"pooling_mode_cls_token": False}
        write_json(folder / "modules.json", listed, indent=2)
        write_json(folder / "1_Pooling" / "config.json", pooling, indent=2)
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": model.max_length, "do_lower_case": False}, indent=2)


def as_transformers(model: TrainedModel) -> LinformerPreTrainedModel:
    """The same weights in transformers' classes."""
    settings = dict(vars(model.encoder))
    if model.tokenizer is not None:
        settings |= {f"{role}_token_id": getattr(model.tokenizer, f"{role}_id") for role in ("bos", "pad", "eos")}
    settings["max_position_embeddings"], settings["longest_row"] = settings.pop("max_length"), model.max_length
    if model.classifies:
        labels = model.labels or [f"LABEL_{i}" for i in range(model.num_labels)]
        settings |= {"pooling": model.net.pooling, "pair": model.pair, "id2label": dict(enumerate(labels))}
        settings |= {"label2id": {label: i for i, label in enumerate(labels)}}
        if model.num_labels == 1:
            settings["problem_type"] = "regression"  # or pipelines would apply a sigmoid
        elif model.several_labels:
            settings["problem_type"] = "multi_label_classification"
    made = LinformerForSequenceClassification if model.classifies else LinformerForMaskedLM
    found = made(LinformerConfig(**settings, lit_linformer=model.facts))
    head = "classifier." if model.classifies else "lm_head."
    found.load_state_dict(
        {
            (head + name.removeprefix("head.") if name.startswith("head.") else f"linformer.{name}"): tensor
            for name, tensor in model.net.state_dict().items()
        }
    )
    return found.eval()


def fast_tokenizer(model: TrainedModel) -> Any:
    """A tokenizer that builds rows as this project does: bos A eos, or bos A eos eos B eos; padded on the right.

    For a masked language model names of special tokens in a text become those tokens, as in `predict`; for a classifier
    they are plain text, and white space around a text is dropped.
    """
    from tokenizers import normalizers, processors

    backend = Tokenizer.from_str(model.tokenizer.to_str(), model.name).backend  # a copy, since it is changed
    vocabulary = {i: name for name, i in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    names = {role: getattr(model.tokenizer, f"{role}_id") for role in ("bos", "eos", "pad", "unk", "mask")}
    special = {role: added.get(i, vocabulary[i]) for role, i in names.items() if i is not None}
    bos, eos = vocabulary[names["bos"]], vocabulary[names["eos"]]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} {eos} $B {eos}",
        special_tokens=[(bos, names["bos"]), (eos, names["eos"])],
    )
    if model.classifies and not model.tokenizer.strips:
        backend.normalizer = normalizers.Sequence([normalizers.Strip(), *([backend.normalizer] if backend.normalizer else [])])
    special |= {"cls": special["bos"], "sep": special["eos"]}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model.max_length,
        padding_side="right",
        truncation_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=model.classifies,
        **{f"{role}_token": token for role, token in special.items()},
    )


def logits(model: TrainedModel, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """The written model, as a function of input_ids and attention_mask (B, N)."""
    made = LinformerForSequenceClassification if model.classifies else LinformerForMaskedLM
    with quiet():
        loaded = made.from_pretrained(folder).eval()
    return lambda ids, mask: loaded(ids, mask).logits
