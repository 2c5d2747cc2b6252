"""Blocks: documents → one file of token ids on the disk → rows of exactly n tokens.

The file is a stream: the tokens of all documents, each document followed by eos. A block is bos and the next n-1
tokens of the stream, put together when it is read: no token is lost or repeated, and changing n needs no new
tokenising. The last block is padded.

    tokens-<fingerprint>/train.bin, validation.bin, test.bin    uint16, or uint32 for more than 65,536 ids
    tokens-<fingerprint>/meta.json                              counts, checksums, and all that shaped the files

They are made in shards of 100 MB of text: a preparation that was killed continues after the last shard it finished.
"""

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from lit_linformer.data.cache import damaged, fingerprint, read_meta, read_progress, write_meta, write_progress
from lit_linformer.data.checksums import ShardWriter, make_verified
from lit_linformer.data.pieces import batches_of, pieces_of
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.progress_bar import Preparing
from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.utils.errors import UserError

FORMAT = 1  # to be increased when the files' meaning changes, so that old caches are not found
SPLITS = ("train", "validation", "test")
FILES = {split: f"{split}.bin" for split in SPLITS}
SHARD_BYTES = 100_000_000
LOOKED_AT = 1 << 22  # tokens in which the longest document is looked for


class Holdout:
    """Which split a document of the training source belongs to: a hash of its number, the same in every run.

    It does not depend on `data.seed`: runs with different seeds are compared on the same validation text.
    """

    def __init__(self, validation_fraction: float, test_fraction: float):
        self.validation, self.test = validation_fraction, validation_fraction + test_fraction

    def split(self, number: int) -> str:
        chance = _chance(number)
        return "validation" if chance < self.validation else "test" if chance < self.test else "train"

    def training(self, documents: Iterable[str]) -> Iterator[str]:
        return (document for i, document in enumerate(documents) if self.split(i) == "train")


def _chance(number: int) -> float:
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def least_fraction(documents: int, before: float) -> float | None:
    """The smallest share, in whole percent, that holds out at least one of this many documents; None: no share does.

    before: the total share of the splits that come first.
    """
    chances = [chance for chance in map(_chance, range(documents)) if chance >= before]
    least = math.ceil(100 * (min(chances) - before)) / 100 if chances else 1.0
    return least if 0 < least < 1 else None


def make_token_files(
    cache: Path, corpora: Mapping[str, Corpus], holdout: Holdout, tokenizer: Tokenizer, progress: bool = True
) -> Path:
    """The folder of token files, which is made if it does not exist; its fingerprint includes the whole tokenizer.

    corpora: that of "train", which ``holdout`` divides, and of "validation" or "test" if these have their own source.
    """
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer.of_plain_text,
        "sources": {split: corpus.stamp() for split, corpus in corpora.items()},
        "holdout": [holdout.validation, holdout.test],
    }

    def make(folder: Path) -> None:
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
        read, counts, files = _open_files(folder, dtype, corpora)
        if progress and sum(read.values()):
            print(f"continuing after {sum(read.values())} documents already tokenised", file=sys.stderr, flush=True)
        try:
            for name, corpus in corpora.items():
                with Preparing(f"Tokenising {corpus.source}", show=progress) as shown:
                    split_of = holdout.split if name == "train" else lambda _, name=name: name
                    texts, in_shard = _pieces(corpus, tokenizer, split_of, read[name]), 0
                    for done, documents, whole in write_tokens(texts, tokenizer, files, counts, dtype):
                        shown.update(done, corpus.fraction)
                        read[name], in_shard = read[name] + documents, in_shard + done
                        if in_shard >= SHARD_BYTES and whole:
                            _finish_shard(folder, files, read, counts)
                            in_shard = 0
            for file in files.values():
                file.end_shard()
        finally:
            for file in files.values():
                file.close()
        for name, corpus in corpora.items():
            if corpus.stamp() != inputs["sources"][name]:
                what = f"{corpus.setting}: {corpus.source} has changed while it was read"
                raise UserError(what, "files that stay as they are")
        checksums = {FILES[split]: file.shards for split, file in files.items()}
        meta = {"format": FORMAT, "dtype": dtype.name, "splits": counts, "checksums": checksums, "inputs": inputs}
        write_meta(folder, meta)

    return make_verified(cache / f"tokens-{fingerprint(inputs)}", make, list(FILES.values()))


def _open_files(folder: Path, dtype: np.dtype, corpora: Iterable[str]) -> tuple[dict[str, int], dict, dict]:
    """Documents read from each source, counts, and open token files, which end after the last finished shard or are empty."""
    found = read_progress(folder)
    paths = {split: folder / name for split, name in FILES.items()}
    if found is not None:
        try:
            read, counts = found["read"], found["counts"]
            sizes = {split: counts[split]["tokens"] * dtype.itemsize for split in SPLITS}
            if all(path.is_file() and path.stat().st_size >= sizes[split] for split, path in paths.items()):
                return read, counts, {split: ShardWriter(path, found["checksums"][split]) for split, path in paths.items()}
        except (KeyError, TypeError):
            pass  # not our progress.json, or one from before there were checksums
    counts = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    return dict.fromkeys(corpora, 0), counts, {split: ShardWriter(path) for split, path in paths.items()}


def _finish_shard(folder: Path, files: dict, read: dict[str, int], counts: dict) -> None:
    for file in files.values():
        file.end_shard()
    shards = {split: file.shards for split, file in files.items()}
    write_progress(folder, {"read": read, "counts": counts, "checksums": shards})


def write_tokens(pieces: Iterable[tuple], tokenizer: Tokenizer, files, counts, dtype) -> Iterator[tuple[int, int, bool]]:
    """Tokenises pieces, each (text, split, whether it ends a document), into the files.

    Yields, batch by batch, the bytes done, the documents that ended, and whether the last piece ended one.

    The next batch is read and the last one written in threads beside the tokenizer, which itself uses all cores, but
    leaves them idle while it converts Python objects.
    """

    def write(batch, encoded) -> tuple[int, int, bool]:
        ids: dict[str, list[int]] = {split: [] for split in files}
        done = 0
        for (_, split, ends, size), found in zip(batch, encoded, strict=True):
            tokens, count = ids[split], counts[split]
            before = len(tokens)
            tokens.extend(found)
            if ends:
                tokens.append(tokenizer.eos_id)
                count["documents"] += 1
            count["tokens"] += len(tokens) - before
            count["bytes"] += size
            done += size
        for split, tokens in ids.items():
            files[split].write(np.fromiter(tokens, dtype, len(tokens)))
        return done, sum(ends for _, _, ends, _ in batch), batch[-1][2]

    batches = batches_of(pieces)
    with ThreadPoolExecutor(2) as pool:
        reading, writing = pool.submit(next, batches, None), None
        while (batch := reading.result()) is not None:
            reading = pool.submit(next, batches, None)
            encoded = tokenizer.encode_plain([text for text, _, _, _ in batch])
            if writing is not None:
                yield writing.result()
            writing = pool.submit(write, batch, encoded)
            del encoded
        if writing is not None:
            yield writing.result()


def _pieces(documents: Iterable[str], tokenizer: Tokenizer, split_of, first: int) -> Iterator[tuple[str, str, bool]]:
    """(text, split, whether it ends a document) of the documents from number `first` on."""
    number = -1
    for document in documents:
        number += 1
        if number < first:
            continue
        split = split_of(number)
        for piece, ends in pieces_of(document, tokenizer.splits_at_newlines):
            yield piece, split, ends
        del document  # it may be large, and the next one is read while its last piece waits


class TokenBlocks:
    """Rows of exactly `length` tokens, bos included, from a split's memory-mapped token file; the last one is padded."""

    def __init__(self, folder: Path, split: str, length: int, bos_id: int, pad_id: int):
        self.path, self.length, self.bos_id, self.pad_id = folder / FILES[split], length, bos_id, pad_id
        meta = read_meta(folder)
        self.dtype, self.tokens = np.dtype(meta["dtype"]), meta["splits"][split]["tokens"]
        size, expected = self.path.stat().st_size, self.tokens * self.dtype.itemsize
        if size != expected:
            raise damaged(self.path, f"it has {size:,} bytes of {expected:,}")

    def __len__(self) -> int:
        return -(-self.tokens // (self.length - 1))

    @property
    def full(self) -> int:
        """Number of rows without padding."""
        return self.tokens // (self.length - 1)

    def rows(self, indices) -> np.ndarray:
        """The rows with these numbers, (B, n) int64."""
        rows = np.full((len(indices), self.length), self.pad_id, dtype=np.int64)
        rows[:, 0] = self.bos_id
        for row, index in zip(rows, indices, strict=True):
            tokens = self.stream[index * (self.length - 1) : (index + 1) * (self.length - 1)]
            row[1 : 1 + len(tokens)] = tokens
        return rows

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict:
        """The batch for (epoch, index) of each row: input_ids (B, n) int64, and attention_mask (B, n) if there is padding."""
        import torch  # not needed to make the files

        rows = np.array([max(int(index), 0) for _, index in keys])
        batch = {"input_ids": torch.from_numpy(self.rows(rows))}
        if (rows >= self.full).any():
            real = np.minimum(self.tokens - rows * (self.length - 1), self.length - 1)  # beside bos
            batch["attention_mask"] = torch.from_numpy(np.arange(self.length) <= real[:, None])
        return batch

    @cached_property
    def stream(self) -> np.ndarray:
        """All tokens, (tokens,), eos after each document."""
        return np.memmap(self.path, self.dtype, "r") if self.tokens else np.zeros(0, self.dtype)

    def longest_document(self, eos_id: int, most: int = LOOKED_AT) -> int:
        """Tokens of the longest document, eos included, among the first ``most`` tokens of the split."""
        first = self.stream[:most]
        return int(np.diff(np.flatnonzero(first == eos_id), prepend=-1, append=len(first) - 1).max(initial=0))

    def full_rows(self, most: int) -> np.ndarray:
        """(S, n) int64: at most this many rows without padding, spread evenly over the split."""
        return self.rows(np.unique(np.linspace(0, self.full - 1, min(most, self.full)).round().astype(int)))

    def __getstate__(self):
        # a memmap would be pickled with all that it maps: spawned workers open the file again
        return {name: value for name, value in self.__dict__.items() if name != "stream"}
