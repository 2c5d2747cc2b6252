"""Weights averaged over the steps: validated, kept in checkpoints, and used for whatever comes after training."""

from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_linformer.callbacks.observing import Stepping
from lit_linformer.model.ranges import Range, check_ranges
from lit_linformer.runs.checkpoints import AVERAGE, TRAINING_WEIGHTS, take_training_weights
from lit_linformer.utils.errors import UserError


class Averaging(Stepping):
    """An exponential moving average of the weights (Polyak and Juditsky, 1992): a ← d a + (1 - d) w after each step.

    Validation and whatever reads a checkpoint see the average; training continues with its own weights, as without this
    callback, and a run resumes exactly. (Lightning's EMAWeightAveraging updates its average after our checkpoints are written:
    a run that was killed would lose an update.)

    Args:
        decay: d. After t steps it is at most (1 + t)/(10 + t), so that the initial weights are soon forgotten.

    The average of half-precision weights is kept in float32, since half precision cannot hold its small steps.
    """

    def __init__(self, decay: Annotated[float, Range(least=0, below=1)] = 0.999):
        check_ranges("Averaging.", Averaging.__init__, locals())
        self.decay = decay
        self._average: list[Tensor] = []
        self._training: list[Tensor] | None = None  # the training weights, while the module holds the average
        self._loaded: dict[str, Tensor] = {}
        self._updates = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.strategy, ModelParallelStrategy):
            divided = "trainer.callbacks has Averaging, but trainer.strategy divides the weights among the processes"
            raise UserError(divided, "ddp, or no Averaging")

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = state_dict["updates"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            take_training_weights(checkpoint)
            self._loaded = checkpoint.get(AVERAGE, {})  # empty if that run did not average

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._average, self._training = [], None
        self._updates = self._updates if trainer.ckpt_path else 0  # not those of an earlier fit in this process
        for name, weight in pl_module.named_parameters():
            exact = torch.promote_types(weight.dtype, torch.float32)
            self._average.append(self._loaded.get(name, weight).detach().to(weight.device, exact, copy=True))
        self._loaded = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self.stepped(trainer):
            return
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        weights = [weight.to(average.dtype) for average, weight in zip(self._average, pl_module.parameters(), strict=True)]
        get_ema_multi_avg_fn(decay)(self._average, weights, self._updates)
        self._updates += 1

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # after it, and after a checkpoint is loaded, the module holds what is to be validated
            self._enter(pl_module)

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training is not None and trainer.state.fn == "fit":
            for before, weight in zip(self._training, pl_module.parameters(), strict=True):
                weight.copy_(before)
            self._training = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter(pl_module)

    @torch.no_grad()
    def _enter(self, pl_module: LightningModule) -> None:
        """Puts the average into the module."""
        if self._training is not None:
            return
        self._training = [weight.clone() for weight in pl_module.parameters()]
        for average, weight in zip(self._average, pl_module.parameters(), strict=True):
            weight.copy_(average)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return  # nothing was trained: `trainer.save_checkpoint` after a validation alone
        places = {weight: place for place, weight in enumerate(pl_module.parameters())}
        # A weight shared by two modules has two names, and the one that is loaded last counts.
        own = checkpoint["state_dict"]  # a module may leave some out
        every = pl_module.named_parameters(remove_duplicate=False)
        names = {name: places[weight] for name, weight in every if name in own}
        training = {name: own[name] if self._training is None else self._training[at] for name, at in names.items()}
        checkpoint[TRAINING_WEIGHTS] = training
        own |= {name: self._average[at] for name, at in names.items()}
