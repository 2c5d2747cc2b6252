"""An objective of your own: which tokens were replaced? (After ELECTRA, with random tokens instead of a generator's.)

    python run.py fit --config conf/quickstart.yaml --name denoising --model examples.denoising.Denoising

The text, the tokenizer and the Trainer are the quickstart's. `headline` names the metric that decides which checkpoint is best.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric

from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.tasks.base import TrainingModule


class Detector(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N) → logits (B, N): above 0 where a token looks replaced."""
        return self.head(self.encoder(input_ids, attention_mask)).squeeze(-1)


class Denoising(TrainingModule):
    """Replaced-token detection.

    Args:
        encoder: the encoder's settings; its vocab_size is taken from the data.
        vocab_size: the command line takes it from the data's tokenizer.
        replaced: share of the tokens that are replaced, in training and in validation.
        warmup_steps: optimiser steps over which the learning rate rises from 0.
        optimization: settings of the optimiser and its learning rate (`lit_linformer.tasks.optim.Optimization`).
    """

    headline = ("val/loss", "validation loss", ".4f", min)

    def __init__(
        self,
        encoder: EncoderConfig | None = None,
        vocab_size: int | None = None,
        replaced: float = 0.15,
        warmup_steps: int = 10,
        **optimization: Any,
    ):
        super().__init__(**optimization)
        if not isinstance(encoder, EncoderConfig):
            encoder = EncoderConfig(**(encoder or {}))  # a dict where a checkpoint is loaded
        encoder = replace(encoder, vocab_size=vocab_size or encoder.vocab_size)
        self.save_hyperparameters(
            {"encoder": asdict(encoder), "replaced": replaced, "warmup_steps": warmup_steps}
            | self.optimization.hyper_parameters()
        )
        self.net = Detector(encoder)
        self.mean = MeanMetric()

    def warmup(self, total_steps: int) -> int:
        return self.hparams.warmup_steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._losses(batch).mean()
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.mean.update(self._losses(batch, torch.Generator(self.device).manual_seed(0)))
        self.log("val/loss", self.mean)  # a metric of torchmetrics is also right on several processes

    def _losses(self, batch: dict[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """The loss of each token, (T,). With a generator the same positions of all rows are replaced, in every validation."""
        # The data module has masked tokens for MLM. This puts the original ones back: `labels` (B, M) at `positions`;
        # -100 where a row has fewer than M. A row without any only fills up the batch of one of several processes.
        known = batch["labels"] >= 0
        there = batch["input_ids"].gather(1, batch["positions"])
        ids = batch["input_ids"].scatter(1, batch["positions"], torch.where(known, batch["labels"], there))
        mask = batch.get("attention_mask")
        real = known.any(1, keepdim=True) & (torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
        shape = ids.shape if generator is None else ids.shape[1:]
        noise = torch.rand(shape, generator=generator, device=ids.device)
        other = torch.randint(self.net.encoder.config.vocab_size, shape, generator=generator, device=ids.device)
        damaged = torch.where(real & (noise < self.hparams.replaced), other, ids)
        logits = self.net(damaged, mask)[real]
        return functional.binary_cross_entropy_with_logits(logits, (damaged != ids)[real].to(logits.dtype), reduction="none")
