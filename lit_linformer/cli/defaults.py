"""The defaults of a command, if neither a file nor the command line sets something else. Imports nothing heavy."""

from typing import Any

ENCODER = "lit_linformer.model.EncoderConfig"
# The classes if no other is named.
DEFAULT_CLASSES = {"model": "lit_linformer.tasks.MLM", "data": "lit_linformer.data.PretrainingData"}
# What app.py passes to Lightning instead of its own defaults.
TRAINER_DEFAULTS: dict[str, Any] = {
    "enable_model_summary": False,
    "num_sanity_val_steps": -1,  # validate the untrained model, at which the curve starts
    "max_epochs": -1,
}
# {setting: (default, words)}
RUN: dict[str, tuple[Any, str]] = {
    "name": ("run", "Name of the run, whose folder is runs/NAME."),
    "overwrite": (False, "Let fit delete an existing run of this name when it begins to train."),
    "ckpt_path": (None, "Checkpoint: a file, the folder of a run, last, best, or, for fit, auto (last if there is one)."),
    "seed_everything": (0, "Seed of weights, order, masks and dropout."),
}
# The callbacks that every command has, each after those whose state it keeps or shows.
ALWAYS_THERE = {
    "best": "lit_linformer.callbacks.best_checkpoint",
    "last": "lit_linformer.callbacks.LastCheckpoint",
    "throughput": "lit_linformer.callbacks.Throughput",
    "progress": "lit_linformer.callbacks.Progress",
}
