"""Scores of a classification or regression task, over every row of an evaluation set and all ranks.

GLUE's are computed by torchmetrics from the whole set's predictions at once, not as a mean over batches or ranks; filler rows,
which a loader gives a rank that has run out of rows (index -1), do not count.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics.functional.classification import (
    binary_f1_score,
    multiclass_accuracy,
    multiclass_f1_score,
    multiclass_matthews_corrcoef,
    multilabel_f1_score,
)
from torchmetrics.functional.regression import pearson_corrcoef, spearman_corrcoef
from torchmetrics.utilities import dim_zero_cat

from lit_linformer.tasks.perplexity import Exact
from lit_linformer.utils.errors import SettingError, UserError


def score(name: str, predictions: Tensor, targets: Tensor, num_labels: int) -> float:
    """One metric of predictions (R,) against targets (R,): class numbers, or values for pearson and spearman.

    Where a row may have several labels both are (R, C), a 0 or 1 for each class, and accuracy is the share of rows that are
    right in all of them. With two classes f1 is GLUE's, that of class 1; with more it is macro_f1, the mean over classes. A
    correlation with a constant is 0. SettingError for an unknown name.
    """
    if name in ("pearson", "spearman", "matthews") and min(predictions.unique().numel(), targets.unique().numel()) < 2:
        return 0.0
    if name in ("pearson", "spearman"):
        correlation = {"pearson": pearson_corrcoef, "spearman": spearman_corrcoef}[name]
        return correlation(predictions.double(), targets.double()).item()
    predictions, targets = predictions.long(), targets.long()
    if predictions.dim() == 2:
        if name in ("micro_f1", "macro_f1"):
            return multilabel_f1_score(predictions, targets, num_labels, average=name.removesuffix("_f1")).item()
        if name == "accuracy":
            return (predictions == targets).all(1).double().mean().item()
        raise SettingError("metric", name, "micro_f1, macro_f1, accuracy", when="where a row may have several labels")
    if name == "accuracy":
        return multiclass_accuracy(predictions, targets, num_labels, average="micro").item()
    if name == "f1" and num_labels == 2:
        return binary_f1_score(predictions, targets).item()
    if name in ("f1", "macro_f1"):
        return multiclass_f1_score(predictions, targets, num_labels, average="macro").item()
    if name == "matthews":
        return multiclass_matthews_corrcoef(predictions, targets, num_labels).item()
    raise SettingError("metric", name, "accuracy, f1, macro_f1, matthews, pearson, spearman")


class Scores(Exact):
    """Collects an evaluation set's predictions.

    Args:
        metrics: names of the task's metrics; their mean is its score, as in GLUE.
        num_labels: C classes; 1 for regression.
        several_labels: a row may have any number of the classes; those whose logit is above 0 are predicted.
        keep_logits: keep each row's logits, too, for a file of all predictions.
    """

    full_state_update = False

    def __init__(
        self, metrics: Sequence[str], num_labels: int, several_labels: bool = False, keep_logits: bool = False
    ) -> None:
        super().__init__()
        self.metrics, self.num_labels = tuple(metrics), num_labels
        self.several_labels, self.keep_logits = several_labels, keep_logits
        for name in ("predictions", "targets", "index", "logits"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.add_state("loss", torch.zeros((), dtype=self.precise), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor | None, index: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (B, C); (B, 1) for regression.
            labels: (B,) class numbers or values, or (B, C) of 0 and 1; None: there are none.
            index: (B,) the rows' numbers in their file, -1 for a filler row.
        """
        found = logits[:, 0] if self.num_labels == 1 else answers(logits, self.several_labels)
        self.predictions.append(found.to(self.precise))
        self.index.append(index)  # `compute` drops filler rows: dropping them here would make each batch wait for the GPU
        if self.keep_logits:
            self.logits.append(logits)
        if labels is not None:
            self.targets.append(labels.to(self.precise))
            losses = task_loss(logits.to(self.precise), labels, "none", self.several_labels)
            self.loss += losses.where(index >= 0, 0.0).sum()

    def compute(self) -> dict[str, Any]:
        """{predictions (R,), targets (R,), scores, index (R,)} and, if they are kept, logits (R, C), in the file's order.

        predictions and targets are (R, C) where a row may have several labels.

        scores: {loss, each metric, score}, empty if the set has no labels: then targets is None. index: the rows' numbers.
        """
        index = _joined(self.index)
        order = index.argsort()[(index < 0).sum() :]
        predictions = _joined(self.predictions)[order].cpu()
        targets = _joined(self.targets)
        found = {"predictions": predictions, "targets": None, "scores": {}, "index": index[order].cpu()}
        if self.keep_logits:
            found["logits"] = _joined(self.logits)[order].cpu()
        if not len(targets):
            return found
        targets = targets[order].cpu()
        broken = bool(self.loss.isnan())  # argmax and ranks make numbers even of NaN
        values = {name: math.nan if broken else score(name, predictions, targets, self.num_labels) for name in self.metrics}
        scores = {"loss": self.loss.item() / len(order), **values, "score": sum(values.values()) / len(values)}
        return found | {"targets": targets, "scores": scores}

    def results(self) -> dict[str, Any]:
        """What `compute` returns, even for one row: torchmetrics turns a tensor with one element into a scalar."""
        by_class = ("logits", "predictions", "targets") if self.several_labels else ("logits",)
        shapes = dict.fromkeys(by_class, (-1, self.num_labels))
        found = self.compute().items()
        return {name: value.reshape(shapes.get(name, -1)) if isinstance(value, Tensor) else value for name, value in found}


def _joined(state: Tensor | list[Tensor]) -> Tensor:
    """A state as one tensor. It is a tensor after it was joined over ranks, a list before that, empty if there was no batch."""
    return dim_zero_cat(state) if len(state) else torch.zeros(0, dtype=torch.int64)


def answers(logits: Tensor, several_labels: bool = False) -> Tensor:
    """The class predicted for each row of logits (R, C), (R,); with several_labels (R, C) bool, true where p is above 0.5."""
    return logits > 0 if several_labels else logits.argmax(-1)


def task_loss(logits: Tensor, labels: Tensor, reduction: str = "mean", several_labels: bool = False) -> Tensor:
    """Cross-entropy in nats of logits (B, C), or mean squared error if C is 1; UserError if labels are not (B,).

    With several_labels, binary cross-entropy, a mean over classes: labels are (B, C), a 0 or 1 for each class.
    """
    wanted = logits.shape if several_labels else logits.shape[:1]
    if labels.shape != wanted:  # a column (B, 1) would be compared with the values of all rows
        each = "a 0 or 1 for each class" if several_labels else "a class or value for each row"
        raise UserError(f"labels of a batch have the shape {tuple(labels.shape)}", f"{tuple(wanted)}, {each}")
    if several_labels:
        losses = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)
        return losses if reduction == "none" else losses.mean()
    if logits.shape[1] == 1:
        return functional.mse_loss(logits[:, 0], labels.to(logits.dtype), reduction=reduction)
    return functional.cross_entropy(logits, labels, reduction=reduction)
