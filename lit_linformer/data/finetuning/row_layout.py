"""Layout: how the tokens of one or two texts become rows of at most max_length tokens, as in RoBERTa.

    bos A eos                    one text; a long one is cut, or read in overlapping windows of equal length
    bos A eos eos B eos          a pair

Shapes: B texts (or pairs), T texts of each, R rows of tokens, L tokens of the longest row.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

from lit_linformer.utils.errors import SettingError

TRUNCATIONS = ("longest_first", "only_first", "only_second")


@dataclass(frozen=True)
class RowLayout:
    """How texts are put into rows.

    Args:
        bos_id: First token.
        eos_id: Token after every text; two between the texts of a pair.
        pad_id: Token that pads a batch, on the right.
        max_length: Largest number of tokens in a row, bos and eos included.
        pair: Whether a row has two texts.
        truncation: For a pair, "longest_first": cut the longer text until both fit; "only_first", "only_second": cut that one.
        max_windows: For one text, the largest number of windows to read it in; 1: it is cut.
        window_overlap: Tokens that consecutive windows share.
    """

    bos_id: int
    eos_id: int
    pad_id: int
    max_length: int
    pair: bool = False
    truncation: str = "longest_first"
    max_windows: int = 1
    window_overlap: int = 32

    def __post_init__(self):
        if self.truncation != "longest_first" and not self.pair:
            raise SettingError("data.truncation", self.truncation, "longest_first", when="for a task with one text")
        if self.pair and self.max_windows > 1:
            raise SettingError("data.max_windows", self.max_windows, "1", when="for pairs of texts")
        if self.max_windows > 1 and self.window_overlap >= self.capacity:
            raise SettingError(
                "data.window_overlap",
                self.window_overlap,
                f"at least 0, less than {self.capacity}, the tokens of text in a row of data.max_length = {self.max_length}",
            )

    @property
    def capacity(self) -> int:
        """How many tokens of text a row has room for."""
        return self.max_length - (4 if self.pair else 2)

    @property
    def stride(self) -> int:
        return self.capacity - self.window_overlap

    def cut(self, lengths: np.ndarray) -> np.ndarray:
        """(B, 2): how many tokens are kept of each text, from its beginning, in pairs of these lengths."""
        first, second = lengths[:, 0], lengths[:, 1]
        if self.truncation == "only_first":
            first = np.minimum(first, np.maximum(self.capacity - second, 0))
        elif self.truncation == "only_second":
            second = np.minimum(second, np.maximum(self.capacity - first, 0))
        else:
            # Cutting the longer text token by token ends when the shorter is whole or both have half; an odd token is A's.
            first = np.minimum(first, np.maximum(self.capacity - second, ceil(self.capacity / 2)))
            second = np.minimum(second, self.capacity - first)
        return np.stack([first, second], axis=1)

    def too_long(self, lengths: np.ndarray) -> int | None:
        """The first pair of these lengths (B, 2) that only_first or only_second cannot make fit; None if all fit."""
        if not self.pair or self.truncation == "longest_first":
            return None
        kept, one = self.cut(lengths), int(self.truncation == "only_second")  # the text that is cut
        bad = (kept.sum(1) > self.capacity) | ((kept[:, one] == 0) & (lengths[:, one] > 0))
        return int(bad.argmax()) if bad.any() else None

    def windows(self, length: int | np.ndarray):
        """Number of rows that one text of this many tokens is read in."""
        if self.max_windows == 1:  # window_overlap is not read then, and may be more than a row has room for
            return 1
        return np.minimum(self.max_windows, 1 + -(-np.maximum(length - self.capacity, 0) // self.stride))

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """(B,): the number of tokens, bos and eos included, over all windows, for texts of these lengths (B, T)."""
        if self.pair:
            return self.cut(lengths).sum(1) + 4
        length = lengths[:, 0]
        windows = self.windows(length)
        covered = np.minimum(length, self.capacity + (windows - 1) * self.stride)
        return covered + (windows - 1) * self.window_overlap + 2 * windows

    def is_cut(self, lengths: np.ndarray) -> np.ndarray:
        """(B,): whether texts of these lengths (B, T) are cut."""
        if self.pair:
            return lengths.sum(1) > self.capacity
        return lengths[:, 0] > self.capacity + (self.max_windows - 1) * self.stride

    def rows(self, texts: list[np.ndarray]) -> list[list[int]]:
        """The rows of tokens of one text or pair.

        All windows have the same length, to within a token, instead of all but the last being full. So there is hardly any
        padding, and tokens count about equally in the mean over windows.
        """
        if self.pair:
            first, second = self.cut(np.array([[len(text) for text in texts]]))[0]
            a, b = texts[0][:first].tolist(), texts[1][:second].tolist()
            return [[self.bos_id, *a, self.eos_id, self.eos_id, *b, self.eos_id]]
        (text,) = texts
        count = int(self.windows(len(text)))
        total = min(len(text), self.capacity + (count - 1) * self.stride) + (count - 1) * self.window_overlap
        ends = [number * total // count for number in range(count + 1)]
        again = [number * self.window_overlap for number in range(count)]  # tokens that were read before
        cuts = [slice(first - seen, last - seen) for first, last, seen in zip(ends, ends[1:], again, strict=False)]
        return [[self.bos_id, *text[cut].tolist(), self.eos_id] for cut in cuts]

    def batch(self, items: list[list[np.ndarray] | None]) -> dict[str, torch.Tensor]:
        """input_ids (R, L), attention_mask (R, L) if there is padding, document (R,) if windows are allowed.

        items: the texts' ids for each row; None makes a filler row.
        """
        filler = [[self.bos_id, self.eos_id]]
        found = [(i, row) for i, texts in enumerate(items) for row in (filler if texts is None else self.rows(texts))]
        lengths = np.array([len(row) for _, row in found])
        ids = np.full((len(found), lengths.max()), self.pad_id, dtype=np.int64)
        for line, (_, row) in zip(ids, found, strict=True):
            line[: len(row)] = row
        batch = {"input_ids": torch.from_numpy(ids)}
        if (lengths < ids.shape[1]).any():
            batch["attention_mask"] = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None])
        if self.max_windows > 1:
            batch["document"] = torch.tensor([i for i, _ in found])
        return batch
