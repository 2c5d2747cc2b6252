"""Fine-tuning: the LightningModule that classifies (or rates) texts with a pretrained encoder, or one from scratch.

Shapes: B texts, W rows (windows of texts), N tokens per row, C classes (1 for regression).
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_linformer.data.finetuning.text_tasks import TextTask
from lit_linformer.model import Encoder, EncoderConfig, SequenceClassifier
from lit_linformer.model.errors import shown
from lit_linformer.model.flops import training_flops
from lit_linformer.model.heads import POOLINGS
from lit_linformer.model.parts import at_least_float32
from lit_linformer.model.ranges import Count, Dropout, Natural, OneOf, Range, Share, check_ranges
from lit_linformer.tasks.base import Batch, TrainingModule
from lit_linformer.tasks.data_fits import check_classes
from lit_linformer.tasks.optim import LearningRate, WeightDecay, layer_decay, parameter_groups
from lit_linformer.tasks.scores import Scores, answers, task_loss
from lit_linformer.utils.errors import SettingError, UserError


class SequenceClassification(TrainingModule):
    """Classification or regression of texts and pairs of texts. The defaults are RoBERTa's recipe for GLUE.

    Args:
        pretrained: a run folder (its best checkpoint, or its last), a checkpoint file, or a folder that `export` wrote as
            safetensors or huggingface, which provides encoder settings, weights and tokenizer. None: train from scratch with
            `encoder`.
        load_weights: whether to load the weights of `pretrained`; false: take only its settings and tokenizer, and start from
            random weights.
        encoder: the encoder's settings, to train from scratch; together with `pretrained` they must be that checkpoint's.
        vocab_size: V; the command line takes it from the data's tokenizer; in Python, pass the data's num_tokens.
        num_labels: number of classes, 1 for regression; the command line takes it from the data.
        pooling: what represents a text: first (its first token, as in RoBERTa) | mean (over its tokens).
        dropout: dropout of encoder and head, in place of the one in pretraining or `encoder`.
        attention_dropout: dropout of attention weights, in place of the one in pretraining or `encoder`.
        activation_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        lr: peak learning rate. 1e-5 suits an encoder of RoBERTa-base's size; conf/finetune/small.yaml has 1e-3, for one of a
            few million parameters.
        layer_lr_decay: factor by which the learning rate falls with each layer below the head; 1.0: the same for all.
        trained_layers: how many of the encoder's last layers learn, beside the head; what is below them keeps the weights that
            it starts from, and costs no backward pass. 0: the head alone learns. None: everything learns.
        weight_decay: weight decay of the matrices; norms, biases and embeddings have none.
        warmup_fraction: share of all optimiser steps over which the learning rate rises from 0.
        compile: use torch.compile in training, for batches of any length: three graphs for each kind of layer, for rows
            shorter than k, shorter than n, and of n tokens. Meant for a GPU; on a CPU it is hardly faster and takes minutes
            to compile. Needs a compiler (g++; for a GPU Triton).
        optimization: the other settings of the optimiser and its learning rate (`tasks.optim.Optimization`).
    """

    headline = ("val/score", "validation score", ".4f", max)

    def __init__(
        self,
        pretrained: str | None = None,
        load_weights: bool = True,
        encoder: EncoderConfig | None = None,
        vocab_size: Count | None = None,
        num_labels: Count = 2,
        pooling: Annotated[str, OneOf(POOLINGS)] = "first",
        dropout: Dropout = 0.1,
        attention_dropout: Dropout = 0.1,
        activation_checkpointing: bool = False,
        lr: LearningRate = 1e-5,
        layer_lr_decay: Annotated[float, Range(above=0, most=1)] = 1.0,
        trained_layers: Natural | None = None,
        weight_decay: WeightDecay = 0.1,
        warmup_fraction: Share = 0.06,
        compile: bool = False,
        **optimization: Any,
    ):
        check_ranges("model.", SequenceClassification.__init__, locals())
        super().__init__(compile, lr=lr, weight_decay=weight_decay, **optimization)
        if pretrained is None and encoder is None:
            raise UserError(
                "model.pretrained is not given",
                "a run directory or a checkpoint, or model.encoder with the settings of one to train from scratch",
            )
        given = encoder is not None
        source, encoder = self.start_from(pretrained, encoder, vocab_size)
        if given:
            _check_ignored(encoder, source and source.encoder, dropout=dropout, attention_dropout=attention_dropout)
            activation_checkpointing |= encoder.activation_checkpointing
        encoder = replace(
            encoder,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation_checkpointing=activation_checkpointing,
        )
        # Without `pretrained`: a checkpoint of this module holds the weights, and must load even if their source is gone.
        self.save_hyperparameters(
            {
                "encoder": asdict(encoder),
                "num_labels": num_labels,
                "pooling": pooling,
                "dropout": dropout,
                "attention_dropout": attention_dropout,
                "activation_checkpointing": activation_checkpointing,
                "layer_lr_decay": layer_lr_decay,
                "trained_layers": trained_layers,
                "warmup_fraction": warmup_fraction,
                **self.optimization.hyper_parameters(),
            }
        )
        self.net = SequenceClassifier(encoder, num_labels, pooling)
        if source is not None and load_weights:
            source.fill(self.net.encoder, source.encoder_weights)
        if trained_layers is not None:
            _freeze(self.net.encoder, trained_layers)
        self.several_labels = False  # whether a row may have any number of the classes: the data say so
        self.evaluations: dict[str, Scores] = {}
        self.results: dict[str, dict[str, Any]] = {}  # of the last evaluation, by set: from Scores.results

    def setup(self, stage: str) -> None:
        check_classes(self.trainer.datamodule, self.hparams.num_labels)
        super().setup(stage)
        plugin = self.trainer.precision_plugin
        plugin.convert_input = partial(_but_labels, partial(type(plugin).convert_input, plugin))
        data, kept = self.trainer.datamodule, stage != "fit"  # for predictions.jsonl
        self.text_task = getattr(data, "text_task", None) or task_of_rows(data, self.hparams.num_labels)
        self.several_labels = self.text_task.several_labels
        shape = (self.hparams.num_labels, self.several_labels, kept)
        # One for each evaluation set; MNLI has two.
        self.evaluations = {name: Scores(data.metrics, *shape) for name in data.evaluation_names}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if hasattr(self, "text_task"):
            checkpoint |= {"labels": self.text_task.labels, "several_labels": self.several_labels}

    def check_optimizer(self, before: dict[str, Any]) -> None:
        super().check_optimizer(before)
        when, learn, learnt = "to continue from this checkpoint", self.hparams.trained_layers, before.get("trained_layers")
        if learn != learnt:
            raise SettingError("model.trained_layers", learn, shown(learnt), when=when)
        decay = self.hparams.layer_lr_decay
        if (decay == 1) != (before.get("layer_lr_decay", decay) == 1):
            raise SettingError("model.layer_lr_decay", decay, before["layer_lr_decay"], when=when)

    def warmup(self, total_steps: int) -> int:
        return round(self.hparams.warmup_fraction * total_steps)

    def parameter_groups(self) -> list[dict[str, Any]]:
        scale = layer_decay(self.hparams.layer_lr_decay, self.net.encoder.config.num_layers)
        return parameter_groups(self, self.peak_lr(), self.optimization, scale)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, C) of a batch: input_ids (W, N), attention_mask (W, N) if there is padding, document (W,) if W > B."""
        return self.net(batch["input_ids"], batch.get("attention_mask"), batch.get("document"), rows_of(batch))

    def training_loss(self, batch: Batch) -> Tensor:
        if batch.get("attention_mask") is None and self.compiles and not self.equal_rows:  # rather than three more graphs
            ids = batch["input_ids"]
            batch = {**batch, "attention_mask": ids.new_ones(ids.shape[:2], dtype=torch.bool)}
        return self.loss(at_least_float32(self(batch)), batch["labels"])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss that training minimises, for a subclass to define; validation and test keep this one, as val/loss.

        logits (B, C); labels (B,): class numbers, or values for a regression (C = 1), or (B, C): a 0 or 1 for each class.
        Cross-entropy, squared error, or binary cross-entropy, a mean.
        """
        return task_loss(logits, labels, several_labels=self.several_labels)

    def training_flops(self, batch: Batch) -> int | None:
        rows, length = batch["input_ids"].shape[:2]
        of_row = training_flops(self.net.encoder, length, labels=self.hparams.num_labels)
        return None if of_row is None else rows * of_row

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        scores = list(self.evaluations.values())[dataloader_idx]
        if scores.device != self.device:  # checked, since `to` would go through all batches so far
            scores.to(self.device)
        scores.update(at_least_float32(self(batch)), batch.get("labels"), batch["index"])

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def _log_scores(self, split: str) -> None:
        self.results = {}
        for position, (name, scores) in enumerate(self.evaluations.items()):
            found = self.results[name] = scores.results()
            scores.reset()
            if found["targets"] is not None:
                found["scores"] |= self.further_scores(found["predictions"], found["targets"])
            # The first set logs val/score and so on, the others val/mismatched/score.
            prefix = f"{split}/" if position == 0 else f"{split}/{name}/"
            logged = {prefix + key: value for key, value in found["scores"].items()}
            # All processes have the same values; Lightning warns unless they are reduced, and a maximum changes no digit.
            self.log_dict(logged, prog_bar=True, sync_dist=True, reduce_fx="max")

    def further_scores(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Scores besides those of data.metrics, by name, for a subclass to define: logged as val/NAME and test/NAME.

        predictions, targets (R,): class numbers, or values, of all rows of an evaluation set, on all processes; (R, C), a 0 or
        1 for each class, where a row may have several.
        """
        return {}

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each row {text, line or row in data.file, label if it is known, prediction, probabilities, top}.

        probabilities: {class: share}; top: [{label, probability}, …], the most probable first. A regression has value instead
        of these three. Where a row may have several labels, label and prediction are lists, and probabilities do not sum to 1.
        Rows that are not texts have index, their number in the data, instead of text, line or row, and label.
        """
        logits = at_least_float32(self(batch))
        if "texts" in batch:
            beside = zip(batch["texts"], batch["places"], batch["golds"], strict=True)
            records = [{"text": text, **place} | ({} if gold is None else {"label": gold}) for text, place, gold in beside]
        else:
            records = [{"index": number} for number in batch["index"].tolist()]
        found = zip(records, self.predicted(logits), strict=True)
        return [record | told | _top(told) for record, told in found]

    def predicted(self, logits: Tensor) -> list[dict[str, Any]]:
        """{prediction, probabilities: {class: share}} of each row of logits (R, C); {value} for a regression's (R, 1)."""
        labels = self.text_task.labels
        if labels is None:
            return [{"value": value} for value in logits[:, 0].tolist()]
        predictions = answers(logits, self.several_labels)
        shares = (logits.sigmoid() if self.several_labels else logits.softmax(-1)).tolist()
        return [
            {"prediction": self.text_task.label_name(found), "probabilities": dict(zip(labels, row, strict=True))}
            for found, row in zip(predictions.tolist(), shares, strict=True)
        ]


def _but_labels(convert: Callable[[Any], Any], batch: Any) -> Any:
    """A batch converted by ``convert``, except its labels: with bf16-true Lightning would round a regression's 1977 to 1976."""
    found = convert(batch)
    return found | {"labels": batch["labels"]} if isinstance(batch, dict) and "labels" in batch else found


def _freeze(encoder: Encoder, trained_layers: int) -> None:
    """Keeps the weights of all but the last layers: with them those of the embeddings, and of an E that all layers share."""
    if trained_layers > (most := len(encoder.layers)):
        raise SettingError("model.trained_layers", trained_layers, f"0 to {most}, or null: everything learns")
    learns = {*encoder.layers[most - trained_layers :]} | ({encoder.final_norm} if trained_layers else set())
    for part in {*encoder.children(), *encoder.layers} - {encoder.layers} - learns:
        part.requires_grad_(False)


def rows_of(batch: Batch) -> int:
    """B, the length of the batch's index; ValueError if a user's own data have none."""
    if "index" not in batch:
        raise UserError(f"a batch holds {', '.join(batch)}", "index, too, the number of each row (B,)")
    return len(batch["index"])


def task_of_rows(data: Any, num_labels: int) -> TextTask:
    """The task of a user's own data that are not texts: its classes are named by the data's ``labels``, or by their numbers.

    If the data have ``several_labels`` true, their labels are (B, C), a 0 or 1 for each class. ValueError if there are not
    num_labels names.
    """
    names = None if num_labels == 1 else tuple(getattr(data, "labels", None) or map(str, range(num_labels)))
    if names is not None and len(names) != num_labels:
        raise UserError(f"{type(data).__name__}.labels are {', '.join(map(str, names))}", f"{num_labels} names, as num_labels")
    sets = tuple(data.evaluation_names)
    files = tuple(f"{name or 'predictions'}.tsv" for name in sets)
    return TextTask(
        type(data).__name__,
        (),
        labels=names,
        metrics=tuple(data.metrics),
        evaluation=sets,
        submission=files,
        label_separator="|" if getattr(data, "several_labels", False) else None,
    )


def _check_ignored(encoder: EncoderConfig, pretrained: EncoderConfig | None, **settings: float) -> None:
    """Raises ValueError if a setting of model.encoder that is not read differs from its default, the pretrained model's, and
    the value used instead."""
    for name, used in settings.items():
        if getattr(encoder, name) not in (getattr(EncoderConfig, name), getattr(pretrained, name, used), used):
            raise SettingError(f"model.encoder.{name}", getattr(encoder, name), f"model.{name}", more=", which is not read")


def _top(told: dict[str, Any]) -> dict[str, Any]:
    if "value" in told:
        return {}
    order = sorted(told["probabilities"].items(), key=lambda found: -found[1])
    return {"top": [{"label": label, "probability": share} for label, share in order]}
