"""Perplexity as a torchmetrics metric: exp(Σ nll / Σ masked tokens) over everything that was seen, on all ranks."""

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_linformer.model.heads import IGNORED


class Perplexity(Metric):
    """Token-weighted perplexity from negative log-likelihoods.

    torchmetrics' own takes a softmax and then its logarithm, which is inf where the loss is 200, and a mean of batch
    perplexities is no perplexity; this one sums what the model's log-softmax gave, in float64.
    """

    full_state_update = False
    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        # Apple's GPUs have no float64.
        dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64
        self.add_state("nll", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            nll: negative log-likelihood of each label in nats, 0 where the label is ignored, (B, M).
            labels: (B, M) int64, -100 where nothing was asked.
        """
        self.nll += nll.sum(dtype=self.nll.dtype)
        self.count += (labels != IGNORED).sum()

    def compute(self) -> Tensor:
        """Perplexity; NaN when nothing was seen."""
        return torch.exp(self.nll / self.count)
