"""This project's models in transformers: importing this module registers them with the Auto classes and pipelines.

    import lit_linformer.export.huggingface
    from transformers import AutoModelForMaskedLM, pipeline

    model = AutoModelForMaskedLM.from_pretrained("out/quickstart")
    pipeline("fill-mask", "out/quickstart")("Return the <mask> of the object.")

A thin wrapper: the encoder and the heads are those of lit_linformer.model. Rows must be padded on the right, as the tokenizer
does; any other mask is refused.
Shapes: B rows, N tokens, D hidden width, V vocabulary, C classes, K slots.
"""

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_linformer.model import ClassificationHead, Encoder, EncoderConfig, MaskedLMHead
from lit_linformer.model.encoder import layer_outputs
from lit_linformer.model.heads import pool
from lit_linformer.utils.errors import UserError

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers import initialization as init
    from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
    from transformers.utils import can_return_tuple
except ImportError as error:
    message = f"lit_linformer.export.huggingface needs transformers 5 ({error}); allowed after: pip install 'lit-linformer[hf]'"
    raise ModuleNotFoundError(message) from error


class LinformerConfig(PreTrainedConfig):
    """EncoderConfig's settings under their own names, except max_length, which means something else in transformers.

    Args:
        max_position_embeddings: EncoderConfig's max_length.
        pooling: for classifiers, first or mean.
        longest_row, pair: TrainedModel's max_length, and for classifiers its pair.
        lit_linformer: what is known about the training: version, step, tokens, perplexity …
    """

    model_type = "lit_linformer"
    attribute_map = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}  # noqa: RUF012

    def __init__(self, pooling: str = "first", **kwargs: Any):
        settings = {field.name: kwargs.pop(_name(field.name), field.default) for field in fields(EncoderConfig)}
        for name, value in vars(EncoderConfig(**settings)).items():  # which checks them
            setattr(self, _name(name), value)
        self.pooling = pooling
        super().__init__(**kwargs)

    def encoder(self) -> EncoderConfig:
        return EncoderConfig(**{field.name: getattr(self, _name(field.name)) for field in fields(EncoderConfig)})


def _fresh(config: EncoderConfig, name: str) -> nn.Module:
    """The encoder's module of that name, newly initialised: from an encoder with only that layer."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        name, config = f"layers.0.{rest}", replace(config, projection_dim=config.projection_dims[int(layer)])
    else:
        config = replace(config, projection_dim=config.projection_dims[0])
    return Encoder(replace(config, num_layers=1, vocab_size=1)).get_submodule(name)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own weights and buffers, also those with persistent=False, which its state_dict() lacks."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _name(setting: str) -> str:
    return "max_position_embeddings" if setting == "max_length" else setting


class LinformerPreTrainedModel(PreTrainedModel):
    """What the models share: initialisation and activation checkpointing."""

    config_class = LinformerConfig
    base_model_prefix = "linformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises what a loaded folder lacks, such as a classifier's head; transformers does linear, embedding and norm."""
        super()._init_weights(module)
        if isinstance(module, MaskedLMHead):
            if module.bias is not None:
                init.zeros_(module.bias)
        elif not isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            own = _tensors(module)
            encoder = self.base_model.encoder
            name = next((name for name, part in encoder.named_modules() if part is module), "") if own else ""
            if name:  # E, a local convolution, a class of the user's own
                fresh = _tensors(_fresh(self.config.encoder(), name))
                for key in own.keys() & fresh.keys():
                    init.copy_(own[key], fresh[key].to(own[key].device))

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """The encoder recomputes its layers by itself (use_reentrant=False), not in transformers' way."""
        encoder = self.base_model.encoder
        encoder.config.activation_checkpointing = encoder.gradient_checkpointing = enable

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.encoder.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.base_model.encoder.tokens = value

    def get_output_embeddings(self) -> None:
        """None: the head multiplies by the input embeddings themselves, so that there is nothing to tie."""


class LinformerModel(LinformerPreTrainedModel):
    """The encoder alone."""

    # So that a whole model's folder can be read for its encoder. A list, since transformers 5.0 adds another one to it.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\.", r"^classifier\."]

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.encoder = Encoder(config.encoder())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        inputs_embeds: None = None,
    ) -> BaseModelOutput:
        """Encode.

        Args:
            input_ids: (B, N) int64, or (B, N, input_size) floats, as the encoder's.
            attention_mask: (B, N), 1 at real tokens; None when all are.
            output_hidden_states: also return the embeddings and each layer's output, (B, N, D) each; with norm="pre" the last
                one is normalised.
            output_attentions: also return each layer's maps, as Encoder does.
            inputs_embeds: must be None; it exists because PEFT passes it to every model.
        """
        if inputs_embeds is not None:
            raise UserError("inputs_embeds are given", "None: the encoder reads input_ids")
        output_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        with layer_outputs(self.encoder) if output_hidden_states else nullcontext() as states:
            hidden, maps = self.encoder(input_ids, attention_mask, True if output_attentions else ())
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if states else None,
            attentions=tuple(maps.values()) or None,
        )


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """The encoder and RoBERTa's head, whose output matrix is the token embedding."""

    accepts_loss_kwargs = True  # num_items_in_batch

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.lm_head = MaskedLMHead(config.encoder())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        inputs_embeds: None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput:
        """Logits (B, N, V), and the loss if there are labels (B, N), -100 where there is nothing to predict.

        The loss is their mean or, with num_items_in_batch, which the Trainer passes when it accumulates, the sum over it.
        """
        found = self.linformer(
            input_ids, attention_mask, output_hidden_states, output_attentions, inputs_embeds, return_dict=True
        )
        features = self.lm_head(found.last_hidden_state)
        logits = nn.functional.linear(features, self.linformer.encoder.tokens.weight, self.lm_head.bias)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states, attentions=found.attentions)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; the head's bias is extended with zeros, or cut."""
        tokens, bias = super().resize_token_embeddings(*args, **kwargs), self.lm_head.bias
        if bias is None:
            return tokens
        sized = bias.new_zeros(tokens.num_embeddings)
        both = min(len(sized), len(bias))
        sized[:both] = bias.detach()[:both]
        self.lm_head.bias = nn.Parameter(sized, requires_grad=bias.requires_grad)
        return tokens


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """The encoder and RoBERTa's classification head; num_labels = 1 is a regression."""

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.linformer = LinformerModel(config)
        self.classifier = ClassificationHead(config.encoder(), config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        inputs_embeds: None = None,
    ) -> SequenceClassifierOutput:
        """Logits (B, C), and the loss if there are labels (B,): cross entropy, or squared error for a regression."""
        found = self.linformer(
            input_ids, attention_mask, output_hidden_states, output_attentions, inputs_embeds, return_dict=True
        )
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.classifier(pool(found.last_hidden_state, mask, self.config.pooling))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        states = {"hidden_states": found.hidden_states, "attentions": found.attentions}
        return SequenceClassifierOutput(loss=loss, logits=logits, **states)


AutoConfig.register(LinformerConfig.model_type, LinformerConfig, exist_ok=True)
AutoModel.register(LinformerConfig, LinformerModel, exist_ok=True)
AutoModelForMaskedLM.register(LinformerConfig, LinformerForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(LinformerConfig, LinformerForSequenceClassification, exist_ok=True)
AutoTokenizer.register(LinformerConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
