"""What `fit` prints at its end: where things are, and commands that make sense for this model and these data."""

import shlex
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule

from lit_linformer.utils.environment import typed


def closing_lines(folder: Path, model: LightningModule, data: LightningDataModule, curves: list[str]) -> list[str]:
    """
    Args:
        folder: the run's.
        curves: the commands that show the loggers' curves.
    """
    predicts = type(model).predict_step is not LightningModule.predict_step
    predicts = predicts and type(data).predict_dataloader is not LightningDataModule.predict_dataloader
    config = f"--config {shlex.quote(f'{folder}/config.yaml')}"
    used = f"{typed()} predict {config}{_example(data)}" if predicts else f"{typed()} validate {config}"
    found = f"done: {folder}/ holds config.yaml, checkpoints/ and the curves; next:"
    return [found, *(f"  {line}" for line in (*curves, used))]


def _example(data: LightningDataModule) -> str:
    """The settings by which the data take a text; nothing for data that take none."""
    if (task := getattr(data, "text_task", None)) is not None:
        return ' --data.text "…"' + ' --data.text_pair "…"' * (len(task.columns) == 2)
    mask = getattr(getattr(data, "tokenizer", None), "mask_token", None)
    return f' --data.text "The {mask} of a function."' if mask is not None else ""
