"""How well a masked language model predicts tokens that it could copy from their row, and others: copy_slices.csv, TensorBoard.

    --trainer.callbacks+ CopySlices

A head of a Transformer finds a token that has the same neighbour as the masked one, and copies it; slots, which average tokens,
blur this (docs/LOG.md).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional

from lit_linformer.callbacks.loggers import writers
from lit_linformer.callbacks.observing import Measuring, tokens_seen, write_csv
from lit_linformer.model.heads import IGNORED
from lit_linformer.model.ranges import Natural, check_ranges
from lit_linformer.tasks.perplexity import Exact
from lit_linformer.utils.errors import UserError

SLICES = (
    "nowhere_frequent", "nowhere_rare", "elsewhere_frequent", "elsewhere_rare", "beside_frequent", "beside_rare", "other",
)  # fmt: skip
OTHER = len(SLICES) - 1
AT_A_TIME = 2**22  # comparisons of two tokens


class CopySlices(Measuring):
    """Mean negative log-likelihood of validation tokens by whether the masked token could be copied from its own row.

    There are six slices, and one for the rest. In the row as the model sees it, the masked token occurs nowhere else; or
    elsewhere, next to other neighbours; or elsewhere beside the same neighbour, left or right. Each of these is split into
    frequent tokens, the first ones of the vocabulary (BPE's merges are ordered by frequency), and rare ones. The rest, other:
    tokens that masking left as they are, and those that occur again only nearby. Validation's masks are fixed, so a slice
    holds the same tokens in every run on the same data. Training is not affected. With `validate` the file is
    validate_copy_slices.csv.

    Args:
        near: number of tokens on each side that count as nearby, not as elsewhere, since the local convolution sees them.
        frequent: ids below this count as frequent.
    """

    def __init__(self, near: Natural = 8, frequent: Natural = 1000) -> None:
        check_ranges("CopySlices.", CopySlices.__init__, locals())
        self.near, self.frequent = near, frequent
        self.sums = SliceSums()
        self.rows: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        net, data = getattr(pl_module, "net", None), trainer.datamodule
        if stage in ("fit", "validate") and not (hasattr(net, "nll") and hasattr(data, "mask_id")):
            self.refuse(trainer, "masked language modelling on PretrainingData")

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sums.to(pl_module.device).reset()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], *_: Any
    ) -> None:
        if not (isinstance(outputs, Mapping) and "nll" in outputs):  # of a subclass
            what = f"trainer.callbacks holds CopySlices, but validation_step of {type(pl_module).__name__} returns no nll"
            raise UserError(what, "one that returns what that of MLM does")
        ids, positions, labels = (batch[name] for name in ("input_ids", "positions", "labels"))
        slices = copy_slices(ids, positions, labels, trainer.datamodule.mask_id, self.near, self.frequent)
        self.sums.update(outputs["nll"], slices)

    def after_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        nll, count = (part.tolist() for part in self.sums.compute())  # on every rank: sums over all of them
        fitting, total, step = trainer.state.fn == "fit", sum(count) or 1, self.measured_step(trainer)
        rows = []
        for name, summed, tokens in zip(SLICES, nll, count, strict=True):
            mean = summed / tokens if tokens else math.nan
            row = {"step": step, "tokens": tokens_seen(pl_module), "slice": name, "share": tokens / total}
            rows.append(row | {"nll": mean, "perplexity": math.exp(min(mean, 700.0))})
        self.rows = [*self.rows, *rows] if fitting else rows
        if (path := self.file(trainer, "copy_slices.csv")) is None:
            return
        write_csv(path, self.rows)
        means = {f"copy/nll_{row['slice']}": row["nll"] for row in rows if math.isfinite(row["nll"])}
        for logger in writers(trainer) if fitting else ():
            logger.points(means, trainer.global_step)


class SliceSums(Exact):
    """Σ nll and the number of tokens of each slice, over all ranks."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(len(SLICES), dtype=self.precise), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(SLICES), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, slices: Tensor) -> None:
        """Adds a batch: negative log-likelihoods (B, M), and indices into SLICES (B, M), IGNORED where there is no target."""
        asked = slices != IGNORED
        found = functional.one_hot(slices[asked], len(SLICES))
        self.nll += found.to(self.nll.dtype).T @ nll[asked].to(self.nll.dtype)
        self.count += found.sum(0)

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.nll, self.count


def copy_slices(ids: Tensor, positions: Tensor, labels: Tensor, mask_id: int, near: int, frequent: int) -> Tensor:
    """The slice of each masked token, an index into SLICES; IGNORED where there is no target.

    Args:
        ids: (B, N) int64, masked.
        positions: (B, M) int64, of the masked tokens.
        labels: (B, M) int64, the original tokens.
        mask_id: id of the mask token; a mask does not count as the same neighbour.
        near: number of tokens on each side that do not count as elsewhere.
        frequent: ids below this are frequent.

    Returns:
        (B, M) int64.
    """
    # Some masked tokens of each row at a time: a long row has many, and each is compared with all tokens.
    width = max(1, AT_A_TIME // ids.numel())
    parts = zip(positions.split(width, 1), labels.split(width, 1), strict=True)
    return torch.cat([_slices(ids, *part, mask_id, near, frequent) for part in parts], 1)


def _slices(ids: Tensor, positions: Tensor, labels: Tensor, mask_id: int, near: int, frequent: int) -> Tensor:
    place = torch.arange(ids.shape[1], device=ids.device)
    again = (ids[:, None] == labels[..., None]) & (place != positions[..., None])  # (B, M, N)
    elsewhere = again & ((place - positions[..., None]).abs() > near)
    beside = torch.zeros_like(elsewhere)
    for shift in (-1, 1):
        # Beyond the row's ends, and under a mask, no neighbour is known.
        neighbour = functional.pad(ids, (1, 1), value=mask_id)[:, 1 + shift : 1 + shift + ids.shape[1]]
        mine = neighbour.gather(1, positions)[..., None]
        beside |= (neighbour[:, None] == mine) & (mine != mask_id)
    kind = elsewhere.any(-1).long() + (elsewhere & beside).any(-1).long()
    found = 2 * kind + (labels >= frequent).long()
    left = (ids.gather(1, positions) == labels) | (again.any(-1) & ~elsewhere.any(-1))
    return torch.where(labels == IGNORED, IGNORED, torch.where(left, OTHER, found))
