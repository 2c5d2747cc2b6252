"""Checks that the data fit the model: length of rows, images, numbers in a token, ids, classes. They raise UserError."""

from typing import Any

import torch

from lit_linformer.utils.errors import SettingError, UserError


def check_row_length(rows: int, longest: int, of: str = "model.encoder.max_length", windows: bool = False) -> None:
    """Refuses rows (data.max_length) of more tokens than the ``longest`` that the model reads.

    of: the setting that limits the model's length; windows: whether the data can read a longer text in windows.
    """
    if rows > longest:
        instead = ", or data.max_windows more than 1, which reads a longer text in windows" if windows else ""
        raise SettingError("data.max_length", rows, f"up to {of} = {longest}{instead}")


def check_image(tokens: int, longest: int) -> None:
    """Refuses rows that are not images of n tokens, for a model whose positions or slots are those of an image's pixels.

    tokens: those of an image in the data, 0 if rows are not images; longest: n.
    """
    if not tokens:
        what = "model.encoder reads images (position image, or projection_init squares), but the rows of data are none"
        raise UserError(what, "data.task image or pathfinder, or another position and projection_init")
    if tokens != longest:
        raise SettingError("model.encoder.max_length", longest, f"{tokens}, the data's image", when="where tokens are pixels")


def check_input_size(mine: int, of_data: int | None) -> None:
    """Refuses data whose tokens are not of the model's input_size (0: ids); None: the data do not say."""
    if of_data is not None and mine != of_data:
        what = "the numbers in a token of the data" if of_data else "since the data's tokens are ids"
        raise SettingError("model.encoder.input_size", mine, f"{of_data}, {what}")


def check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Raises UserError for token ids without an embedding, instead of torch's traceback."""
    if wrong := [int(end) for end in ids.aminmax() if not 0 <= end < vocab_size]:
        allowed = f"0 to {vocab_size - 1}; the data's num_tokens, or else model.encoder.vocab_size, says how many there are"
        raise UserError(f"input_ids of a batch hold {wrong[0]}", allowed)


def check_classes(data: Any, num_labels: int) -> None:
    """Raises UserError for data that do not say how to score a classifier, or that have another number of classes."""
    if missing := [name for name in ("metrics", "evaluation_names") if not hasattr(data, name)]:
        what = "the trainer has no data module" if data is None else f"{type(data).__name__} has no {missing[0]}"
        raise UserError(what, "one with metrics and evaluation_names, as FineTuningData, or as in docs/extending.md")
    if (classes := getattr(data, "num_labels", num_labels)) != num_labels:
        raise SettingError("model.num_labels", num_labels, f"{classes}, as the data have")
