"""The outcome of a run, for scripts: result.json after fit, validate.json and test.json after validate and test."""

import math
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.checkpoint import BestCheckpoint
from lit_linformer.callbacks.observing import Clock, callback_of, metrics, parameters_of, tokens_seen
from lit_linformer.callbacks.throughput import Throughput
from lit_linformer.runs.folder import PRUNED, RESULT, TEST, VALIDATE
from lit_linformer.utils.environment import environment
from lit_linformer.utils.files import write_json


class RunResult(Callback):
    """Writes the final metrics, those of the best validation, and the hardware and versions, into the run folder.

    Args:
        monitor: the metric that decides which validation was best.
        mode: min, or max if higher is better.
        command: the command line; for a resumed run the last one, as for hardware and versions.
    """

    def __init__(self, monitor: str = "val/perplexity", mode: str = "min", command: str | None = None) -> None:
        self.monitor, self.mode, self.command = monitor, mode, command
        self.environment: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self._keeps_best = True
        self._metrics_before: dict[str, float] = {}
        self._clock = Clock()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "by": [self.monitor, self.mode], "seconds": self._clock.seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clock.before = state_dict["seconds"]
        if state_dict.get("by", [self.monitor, self.mode]) == [self.monitor, self.mode]:  # as for the best checkpoints
            self.best = state_dict["best"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["metrics"] = self._metrics_before | metrics(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A run resumed near its end may have no validation left, or no step.
        self._metrics_before = checkpoint.get("metrics", {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start()
        _remove(trainer, RESULT, PRUNED)  # a resumed run is not finished
        kept = callback_of(trainer, BestCheckpoint)
        self._keeps_best = kept is not None and kept.save_top_k != 0
        if self._keeps_best and not kept.best_model_path:
            self.best = {}  # the best checkpoint so far is not here: the best from now on is kept
        if trainer.is_global_zero and not trainer.fast_dev_run:
            # At the start: later the checkout may be at another commit than the running code.
            self.environment = environment(str(trainer.strategy.root_device)) | {"processes": trainer.world_size}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every = metrics(trainer)
        if trainer.state.fn == "validate":
            _write(trainer, VALIDATE, {"metrics": every, "command": self.command})
        elif not trainer.sanity_checking and self.monitor in every:
            found = metrics(trainer, "val") | {self.monitor: every[self.monitor]}
            new, old = found[self.monitor], self.best.get("metrics", {}).get(self.monitor)
            if math.isfinite(new) and (old is None or (new > old if self.mode == "max" else new < old)):
                self.best = {"step": trainer.global_step, "metrics": found}
                _remove(trainer, VALIDATE, TEST)  # they are about the model that was the best before
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self._keeps_best:
            _remove(trainer, VALIDATE, TEST)  # they are about an earlier last model

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _write(trainer, TEST, {"metrics": metrics(trainer), "command": self.command})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        result: dict[str, Any] = {"step": trainer.global_step, "tokens": tokens_seen(pl_module)}
        result |= {"seconds": self._clock.seconds(), "metrics": self._metrics_before | metrics(trainer)}
        result |= {f"best_{key}": value for key, value in self.best.items()}
        if (throughput := callback_of(trainer, Throughput)) is not None:
            result["throughput"] = throughput.summary()
        result["parameters"], _ = parameters_of(pl_module)
        if hasattr(trainer.datamodule, "summary") and (data := trainer.datamodule.summary()):
            result["data"] = data
        _write(trainer, RESULT, result | {"command": self.command, "environment": self.environment})


def _remove(trainer: Trainer, *names: str) -> None:
    if trainer.is_global_zero and not trainer.fast_dev_run:
        for name in names:
            (Path(trainer.default_root_dir) / name).unlink(missing_ok=True)


def _write(trainer: Trainer, name: str, content: dict[str, Any]) -> None:
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    write_json(Path(trainer.default_root_dir) / name, content, indent=2)
