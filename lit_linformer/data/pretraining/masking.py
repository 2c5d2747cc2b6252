"""Masks: which tokens of a block are hidden, and what replaces them.

A row's masks are a pure function of (seed, epoch, index): they change with every pass over the data, and yet a resumed run, or
one with another number of workers or processes, sees exactly the same ones. No state is kept anywhere.

Shapes: B rows, N tokens per row, M masked positions per row (the same in every row of a batch: static shapes, and a
language-model head that multiplies by the vocabulary for M tokens instead of N).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_linformer.data.loader import FILLER
from lit_linformer.model.heads import IGNORED

# Validation masks are the same in every run, whatever training uses: perplexities stay comparable.
VALIDATION_MASK_RATE, VALIDATION_SEED = 0.15, 20200608


class Masker:
    """BERT's masking: of the chosen tokens 80 % become the mask token, 10 % a random one, and 10 % stay as they are.

    Args:
        vocab_size: Number of token ids.
        special_ids: Ids that are never chosen and never drawn as a random replacement.
        mask_id: Id of the mask token.
        mask_rate: Share of a row's tokens that is chosen: M = max(1, round(mask_rate · N)) of N. In a row with padding N is
            the number of its real tokens; places in (B, M) that it, or a row of mostly special tokens, leaves over come first
            and have position 0 and label -100.
        seed: Together with epoch and index the only source of randomness.
        word_tables: `Tokenizer.word_tables()` to choose whole words (the last one is cut when M is reached; one of more than
            M tokens, such as a row of DNA, is chosen token by token); None: single tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        special_ids: Sequence[int],
        mask_id: int,
        mask_rate: float = 0.15,
        seed: int = 0,
        word_tables: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.special = np.zeros(vocab_size, dtype=bool)
        self.special[list(special_ids)] = True
        self.ordinary = np.flatnonzero(~self.special)
        self.mask_id, self.mask_rate, self.seed, self.word_tables = mask_id, mask_rate, seed, word_tables

    def count(self, length: int) -> int:
        """M for blocks of `length` tokens."""
        return max(1, round(self.mask_rate * length))

    def __call__(
        self, ids: np.ndarray, keys: Sequence[tuple[int, int]], lengths: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Masks a batch.

        Args:
            ids: (B, N) int64, changed in place. Position 0 must hold a special token (bos), which is never masked: places
                that are left over point to it.
            keys: (epoch, index) of each row.
            lengths: (B,) real tokens of each row: each row is masked as if it were alone, whatever N is. None: no row has
                padding.

        Returns:
            input_ids (B, N), positions (B, M) in ascending order, labels (B, M), -100 where nothing is masked; all int64.
        """
        if lengths is None:
            return self._full_rows(ids, keys)
        m = self.count(ids.shape[1])
        positions, labels = np.zeros((len(ids), m), np.int64), np.full((len(ids), m), IGNORED, np.int64)
        for row, length in enumerate(lengths.tolist()):
            found = self._full_rows(ids[row : row + 1, :length], keys[row : row + 1])
            first = m - found["labels"].shape[1]
            positions[row, first:], labels[row, first:] = found["positions"], found["labels"]
        return {"input_ids": ids, "positions": positions, "labels": labels}

    def _full_rows(self, ids: np.ndarray, keys: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
        length = ids.shape[1]
        m = self.count(length)
        chance = np.stack([random_numbers(self.seed, epoch, index, length + 2 * m) for epoch, index in keys])
        order, action, replacement = np.split(chance, [length, length + m], axis=1)

        forbidden = self.special[ids]
        if self.word_tables is None:
            chosen = np.argpartition(np.where(forbidden, np.inf, order), m - 1, axis=1)[:, :m]
        else:
            # every token of a word takes the number of its first one, so words stay together when sorted
            starts = word_starts(ids, *self.word_tables)
            of_batch = starts + np.arange(len(ids))[:, None] * length
            tokens = np.bincount(of_batch.ravel(), minlength=ids.size)[of_batch]  # of each token's word
            # A word of more than M tokens is not kept together: always the same tokens of it, the first M, would be chosen.
            order = np.take_along_axis(order, np.where(tokens > m, np.arange(length), starts), axis=1)
            chosen = np.argsort(np.where(forbidden, np.inf, order), axis=1, kind="stable")[:, :m]
        positions = np.sort(np.where(np.take_along_axis(forbidden, chosen, axis=1), 0, chosen), axis=1)
        originals = np.take_along_axis(ids, positions, axis=1)
        filler = self.special[originals]

        random_ids = self.ordinary[(replacement * len(self.ordinary)).astype(np.int64)]
        new = np.where(action < 0.8, self.mask_id, np.where(action < 0.9, random_ids, originals))
        np.put_along_axis(ids, positions, np.where(filler, originals, new), axis=1)
        return {"input_ids": ids, "positions": positions, "labels": np.where(filler, IGNORED, originals)}


def random_numbers(seed: int, epoch: int, index: int, count: int) -> np.ndarray:
    """`count` uniform random numbers in [0, 1), (count,) float64, that depend on nothing but (seed, epoch, index)."""
    # Philox is counter-based: key and counter ARE its state, so unlike SeedSequence-based seeding this costs no
    # hashing. The counter's low word is left at 0 for the generator to count in.
    generator = np.random.Philox(key=[seed, 0], counter=[0, 0, epoch, index])
    return np.random.Generator(generator).random(count)


def word_starts(ids: np.ndarray, joins: np.ndarray, ends_word: np.ndarray) -> np.ndarray:
    """(B, N): for each token of ids (B, N), the position where its word starts; the tables are `Tokenizer.word_tables`'."""
    continues = np.zeros(ids.shape, dtype=bool)
    continues[:, 1:] = joins[ids[:, 1:]] & ends_word[ids[:, :-1]]
    return np.maximum.accumulate(np.where(continues, 0, np.arange(ids.shape[1])), axis=1)


class MaskedBlocks(Dataset):
    """Rows with masks. Items are whole batches, keyed by the (epoch, index) of every row; FILLER rows have no labels.

    Items hold input_ids (B, N), positions (B, M), labels (B, M; -100 = no target), all int64, and, only if a row has
    padding, attention_mask (B, N) bool: full rows need none, and fused attention is faster without.

    Args:
        blocks: A data set of such batches, without positions and labels.
        masker: Masks them.
    """

    def __init__(self, blocks: Any, masker: Masker):
        self.blocks, self.masker = blocks, masker

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        batch = self.blocks[keys]
        lengths = batch["attention_mask"].sum(1).numpy() if "attention_mask" in batch else None
        found = self.masker(batch["input_ids"].numpy(), [(int(epoch), max(int(index), 0)) for epoch, index in keys], lengths)
        found["labels"][[row for row, (_, index) in enumerate(keys) if index == FILLER]] = IGNORED
        made = {name: torch.from_numpy(array) for name, array in found.items()}
        if "attention_mask" in batch:
            made["attention_mask"] = batch["attention_mask"]
        return made
