"""Which splits a fine-tuning run needs, which of their rows it trains with, and which are held out for validation.

None of this depends on a seed: runs with different seeds are compared on the same rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lit_linformer.data.finetuning.encoded_texts import text_hash
from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.utils.errors import SettingError, UserError

SELECTION_KEY = [20200608, 1]  # key of Philox, not a run's seed


@dataclass(frozen=True)
class Selection:
    """Rows of the training split, by their numbers.

    Args:
        train: To train with, in a fixed pseudo-random order, so that the first ones have all classes even in a sorted file.
        held_out: For validation.
        leaked: How many were dropped because their texts are also in validation or test.
    """

    train: np.ndarray
    held_out: np.ndarray
    leaked: int


def select_rows(
    hashes: np.ndarray, fraction: float = 0.0, other_hashes: np.ndarray | None = None, limit: int | None = None
) -> Selection:
    """Divides the rows of a training split.

    Args:
        hashes: (rows,) hashes of their texts.
        fraction: Share to hold out for validation.
        other_hashes: Hashes of validation and test; rows with the texts of these, or of a held-out row, are dropped. None: no
            row is dropped.
        limit: Take only this many of the rows that are left; None: all.
    """
    order = np.random.Generator(np.random.Philox(key=SELECTION_KEY)).permutation(len(hashes))
    count = round(fraction * len(hashes))
    if fraction > 0 and count in (0, len(hashes)):
        what = "none" if count == 0 else "all"
        least = math.ceil(100 / len(hashes)) / 100
        allowed = f"{least:g} to {1 - least:g}" if 2 * least <= 1 else "more rows"
        raise SettingError("data.validation_fraction", fraction, allowed, more=f", which is {what} of {len(hashes)} rows")
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


class Splits:
    """Splits of a source, according to a run's settings (`FineTuningData`)."""

    def __init__(self, source: LabelledSource, validation_fraction: float | None, drop_leaked: bool, limit_train: int | None):
        self.source, self.task = source, source.task
        self.validation_fraction, self.drop_leaked, self.limit_train = validation_fraction, drop_leaked, limit_train

    def validation(self) -> tuple[list[str], float]:
        """The validation splits, and the share of the training rows to hold out if there are none."""
        wanted, there = self.task.splits("validation"), self.source.splits()
        found = [split for split in wanted if split in there]
        asked = self.validation_fraction
        if found == wanted:
            if asked is not None:
                rank_zero_warn(f"data.validation_fraction={asked} is ignored: {self.source.source} has a validation split")
            return found, 0.0
        fraction = self.task.validation_fraction if asked is None else asked
        if found or len(wanted) > 1 or fraction is None:
            instead = ", or data.validation_fraction a share of the training rows" if len(wanted) == 1 else ""
            raise self.source.missing(next(split for split in wanted if split not in found), instead)
        return [], fraction

    def needed(self, stage: str) -> list[str]:
        """Splits to read for "fit", "validate" or "test"."""
        if stage == "test":
            return self.task.splits("test")
        validation, _ = self.validation()
        if stage == "validate":
            return validation or ["train"]
        return ["train", *dict.fromkeys([*validation, *self._others()])]

    def _others(self) -> list[str]:
        """Splits whose texts must not be in training."""
        if not self.drop_leaked:
            return []
        validation, _ = self.validation()
        return [*validation, *(split for split in self.task.splits("test") if split in self.source.splits())]

    def select(self, hashes_of: Callable[[str], np.ndarray]) -> Selection:
        """Which rows to train with, and which are held out; hashes_of: a function that gives the hashes of a split's texts."""
        _, fraction = self.validation()
        others = np.concatenate([np.zeros(0, np.uint64), *map(hashes_of, self._others())]) if self.drop_leaked else None
        return select_rows(hashes_of("train"), fraction, others, self.limit_train)

    # What a tokenizer learns from: only the training rows

    def stamp(self) -> dict:
        """JSON-able description of all that shapes `training_texts`."""
        _, fraction = self.validation()
        return {
            "source": [self.source.stamp(split) for split in ["train", *self._others()]],
            "columns": self.task.columns,
            "selection": [fraction, self.drop_leaked, self.limit_train, self.source.keep_empty],
        }

    def training_texts(self) -> Iterator[tuple[str, float]]:
        """(text, share of the training split read so far)."""
        source, splits = self.source, ["train", *self._others()]
        hashes = {split: np.array([text_hash(texts) for _, texts, _ in source.texts(split)], np.uint64) for split in splits}
        if not len(hashes["train"]):
            raise source.empty("train")
        chosen = np.zeros(len(hashes["train"]), dtype=bool)
        chosen[self.select(hashes.__getitem__).train] = True
        for i, (_, texts, _) in enumerate(source.texts("train")):
            if chosen[i]:
                yield from ((text.strip(), i / len(chosen)) for text in texts)
