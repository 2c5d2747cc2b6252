"""What every task's LightningModule stands on: AdamW by groups, a schedule by steps, and resuming bit for bit.

For a task of one's own: call `super().__init__()`, `save_hyperparameters` with (at least) the names in OPTIMIZER, set
`self.net`, count with `self.count(batch)` in training_step, and give `warmup(total_steps)`.
"""

import os
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lit_linformer.tasks.optim import SCHEDULES, lr_factor, parameter_groups

OPTIMIZER = (
    "lr weight_decay projection_lr_factor projection_weight_decay betas eps schedule power final_lr_factor"  # of AdamW
).split()
Batch = dict[str, Any]


class TrainingModule(LightningModule):
    """A LightningModule that resumes exactly: dropout by (seed, batch, rank), what it is given now wins over a checkpoint."""

    # What the progress lines and result.json tell: metric, words, format, and which of two values is better.
    headline = ("val/perplexity", "validation perplexity", ".2f", min)

    def __init__(self) -> None:
        super().__init__()
        self.batches_seen = 0
        self.tokens_seen = 0  # positions fed to the model, pads included, over all ranks

    def warmup(self, total_steps: int) -> int:
        """Optimiser steps over which the learning rate rises from 0."""
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        h = self.hparams
        return parameter_groups(self.net, h.lr, h.weight_decay, h.projection_lr_factor, h.projection_weight_decay)

    def count(self, batch: Batch) -> None:
        """To be called once a training batch."""
        self.batches_seen += 1
        self.tokens_seen += batch["input_ids"].numel() * self.trainer.world_size

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Dropout is a pure function of (seed, batches so far, rank), so that a resumed run repeats it bit for bit.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        state = np.random.SeedSequence((seed, self.batches_seen, self.global_rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            self.parameter_groups(), betas=tuple(self.hparams.betas), eps=self.hparams.eps, fused=True
        )
        # A fused step can undo the gradient scaler by itself; Lightning then refuses to clip, in bf16-mixed too, which
        # scales nothing. Told that it can't, it is given unscaled, clipped gradients in every precision.
        optimizer._step_supports_amp_scaling = False
        total_steps = self._total_steps()
        factor = partial(
            lr_factor,
            schedule=self.hparams.schedule,
            warmup_steps=self.warmup(total_steps),
            total_steps=total_steps,
            final=self.hparams.final_lr_factor,
            power=self.hparams.power,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

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
        # A restored optimiser brings the old run's settings along; what this run was given wins (Lightning does not do this).
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        for index, group in enumerate(self.parameter_groups()):
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
        check_fit(self.state_dict(), checkpoint["state_dict"])


def check_fit(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """ValueError, in one line, where a checkpoint's weights are not those of a model by name and shape."""
    for name, tensor in theirs.items():
        if name not in mine or mine[name].shape != tensor.shape:
            here = f"has {list(mine[name].shape)}" if name in mine else "has none"
            raise ValueError(
                f"the checkpoint does not fit this model: {name} is {list(tensor.shape)} there, the model {here}; "
                "allowed: a checkpoint made with the same model.encoder and vocabulary"
            )
    if missing := [name for name in mine if name not in theirs]:
        raise ValueError(f"the checkpoint does not fit this model: it lacks {missing[0]} ({len(missing)} missing in all)")


def check_optimizer(lr: float, eps: float, schedule: str) -> None:
    """ValueError for what AdamW or the schedule cannot do."""
    if schedule not in SCHEDULES:
        raise ValueError(f"model.schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    for name, value in (("lr", lr), ("eps", eps)):
        if value <= 0:
            raise ValueError(f"model.{name} is {value}; allowed: more than 0")
