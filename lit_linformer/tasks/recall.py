"""Masked language modelling that is scored by accuracy: for the recall task (data/recall.py)."""

from typing import Any

from torch import Tensor

from lit_linformer.model.heads import IGNORED
from lit_linformer.tasks.mlm import MLM
from lit_linformer.tasks.perplexity import Mean, Perplexity


class Recall(MLM):
    """MLM with val/accuracy and test/accuracy: the share of masked tokens whose most probable token is the right one.

    Args:
        kwargs: MLM's settings.
    """

    headline = ("val/accuracy", "validation accuracy", ".4f", max)

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.val_accuracy, self.test_accuracy = Mean(), Mean()

    def _score(self, logits: Tensor, labels: Tensor, metric: Perplexity, name: str) -> Tensor:
        right = logits.argmax(-1) == labels
        accuracy = self.val_accuracy if metric is self.val_perplexity else self.test_accuracy
        accuracy.update(right.float(), (labels != IGNORED).float())
        self.log(name.replace("perplexity", "accuracy"), accuracy, prog_bar=True)
        return super()._score(logits, labels, metric, name)
