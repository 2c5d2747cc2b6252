"""Data of your own: texts from a database, each in a row of its own, for masked language modelling; runs resume exactly.

    python run.py fit --config conf/quickstart.yaml --name database \
      --data examples.database_texts.DatabaseTexts --data.database reviews.db

Files need none of this: `--data.source` reads text, CSV, TSV, JSON lines and Parquet. It packs texts into full rows, while here
each text has a row of its own. The tokenizer must exist already: use that of a run, or one that `prepare` made.
"""

import sqlite3
from contextlib import closing

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_linformer.data.loader import FILLER, EvaluationLoader, ResumableLoader
from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model.heads import IGNORED


class MaskedRows:
    """Rows of ids (R, N) as batches: dataset[[(epoch, index), …]]. Masks depend only on (seed, epoch, index).

    With several processes, one may run out of rows for validation: its batch is the index FILLER, which counts for nothing.
    """

    def __init__(self, rows: np.ndarray, tokenizer: Tokenizer, seed: int):
        self.rows, self.tokenizer, self.seed = rows, tokenizer, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, Tensor]:
        filler = [index == FILLER for _, index in keys]
        keys = [(epoch, max(index, 0)) for epoch, index in keys]
        ids = self.rows[[index for _, index in keys]]
        masked = max(1, ids.shape[1] * 15 // 100)  # M, the same in every row
        draws = [np.random.default_rng((self.seed, epoch, index)) for epoch, index in keys]
        positions = np.stack([np.sort(draw.choice(ids.shape[1], masked, replace=False)) for draw in draws])
        there = np.take_along_axis(ids, positions, 1)
        labels = np.where(there == self.tokenizer.pad_id, IGNORED, there)
        labels[filler] = IGNORED
        np.put_along_axis(ids, positions, np.where(labels == IGNORED, there, self.tokenizer.mask_id), 1)
        batch = {"input_ids": ids, "positions": positions, "labels": labels, "attention_mask": ids != self.tokenizer.pad_id}
        return {name: torch.from_numpy(value) for name, value in batch.items()}


class DatabaseTexts(LightningDataModule):
    """One row of tokens for each text that a query finds; every tenth row is for validation.

    Args:
        database: an SQLite file.
        query: SQL that returns the texts, always in the same order.
        tokenizer: a tokenizer.json.
        max_length: tokens in a row; the rest of a text is cut off.
        batch_size: rows in a batch.
        seed: seed of the order and the masks.
    """

    def __init__(
        self,
        database: str,
        query: str = "SELECT text FROM reviews ORDER BY rowid",
        tokenizer: str = "runs/quickstart/tokenizer.json",
        max_length: int = 128,
        batch_size: int = 32,
        seed: int = 0,
    ):
        super().__init__()
        self.database, self.query = database, query
        self.max_length, self.batch_size, self.seed = max_length, batch_size, seed
        self.tokenizer = load_tokenizer(tokenizer)
        self._loader: ResumableLoader | None = None
        self._samples = 0

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary, from which the command line sets the model's vocab_size."""
        return len(self.tokenizer)

    def setup(self, stage: str) -> None:
        with closing(sqlite3.connect(self.database)) as database:
            texts = [text for (text,) in database.execute(self.query)]
        self.rows = np.full((len(texts), self.max_length), self.tokenizer.pad_id, dtype=np.int64)
        for row, text in zip(self.rows, texts, strict=True):
            ids = [self.tokenizer.bos_id, *self.tokenizer.encode(text)][: self.max_length]
            row[: len(ids)] = ids
        self.held_out = np.arange(len(texts)) % 10 == 0

    def train_dataloader(self) -> ResumableLoader:
        dataset = MaskedRows(self.rows[~self.held_out], self.tokenizer, self.seed)
        steps = {"accumulate": self.trainer.accumulate_grad_batches, "samples": self._samples}
        self._loader = ResumableLoader(dataset, self.batch_size, seed=self.seed, **steps)
        return self._loader

    def val_dataloader(self) -> EvaluationLoader:
        return EvaluationLoader(MaskedRows(self.rows[self.held_out], self.tokenizer, seed=1), self.batch_size)

    # A resumed run continues after this many rows.

    def state_dict(self) -> dict[str, int]:
        return {"samples": self._loader.samples if self._loader is not None else self._samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._samples = state["samples"]
