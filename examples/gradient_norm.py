"""A measurement of your own: the norm of the gradients, for the loggers, and the largest one so far.

python run.py fit --config conf/quickstart.yaml --name watched --trainer.callbacks+ examples.gradient_norm.GradientNorm
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class GradientNorm(Callback):
    """Logs train/gradient_norm, before clipping, and prints at the end how large it became, and at which step.

    Args:
        power: 2 for the Euclidean norm, 1 for the sum of absolute values.
    """

    def __init__(self, power: float = 2.0):
        self.power = power
        self.largest, self.at_step = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    # Saved in each checkpoint, so that a resumed run still knows them.

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest.item(), "at_step": self.at_step.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.largest, self.at_step = torch.tensor(state["largest"]), torch.tensor(state["at_step"])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, self.power)
        if isinstance(norm, DTensor):  # with conf/trainer/fsdp.yaml each process has a part of the gradients
            norm = norm.full_tensor()
        pl_module.log("train/gradient_norm", norm)
        # torch.where instead of `if`, which would wait for the GPU in every step.
        largest, at_step = self.largest.to(norm), self.at_step.to(norm.device)
        self.at_step = torch.where(norm > largest, trainer.global_step + 1, at_step)
        self.largest = torch.maximum(norm, largest)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"largest gradient norm: {self.largest:.3f} at step {self.at_step}")
