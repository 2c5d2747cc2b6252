"""Perplexity as a torchmetrics metric: exp(Σ nll / Σ masked tokens) over all batches and ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lit_linformer.model.heads import IGNORED


class Exact(Metric):
    """A metric whose state keeps its dtype, whatever the module's.

    bf16-true converts a whole module to bfloat16, including its metrics, and a sum with 8 significant bits soon stops growing.
    """

    @property
    def precise(self) -> torch.dtype:
        """float64, except on Apple's GPUs, which lack it."""
        return torch.float32 if torch.backends.mps.is_available() else torch.float64

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> nn.Module:
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), *args)

    def reset(self) -> None:
        with torch.inference_mode(False):  # of Trainer.validate: a state made in it could not be added to in a fit that follows
            super().reset()


class Mean(Exact, MeanMetric):
    """torchmetrics' weighted mean, with a state that keeps its dtype."""


class Perplexity(Exact):
    """Token-weighted perplexity from negative log-likelihoods.

    torchmetrics' own takes the logarithm of a softmax, which is infinite for a loss of 200, and a mean of batch perplexities is
    not a perplexity. This one sums the model's negative log-likelihoods in float64.
    """

    full_state_update = False
    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros((), dtype=self.precise), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            nll: negative log-likelihood of each label in nats, 0 where the label is ignored, (B, M).
            labels: (B, M) int64, -100 where there is no target.
        """
        self.nll += nll.sum(dtype=self.nll.dtype)
        self.count += (labels != IGNORED).sum()

    def compute(self) -> Tensor:
        """Perplexity; NaN when nothing was seen."""
        return torch.exp(self.nll / self.count)
