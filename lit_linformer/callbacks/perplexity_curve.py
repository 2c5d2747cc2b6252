"""Records the validation perplexity: a CSV that a script reads, curves against steps and tokens, the best value."""

import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.loggers import writers
from lit_linformer.callbacks.observing import axis, owes_validation, write_csv

COLUMNS = ("step", "tokens", "seconds", "perplexity", "best")


class PerplexityCurve(Callback):
    """Writes perplexity.csv into the run directory, one row a validation, and the curve against tokens into the loggers.

    With trainer.num_sanity_val_steps=-1 the first row is the untrained model's. Training is not affected.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._seconds_before = 0.0
        self._started = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds(), "rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_before = state_dict["seconds"]
        self.rows = [dict(row) for row in state_dict["rows"]]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        again = pl_module.tokens_seen + (not owes_validation(trainer)) if trainer.global_step else 0
        for logger in writers(trainer):
            logger.begin_against_tokens(again)
            if trainer.global_step == 0 and self.rows:  # against steps it would take the first step's place
                first = self.rows[0]
                logger.against_tokens("val/perplexity_by_tokens", first["perplexity"], first["tokens"], axis(trainer))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")
        if trainer.state.fn != "fit" or not whole:
            return
        perplexity = pl_module.val_perplexity.compute().item()  # on every rank: it is a sum over all of them
        known = [value for value in (perplexity, *(row["perplexity"] for row in self.rows)) if math.isfinite(value)]
        best = min(known, default=perplexity)
        values = (trainer.global_step, pl_module.tokens_seen, round(self._seconds(), 1), perplexity, best)
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        if trainer.is_global_zero:
            if not trainer.fast_dev_run:
                write_csv(Path(trainer.default_root_dir) / "perplexity.csv", COLUMNS, self.rows)
            for logger in writers(trainer) if not trainer.sanity_checking else ():  # those points wait for training
                logger.points({"val/perplexity_best": best}, axis(trainer))
                logger.against_tokens("val/perplexity_by_tokens", perplexity, pl_module.tokens_seen, axis(trainer))

    def _seconds(self) -> float:
        """Since the run began, resumed ones added up."""
        return self._seconds_before + time.monotonic() - self._started
