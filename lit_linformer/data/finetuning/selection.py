"""Selection: which rows of the training split train, and which are held out for validation.

Nothing here depends on a seed: runs with different seeds are compared on the same rows.
"""

from dataclasses import dataclass

import numpy as np

from lit_linformer.utils.errors import SettingError, UserError

SELECTION_KEY = [20200608, 1]  # of Philox: no run's seed


@dataclass(frozen=True)
class Selection:
    """Rows of the training split, by their numbers.

    Args:
        train: To train with, in a fixed pseudo-random order: the first ones are of all classes, however the file is sorted.
        held_out: For validation.
        leaked: How many were dropped because their texts also are in validation or test.
    """

    train: np.ndarray
    held_out: np.ndarray
    leaked: int


def select_rows(
    hashes: np.ndarray, fraction: float = 0.0, other_hashes: np.ndarray | None = None, limit: int | None = None
) -> Selection:
    """Divides the rows of a training split.

    Args:
        hashes: (rows,) of their texts.
        fraction: Share to hold out for validation.
        other_hashes: Of validation and test; rows with the same texts, or with those of a held-out row, are dropped.
            None: none is.
        limit: Take only so many of what is left; None: all.
    """
    order = np.random.Generator(np.random.Philox(key=SELECTION_KEY)).permutation(len(hashes))
    count = round(fraction * len(hashes))
    if fraction > 0 and count in (0, len(hashes)):
        what = "none" if count == 0 else "all"
        raise SettingError(
            "data.validation_fraction", fraction, "some for each part", more=f", which is {what} of {len(hashes)} rows"
        )
    held_out, train = order[:count], order[count:]
    before = len(train)
    if other_hashes is not None:
        train = train[~np.isin(hashes[train], np.concatenate([other_hashes, hashes[held_out]]))]
    leaked = before - len(train)
    if limit is not None and limit > len(train):
        raise SettingError("data.limit_train", limit, f"up to {len(train)}, the training rows there are")
    if len(train) == 0:
        raise UserError("data.drop_leaked=True leaves no training row: all are in validation or test too")
    return Selection(train[:limit], np.sort(held_out), leaked)
