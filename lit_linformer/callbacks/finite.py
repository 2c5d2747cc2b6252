"""Keeps loss, weights and metrics finite: the run ends within a step of the first loss that is NaN or infinite.

NaN spreads: from the loss to every gradient, with the next optimiser step to every weight, and from there into each
checkpoint. So no checkpoint is written whose weights, or whose optimiser's averages, are not finite.
"""

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_linformer.callbacks.checkpoint import LastCheckpoint
from lit_linformer.callbacks.observing import Stepping, callback_of, metrics, say
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.weights import all_finite


class NotFinite(UserError):
    """Says what is not finite, which checkpoint is good, and what may help. All processes raise it, the first one prints it."""

    of_all_processes = True


class LossWatch:
    """Checks whether losses are finite. It waits for a GPU's forward pass only, while the backward pass keeps the GPU busy."""

    KINDS = ("", "infinite", "nan")

    def __init__(self) -> None:
        self._sum: Tensor | None = None  # of the losses since the last `read`: several with manual optimisation
        self._value = torch.zeros(1)  # the sum in the CPU's memory
        self._copied: Any = None  # event: a GPU's sum has arrived in _value
        self._worst = 0  # of this optimiser step
        self._steps = 0  # bad steps in a row

    def note(self, loss: Tensor) -> None:
        """To be called before the backward pass of ``loss``, which may have several elements if their gradients are given."""
        loss = loss.detach().sum().float().reshape(1)
        self._sum = loss = loss if self._sum is None else loss + self._sum.to(loss.device)
        if loss.device.type != "cuda":
            self._value = loss
            return
        if self._copied is None:
            self._value = torch.empty(1, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._value.copy_(loss, non_blocking=True)
        self._copied.record()

    def read(self, stepped: bool, precision_plugin: Any) -> int:
        """The index in KINDS of the worst loss of this step so far; 0: none was bad.

        With a gradient scaler (16-mixed) a loss counts as bad only in the second bad step in a row: when the first overflows,
        so do its gradients, and the scaler skips the step, which does no harm.
        """
        if self._copied is not None:
            self._copied.synchronize()
        value = 0.0 if self._sum is None else float(self._value)
        self._sum = None
        kind = 2 if math.isnan(value) else 1 if math.isinf(value) else 0
        worst = max(self._worst, kind)
        self._worst = 0 if stepped else worst
        if stepped:
            self._steps = self._steps + 1 if worst else 0
        if getattr(precision_plugin, "scaler", None) is not None and self._steps < 2:
            return 0
        return worst


class Finite(Stepping):
    """Ends the run when a loss is not finite, refuses to save a model that is not, and warns if a metric is not.

    With several processes each watches its own loss, and callbacks/preemption.py ends all of them.
    """

    def __init__(self) -> None:
        self.bad: tuple[int, int] | None = None  # the first step with a bad loss in this process, and its KIND
        self._losses = LossWatch()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bad, self._losses = None, LossWatch()  # an earlier fit in this process may have ended with a bad loss

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.note(loss)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        kind = self._losses.read(self.stepped(trainer), trainer.precision_plugin)
        if kind and self.bad is None:
            self.bad = self._step_before_batch + 1, kind
        if self.bad and trainer.world_size == 1:
            self.refuse(trainer, *self.bad)

    def refuse(self, trainer: Trainer, step: int, kind: int) -> None:
        raise _not_finite(trainer, f"the loss is {LossWatch.KINDS[kind]} at step {step}", first=step == 1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._check(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in metrics(trainer, "val").items() if trainer.state.fn == "fit" else ():
            if not math.isfinite(value):
                say(trainer, f"warning: {name} is {value} at step {trainer.global_step}, although all weights are finite")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises NotFinite on all processes if weights or the optimiser's state are not finite on one of them."""
        tensors = list(pl_module.parameters())
        tensors += [value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()]
        step, kind = self.bad or (0, 0)
        found = torch.tensor([not all_finite(tensors), step, kind], dtype=torch.int64, device=trainer.strategy.root_device)
        broken, step, kind = trainer.strategy.reduce(found, reduce_op="max").tolist()
        if broken and step:
            self.refuse(trainer, step, kind)
        if broken:
            raise _not_finite(trainer, f"weights, or AdamW's averages, are not finite after step {trainer.global_step}")


def _not_finite(trainer: Trainer, what: str, first: bool = False) -> NotFinite:
    """The error. first: it happened in step 1, before the optimiser's first update."""
    last = callback_of(trainer, LastCheckpoint)
    path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    if last is None or not path.exists():
        return NotFinite(f"{what}; no checkpoint was written before it", _remedies(trainer, first))
    good = f"the last good checkpoint, {path}, is of step {last.saved_step}"
    return NotFinite(f"{what}; {good}", f"--ckpt_path last with {_remedies(trainer)}")


def _remedies(trainer: Trainer, first: bool = False) -> str:
    """Settings that make it less likely, with their present values; in step 1 without those that act only after the step."""
    lr, clip, precision = trainer.lightning_module.hparams.get("lr"), trainer.gradient_clip_val, str(trainer.precision)
    tries = []
    if not first:
        tries += [f"a lower model.lr (now {lr})"] if lr is not None else []
        tries.append(f"a lower trainer.gradient_clip_val (now {clip})" if clip else "trainer.gradient_clip_val 1.0 (now none)")
    if precision.startswith("16"):
        tries.append(f"trainer.precision bf16-mixed or 32-true (now {precision})")
    wrong = "what is wrong in the data of that step, or in a forward of your own"
    return f"{', '.join(tries)}, or without {wrong}" if tries else f"a run without {wrong}"
