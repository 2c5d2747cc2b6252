"""What callbacks share that run the model on their own: training must not notice."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger


@contextmanager
def unnoticed(pl_module: LightningModule) -> Iterator[None]:
    """Eval mode and no gradients within; after it every module's mode and all random states are what they were."""
    device = pl_module.device
    modes = [(module, module.training) for module in pl_module.modules()]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    # Of this process's GPU only: the state of all of them would start a CUDA context on each.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        pl_module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def tensorboard(trainer: Trainer) -> tuple[TensorBoardLogger, int] | None:
    """The TensorBoard logger and where on its axis the present step stands; None on other ranks and without one."""
    if not trainer.is_global_zero or not isinstance(trainer.logger, TensorBoardLogger):
        return None
    # Lightning counts the steps on its axis from 0: what was measured after step s stands at s - 1.
    return trainer.logger, max(0, trainer.global_step - 1)


def say(trainer: Trainer, line: str) -> None:
    """A line on the terminal of the first rank, above a live bar if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.print(line)
    elif trainer.is_global_zero:
        print(line, flush=True)
