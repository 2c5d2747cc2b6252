"""What `fit` prints at its end: where things are, and commands that make sense for this model and these data."""

import shlex
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule

from lit_linformer.callbacks.header import INDENT, WIDTH
from lit_linformer.data import PretrainingData
from lit_linformer.tasks import MLM
from lit_linformer.utils.environment import typed


def closing_lines(
    folder: Path, model: LightningModule, data: LightningDataModule, curves: list[str], validates: bool = True
) -> list[str]:
    """The lines for a run's folder. curves: commands that show its loggers' curves; validates: whether its config does."""
    config = ["--config", shlex.quote(f"{folder}/config.yaml")]
    fills_masks = type(model).predict_step is MLM.predict_step and not isinstance(data, PretrainingData)
    if _has(model, data, "predict_step", "predict_dataloader") and not fills_masks:
        words = [typed(), "predict", *config, *_example(data)]
    elif validates and _has(model, data, "validation_step", "val_dataloader"):
        words = [typed(), "validate", *config]
    else:
        words = []
    done = f"{'done':<{INDENT}}{folder}/ holds config.yaml, checkpoints/ and the curves"
    commands = [*curves, *_broken(words)]
    return [done, *(f"{'' if place else 'next':<{INDENT}}{line}" for place, line in enumerate(commands))]


def _has(model: LightningModule, data: LightningDataModule, step: str, loader: str) -> bool:
    """Whether both methods are defined; Lightning's own, which do nothing, don't count."""
    pairs = ((model, step, LightningModule), (data, loader, LightningDataModule))
    return all(getattr(type(one), name) is not getattr(base, name) for one, name, base in pairs)


def _example(data: LightningDataModule) -> list[str]:
    """The settings that give the data a text; empty for data that take none."""
    if not hasattr(data, "text"):
        return []  # a user's own data
    if (task := getattr(data, "text_task", None)) is not None:
        return ["--data.text", '"…"', *["--data.text_pair", '"…"'] * (len(task.columns) == 2)]
    mask = getattr(getattr(data, "tokenizer", None), "mask_token", None)
    return ["--data.text", f'"The {mask} of a function."'] if mask is not None else []


def _broken(words: list[str]) -> list[str]:
    """A command on as many lines as it needs, continued as in a shell; a setting stays with its value."""
    lines = words[:1]
    for place, word in enumerate(words[1:], 1):
        together = len(word) + 1 + (len(words[place + 1]) if word.startswith("--") else 0)
        if INDENT + len(lines[-1]) + together > WIDTH - 3 and not words[place - 1].startswith("--"):
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines
