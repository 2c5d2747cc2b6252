"""Masked language modelling: the LightningModule that pretrains a Linformer, or the Transformer it is compared with.

Shapes: B rows, N tokens a row, M masked positions a row, V vocabulary.
"""

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.tasks.optim import SCHEDULES, lr_factor, parameter_groups
from lit_linformer.tasks.perplexity import Perplexity

Batch = dict[str, Any]


class MLM(LightningModule):
    """Pretraining by masked language modelling (BERT's task, with RoBERTa's dynamic masking).

    Args:
        encoder: the encoder's shape; its vocab_size is taken from the data.
        vocab_size: V; the command line fills it in from the data's tokenizer.
        lr: peak learning rate of AdamW.
        weight_decay: of the matrices; norms, biases and embeddings have none.
        projection_lr_factor: learning rate of E and F, as a multiple of lr. AdamW moves every entry by about lr a step, and
            E's are k/n or 0 at the start: at 1 the windows of block_mean are gone before the rest has learnt to use them.
        projection_weight_decay: of E and F.
        betas: AdamW's. 0.98 for the second is RoBERTa's.
        eps: AdamW's. 1e-6 is RoBERTa's.
        warmup_steps: optimiser steps over which the learning rate rises from 0.
        schedule: how it falls until trainer.max_steps: linear | cosine | polynomial | constant.
        power: exponent of the polynomial schedule.
        final_lr_factor: what it ends at, as a multiple of lr.
    """

    def __init__(
        self,
        encoder: EncoderConfig,
        vocab_size: int | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        projection_lr_factor: float = 0.02,
        projection_weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        warmup_steps: int = 100,
        schedule: str = "linear",
        power: float = 2.0,
        final_lr_factor: float = 0.0,
    ):
        super().__init__()
        if isinstance(encoder, dict):  # from a checkpoint, whose hyper-parameters are plain
            encoder = EncoderConfig(**encoder)
        if vocab_size is not None:
            encoder = replace(encoder, vocab_size=vocab_size)
        if schedule not in SCHEDULES:
            raise ValueError(f"model.schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
        for name, value in (("lr", lr), ("eps", eps)):
            if value <= 0:
                raise ValueError(f"model.{name} is {value}; allowed: more than 0")
        if warmup_steps < 0:
            raise ValueError(f"model.warmup_steps is {warmup_steps}; allowed: 0 or more")
        self.save_hyperparameters(
            {
                "encoder": asdict(encoder),
                "vocab_size": encoder.vocab_size,
                "lr": lr,
                "weight_decay": weight_decay,
                "projection_lr_factor": projection_lr_factor,
                "projection_weight_decay": projection_weight_decay,
                "betas": list(betas),
                "eps": eps,
                "warmup_steps": warmup_steps,
                "schedule": schedule,
                "power": power,
                "final_lr_factor": final_lr_factor,
            }
        )
        self.net = MaskedLanguageModel(encoder)
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()
        self.batches_seen = 0
        self.tokens_seen = 0  # block positions fed to the model, over all ranks

    def setup(self, stage: str) -> None:
        rows, longest = getattr(self.trainer.datamodule, "max_length", 0), self.net.encoder.config.max_length
        if rows > longest:
            raise ValueError(f"data.max_length is {rows}; allowed: up to model.encoder.max_length = {longest}")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits, (B, M, V) at ``positions`` (B, M), or (B, N, V)."""
        return self.net(input_ids, attention_mask, positions)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Dropout is a pure function of (seed, batches so far, rank), so that a resumed run repeats it bit for bit.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        state = np.random.SeedSequence((seed, self.batches_seen, self.global_rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.net.loss(batch["input_ids"], batch["positions"], batch["labels"], batch.get("attention_mask"))
        self.batches_seen += 1
        self.tokens_seen += batch["input_ids"].numel() * self.trainer.world_size
        self.log("train/loss", loss.detach())
        self.log("train/lr", self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.val_perplexity, "val/perplexity")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.test_perplexity, "test/perplexity")

    def _evaluate(self, batch: Batch, metric: Perplexity, name: str) -> None:
        nll = self.net.nll(batch["input_ids"], batch["positions"], batch["labels"], batch.get("attention_mask"))
        metric.update(nll, batch["labels"])
        self.log(name, metric, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """The five most probable tokens of each mask: [{text, mask (1 the text's first), ids, probabilities}, …]."""
        logits = self(batch["input_ids"], batch["attention_mask"])[batch["rows"], batch["columns"]]
        top = logits.float().softmax(-1).topk(min(5, logits.shape[-1]))
        rows = batch["rows"].tolist()
        return [
            {"text": batch["texts"][row], "mask": 1 + rows[:index].count(row), "ids": ids, "probabilities": probabilities}
            for index, (row, ids, probabilities) in enumerate(zip(rows, top.indices.tolist(), top.values.tolist(), strict=True))
        ]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            self._parameter_groups(), betas=tuple(self.hparams.betas), eps=self.hparams.eps, fused=True
        )
        # A fused step can undo the gradient scaler by itself; Lightning then refuses to clip, in bf16-mixed too, which
        # scales nothing. Told that it can't, it is given unscaled, clipped gradients in every precision.
        optimizer._step_supports_amp_scaling = False
        factor = partial(
            lr_factor,
            schedule=self.hparams.schedule,
            warmup_steps=self.hparams.warmup_steps,
            total_steps=self._total_steps(),
            final=self.hparams.final_lr_factor,
            power=self.hparams.power,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        h = self.hparams
        return parameter_groups(self.net, h.lr, h.weight_decay, h.projection_lr_factor, h.projection_weight_decay)

    def _total_steps(self) -> int:
        if self.trainer.max_steps > 0:
            return self.trainer.max_steps
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf") and self.hparams.schedule != "constant":
            raise ValueError(
                f"trainer.max_steps is {self.trainer.max_steps}; allowed with model.schedule={self.hparams.schedule!r}: "
                "1 or more, for the learning rate has to end somewhere"
            )
        return 0 if steps == float("inf") else int(steps)

    def on_train_start(self) -> None:
        # A restored optimiser brings the old run's settings along; what this run was given wins (stack: PL does not do this).
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        for index, group in enumerate(self._parameter_groups()):
            scheduler.base_lrs[index] = group["lr"]
            restored = optimizer.param_groups[index]
            restored["lr"] = group["lr"] * scheduler.lr_lambdas[index](scheduler.last_epoch)
            restored["weight_decay"] = group["weight_decay"]
            restored["betas"], restored["eps"] = tuple(self.hparams.betas), self.hparams.eps

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {"batches": self.batches_seen, "tokens": self.tokens_seen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        seen = checkpoint.get("seen", {})
        self.batches_seen, self.tokens_seen = seen.get("batches", 0), seen.get("tokens", 0)
        mine = self.state_dict()
        for name, tensor in checkpoint["state_dict"].items():
            if name not in mine or mine[name].shape != tensor.shape:
                here = f"has {list(mine[name].shape)}" if name in mine else "has none"
                raise ValueError(
                    f"the checkpoint does not fit this model: {name} is {list(tensor.shape)} there, the model {here}; "
                    "allowed: a checkpoint made with the same model.encoder and vocabulary"
                )
        if missing := [name for name in mine if name not in checkpoint["state_dict"]]:
            raise ValueError(f"the checkpoint does not fit this model: it lacks {missing[0]} ({len(missing)} missing in all)")
