"""Masked language modelling: the LightningModule that pretrains a Linformer, or the Transformer it is compared with.

Shapes: B rows, N tokens per row, M masked positions per row, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.model.flops import training_flops
from lit_linformer.model.heads import label_nll
from lit_linformer.model.ranges import Count, Natural, check_ranges
from lit_linformer.tasks.base import Batch, TrainingModule
from lit_linformer.tasks.perplexity import Perplexity
from lit_linformer.tasks.pretrained import load_masked_model
from lit_linformer.utils.errors import UserError

OF_TEXTS = ("rows", "columns", "texts", "places", "attention_mask")  # what a batch for predict holds besides input_ids


class MLM(TrainingModule):
    """Pretraining by masked language modelling (BERT's task, with RoBERTa's dynamic masking).

    Args:
        encoder: the encoder's settings; `vocab_size` replaces theirs. Together with `pretrained` they must be that model's.
        vocab_size: V; the command line takes it from the data's tokenizer; in Python, pass the data's num_tokens.
        pretrained: weights to start from: a run folder (its best checkpoint, or its last), a checkpoint file, or a folder that
            `export` wrote as safetensors or huggingface. Encoder settings and tokenizer come from there, too. None: random
            weights.
        warmup_steps: optimiser steps over which the learning rate rises from 0.
        compile: use torch.compile in training. Meant for a GPU; hardly faster on a CPU. Needs a compiler (g++; for a GPU
            Triton).
        optimization: settings of the optimiser and its learning rate (`tasks.optim.Optimization`).
    """

    def __init__(
        self,
        encoder: EncoderConfig | None = None,
        vocab_size: Count | None = None,
        pretrained: str | None = None,
        warmup_steps: Natural = 100,
        compile: bool = False,
        **optimization: Any,
    ):
        check_ranges("model.", MLM.__init__, locals())
        super().__init__(compile, **optimization)
        if pretrained is None and encoder is None:
            raise UserError("model.encoder is not given", "its settings, or model.pretrained with a model to start from")
        source, encoder = self.start_from(pretrained, encoder, vocab_size)
        # Without `pretrained`: a checkpoint of this module holds the weights.
        self.save_hyperparameters(
            {
                "encoder": asdict(encoder),
                "vocab_size": encoder.vocab_size,
                "warmup_steps": warmup_steps,
                **self.optimization.hyper_parameters(),
            }
        )
        self.net = MaskedLanguageModel(encoder)
        if source is not None:
            load_masked_model(self.net, source, pretrained)
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()

    def warmup(self, total_steps: int) -> int:
        return self.hparams.warmup_steps

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits: (B, M, V) at ``positions`` (B, M), or (B, N, V) at all N tokens."""
        return self.net(input_ids, attention_mask, positions)

    def training_loss(self, batch: Batch) -> Tensor:
        return self.net.loss(*inputs(batch))

    def training_flops(self, batch: Batch) -> int | None:
        rows, length = batch["input_ids"].shape
        of_row = training_flops(self.net.encoder, length, masked=batch["positions"].shape[1])
        return None if of_row is None else rows * of_row

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """{"nll": (B, M)}, for callbacks."""
        return {"nll": self._evaluate(batch, self.val_perplexity, "val/perplexity")}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.test_perplexity, "test/perplexity")

    def _evaluate(self, batch: Batch, metric: Perplexity, name: str) -> Tensor:
        ids, positions, labels, mask = inputs(batch)
        return self._score(self.net.exact_logits(ids, positions, mask), labels, metric, name)

    def _score(self, logits: Tensor, labels: Tensor, metric: Perplexity, name: str) -> Tensor:
        """Logs the metric of logits (B, M, V); returns the labels' negative log-likelihoods (B, M)."""
        nll = label_nll(logits, labels)
        metric.update(nll, labels)
        self.log(name, metric, prog_bar=True)
        return nll

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each mask {text, mask (1: the text's first), top: [{token, id, probability}, …], the five most probable tokens}.

        A text from data.file also has line or row, its number there.
        """
        if lacking := [name for name in OF_TEXTS if name not in batch]:
            allowed = f"one with {', '.join(lacking)}, as PretrainingData makes it, or a predict_step of your own"
            raise UserError(f"a batch for predict holds {', '.join(batch)}", allowed)
        rows = batch["rows"].tolist()
        number = [rows[:index].count(row) for index, row in enumerate(rows)]  # of the mask within its text
        positions = batch["columns"].new_zeros(len(batch["input_ids"]), 1 + max(number))
        positions[rows, number] = batch["columns"]
        logits = self.net.exact_logits(batch["input_ids"], positions, batch["attention_mask"])[rows, number]
        chances = logits.softmax(-1).topk(min(5, logits.shape[-1]))
        tokenizer = self.trainer.datamodule.tokenizer
        return [
            {
                "text": batch["texts"][row],
                **batch["places"][row],
                "mask": 1 + number[index],
                "top": [{"token": tokenizer.decode([i]), "id": i, "probability": p} for i, p in zip(ids, found, strict=True)],
            }
            for index, (row, ids, found) in enumerate(zip(rows, chances.indices.tolist(), chances.values.tolist(), strict=True))
        ]


def inputs(batch: Batch) -> tuple[Tensor | None, ...]:
    """The batch's ids (B, N), positions and labels (B, M), and attention_mask (B, N) or None, in the model's order."""
    if missing := [name for name in ("input_ids", "positions", "labels") if name not in batch]:
        holds = f"holds {', '.join(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise UserError(f"a batch {holds}", f"a dict that holds {', '.join(missing)}, as PretrainingData makes it")
    return batch["input_ids"], batch["positions"], batch["labels"], batch.get("attention_mask")
