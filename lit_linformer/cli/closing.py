"""What `fit` prints at its end: where things are, and commands that make sense for this model and these data."""

import shlex
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule

from lit_linformer.callbacks.header import INDENT, WIDTH
from lit_linformer.utils.environment import typed


def closing_lines(folder: Path, model: LightningModule, data: LightningDataModule, curves: list[str]) -> list[str]:
    """Of a run's folder and the commands that show its loggers' curves."""
    predicts = type(model).predict_step is not LightningModule.predict_step
    predicts = predicts and type(data).predict_dataloader is not LightningDataModule.predict_dataloader
    config = ["--config", shlex.quote(f"{folder}/config.yaml")]
    used = ["predict", *config, *_example(data)] if predicts else ["validate", *config]
    done = f"{'done':<{INDENT}}{folder}/ holds config.yaml, checkpoints/ and the curves"
    commands = [*curves, *_broken([typed(), *used])]
    return [done, *(f"{'' if place else 'next':<{INDENT}}{line}" for place, line in enumerate(commands))]


def _example(data: LightningDataModule) -> list[str]:
    """The settings by which the data take a text; nothing for data that take none."""
    if (task := getattr(data, "text_task", None)) is not None:
        return ["--data.text", '"…"', *["--data.text_pair", '"…"'] * (len(task.columns) == 2)]
    mask = getattr(getattr(data, "tokenizer", None), "mask_token", None)
    return ["--data.text", f'"The {mask} of a function."'] if mask is not None else []


def _broken(words: list[str]) -> list[str]:
    """A command on as many lines as it needs, as a shell takes them; a setting stays with its value."""
    lines = [words[0]]
    for place, word in enumerate(words[1:], 1):
        together = len(word) + 1 + (len(words[place + 1]) if word.startswith("--") else 0)
        if INDENT + len(lines[-1]) + together > WIDTH - 3 and not words[place - 1].startswith("--"):
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines
