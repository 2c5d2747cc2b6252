"""The recall task: rows of keys with values, then the same keys, whose values are to be predicted. Generated, not from text.

    data = RecallData(max_length=512, pairs=32)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

Batches as PretrainingData's: input_ids (B, N), positions (B, M), labels (B, M), all int64, M = pairs.
"""

from typing import Annotated

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_linformer.data.datamodule import BatchSize, ResumableDataModule, RowLength, VocabularySize, Workers
from lit_linformer.data.loader import EvaluationLoader, ResumableLoader
from lit_linformer.model.heads import IGNORED
from lit_linformer.model.ranges import Count, Natural, Range, Seed, check_ranges
from lit_linformer.utils.errors import SettingError, UserError

PAD, BOS, MASK = 0, 1, 2
SPECIAL = 3
STREAMS = {"train": 3, "validation": 4, "test": 5}  # second words of Philox's key; masks and the loader's order use others


class RecallData(ResumableDataModule):
    """Multi-query associative recall (Arora et al., 2023, "Zoology"), for masked language modelling.

    After bos come two stretches of equal length. The first holds ``pairs`` keys, each followed by a value, at random
    positions; the second the same keys in another order, each with a mask in place of its value; the rest is noise. Keys,
    values and noise are tokens of three kinds, a third of the vocabulary each, drawn anew for each row, so that only the row
    itself shows which value belongs to a key. A row is a function of its number and the seed.

    Args:
        max_length: n, tokens in a row.
        pairs: number of keys in a row, and of masks.
        distance: noise tokens between the two stretches, and so the least between a pair and its query.
        gap: noise tokens between a key and its value. With 0 they are adjacent.
        vocab_size: size of the vocabulary, three special tokens included.
        rows: rows in a pass over the training data.
        validation_rows: rows for validation, and as many for the test; none of them is trained on.
        batch_size: rows on each device in each micro-batch.
        global_batch_size: rows of an optimiser step over all devices, which accumulate micro-batches as needed. None:
            batch_size × devices × trainer.accumulate_grad_batches.
        num_workers: processes that make batches; 0: the training process does.
        seed: seed of the order of rows, and of the training rows themselves. Held-out rows do not depend on it.
    """

    tokenizer = None  # the data are ids, not text
    equal_rows = True
    mask_id, pad_id = MASK, PAD

    def __init__(
        self,
        max_length: RowLength = 512,
        pairs: Count = 32,
        distance: Natural = 0,
        gap: Natural = 0,
        vocab_size: VocabularySize = 8192,
        rows: Count = 100_000,
        validation_rows: Annotated[int, Range(least=1, most=10**6)] = 500,
        batch_size: BatchSize = 32,
        global_batch_size: Count | None = None,
        num_workers: Workers = 0,
        seed: Seed = 0,
    ):
        check_ranges("data.", RecallData.__init__, locals())
        super().__init__()
        self.max_length, self.pairs, self.distance, self.gap = max_length, pairs, distance, gap
        self.vocab_size, self.num_rows, self.validation_rows = vocab_size, rows, validation_rows
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self.num_workers, self.seed = num_workers, seed
        self.data_name = f"recall-{max_length}-{pairs}-{distance}-{gap}-{vocab_size}-{rows}-{seed}"
        self.datasets: dict[str, RecallRows] = {}
        most = max(0, (max_length - 1 - distance) // 2 // (2 + gap))
        if pairs > most:
            more = "".join(f", data.{name} = {value}" for name, value in (("distance", distance), ("gap", gap)) if value)
            allowed = f"up to {most} with data.max_length = {max_length}{more}" if most else "a longer data.max_length"
            raise SettingError("data.pairs", pairs, allowed)
        if pairs > (vocab_size - SPECIAL) // 3:
            raise SettingError(
                "data.vocab_size", vocab_size, f"{3 * pairs + SPECIAL} or more", when=f"with data.pairs = {pairs}"
            )

    @property
    def num_tokens(self) -> int:
        return self.vocab_size

    def setup(self, stage: str | None = None) -> None:
        if stage == "predict":
            raise UserError("data is RecallData", "PretrainingData or FineTuningData", when="with predict")
        if stage in ("fit", None):
            self._start_anew()
        for split, rows in (("train", self.num_rows), ("validation", self.validation_rows), ("test", self.validation_rows)):
            key = [self.seed if split == "train" else 0, STREAMS[split]]
            shape = (self.max_length, self.pairs, self.distance, self.gap, self.vocab_size)
            self.datasets[split] = RecallRows(rows, key, *shape)

    def train_dataloader(self) -> ResumableLoader:
        return self._training_loader(self._opened(self.datasets, "train"))

    def _evaluation(self, kind: str) -> EvaluationLoader:
        return EvaluationLoader(self._opened(self.datasets, kind), self.batch_size, **self._parallel())


class RecallRows(Dataset):
    """Items are whole batches, keyed by the (epoch, index) of every row; an index below 0 is a filler row without labels."""

    def __init__(self, rows: int, key: list[int], max_length: int, pairs: int, distance: int, gap: int, vocab_size: int):
        self.rows, self.key = rows, key
        self.max_length, self.pairs, self.distance, self.gap, self.vocab_size = max_length, pairs, distance, gap, vocab_size

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        made = [self.row(max(int(index), 0)) for _, index in keys]
        ids, positions, labels = (np.stack(part) for part in zip(*made, strict=True))
        labels[[number for number, (_, index) in enumerate(keys) if index < 0]] = IGNORED
        batch = {"input_ids": ids, "positions": positions, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids (N,), positions of the masks (M,) in ascending order, labels (M,)."""
        draw = np.random.Generator(np.random.Philox(key=self.key, counter=[0, 0, 0, index]))
        kind = (self.vocab_size - SPECIAL) // 3  # tokens of each kind
        ids = draw.integers(SPECIAL + 2 * kind, self.vocab_size, self.max_length)
        ids[0] = BOS
        keys = SPECIAL + draw.choice(kind, self.pairs, replace=False)
        values = SPECIAL + kind + draw.integers(0, kind, self.pairs)
        stretch, width = (self.max_length - 1 - self.distance) // 2, 2 + self.gap
        told, asked = (np.sort(draw.choice(stretch // width, self.pairs, replace=False)) * width for _ in range(2))
        told, asked = 1 + told, 1 + stretch + self.distance + asked
        order = draw.permutation(self.pairs)
        ids[told], ids[told + width - 1] = keys, values
        ids[asked], ids[asked + width - 1] = keys[order], MASK
        return ids, asked + width - 1, values[order]
