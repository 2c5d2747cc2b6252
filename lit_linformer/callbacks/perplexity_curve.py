"""Records the validation perplexity, or another task's headline metric: a CSV for scripts, curves, the best value."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.callbacks.loggers import writers
from lit_linformer.callbacks.observing import Clock, callback_of, headline, is_whole, owes_validation, tokens_seen, write_csv
from lit_linformer.callbacks.throughput import Throughput
from lit_linformer.runs.folder import CURVE, PERPLEXITY
from lit_linformer.tasks.perplexity import Perplexity

FILES = {"val/perplexity": ("perplexity", PERPLEXITY)}  # column and file; for another metric: its name, and curve.csv


class PerplexityCurve(Callback):
    """Writes perplexity.csv into the run folder, one row for each validation, and the curve against tokens into the loggers.

    For a module whose validation does not fill a Perplexity, val_perplexity, the file is curve.csv, with the module's headline
    metric, or the one that best.monitor names. A headline metric besides the perplexity, such as recall's val/accuracy, has its
    own column.

    With trainer.num_sanity_val_steps=-1 the first row is the untrained model's. Training is not affected. ``seconds`` is the
    run's wall-clock time; with the callback Throughput, training_seconds leaves out validation and checkpoints, and cpu_seconds
    is the first process's CPU time within training_seconds: with one thread it compares models even on a busy machine.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._clock = Clock()
        self._trained_before = {"training_seconds": 0.0, "cpu_seconds": 0.0}
        self._throughput: Throughput | None = None
        self._name = self._column = ""  # of the recorded metric
        self._recorded = False  # this validation's perplexity

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._clock.seconds(), "trained": self._trained(), "rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clock.before = state_dict["seconds"]
        self._trained_before = state_dict.get("trained") or dict.fromkeys(self._trained_before, math.nan)  # not known
        self.rows = [dict(row) for row in state_dict["rows"]]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start()
        self._throughput = callback_of(trainer, Throughput)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (tokens := tokens_seen(pl_module)) is None:
            return
        again = tokens + (not owes_validation(trainer)) if trainer.global_step else 0
        for logger in writers(trainer):
            logger.begin_against_tokens(again)
            if trainer.global_step == 0 and self.rows:  # the untrained model's
                first = self.rows[0]
                logger.points({f"{self._name}_best": first["best"]}, 0)
                logger.against_tokens(f"{self._name}_by_tokens", first[self._column], first["tokens"], 0)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A user's own class may use the name otherwise, or derive from MLM and validate in another way.
        metric = getattr(pl_module, "val_perplexity", None)
        self._recorded = isinstance(metric, Perplexity) and metric.update_called
        if self._recorded:  # in full precision; the logged value is a float32
            value = metric.compute().item()  # on every rank: a sum over all of them
            self._record(trainer, pl_module, "val/perplexity", value, min)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, _, _, better = headline(trainer, pl_module)
        if not self._recorded and name in trainer.callback_metrics:
            self._record(trainer, pl_module, name, trainer.callback_metrics[name].item(), better)

    def _record(
        self, trainer: Trainer, pl_module: LightningModule, name: str, value: float, better: Callable[..., float]
    ) -> None:
        if trainer.state.fn != "fit" or not is_whole(trainer):
            return
        tokens = tokens_seen(pl_module)
        self._name, self._column, file = name, *FILES.get(name, (name, CURVE))
        known = [one for one in (value, *(row.get(self._column, math.nan) for row in self.rows)) if math.isfinite(one)]
        best = better(known, default=value)
        row = {"step": trainer.global_step} | ({"tokens": tokens} if tokens is not None else {})
        spent = {name: round(value, 2) for name, value in self._trained().items()}
        headlined, *_ = headline(trainer, pl_module)
        logged = trainer.callback_metrics  # on every rank, too
        beside = {headlined: logged[headlined].item()} if headlined != name and headlined in logged else {}
        self.rows.append({**row, "seconds": self._clock.seconds(), self._column: value, "best": best, **beside, **spent})
        if trainer.is_global_zero:
            if not trainer.fast_dev_run:
                write_csv(Path(trainer.default_root_dir) / file, self.rows)
            for logger in writers(trainer) if not trainer.sanity_checking else ():  # written when training begins
                logger.points({f"{name}_best": best}, trainer.global_step)
                if tokens is not None:
                    logger.against_tokens(f"{name}_by_tokens", value, tokens, trainer.global_step)

    def _trained(self) -> dict[str, float]:
        """Seconds of training alone, earlier starts included; empty without Throughput."""
        if self._throughput is None:
            return {}
        spent = self._throughput.totals()
        now = {"training_seconds": spent.seconds, "cpu_seconds": spent.cpu_seconds}
        return {name: before + now[name] for name, before in self._trained_before.items()}
