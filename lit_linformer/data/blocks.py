"""Blocks: documents → one file of token ids on the disk → rows of exactly n tokens.

The file is the stream itself: the tokens of every document, each followed by eos. A block is bos and the next n-1
tokens of the stream, a view that is made when it is read: no token is lost or repeated, and another n needs no
tokenising. The last block is filled up with pads.

    tokens-<fingerprint>/train.bin, validation.bin, test.bin    uint16, or uint32 for more than 65,536 ids
    tokens-<fingerprint>/meta.json                              counts, and all that shaped the files

They are made in shards of 100 MB of text: a preparation that was killed goes on after the last shard it has finished.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lit_linformer.data.cache import fingerprint, make_once, read_progress, write_progress
from lit_linformer.data.corpus import Corpus
from lit_linformer.data.progress import Progress
from lit_linformer.data.tokenizer import Tokenizer

FORMAT = 1  # raise it when the files' meaning changes: old caches are then not found
SPLITS = ("train", "validation", "test")
BATCH_CHARACTERS = 1_000_000  # tokenised at once: 2 M is no faster, and the encodings take about 40 bytes a character
PIECE_CHARACTERS = 100_000
SHARD_BYTES = 100_000_000


class Holdout:
    """Which split a document of the training source belongs to: a hash of its number, the same in every run.

    It does not depend on `data.seed`: runs with different seeds are compared on the same validation text.
    """

    def __init__(self, validation_fraction: float, test_fraction: float):
        self.validation, self.test = validation_fraction, validation_fraction + test_fraction

    def split(self, number: int) -> str:
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
        chance = int.from_bytes(digest, "little") / 2**64
        return "validation" if chance < self.validation else "test" if chance < self.test else "train"

    def training(self, documents: Iterable[str]) -> Iterator[str]:
        return (document for i, document in enumerate(documents) if self.split(i) == "train")


def make_token_files(
    cache: Path, corpora: Mapping[str, Corpus], holdout: Holdout, tokenizer: Tokenizer, progress: bool = True
) -> Path:
    """The folder of token files, made if it is not there.

    Args:
        cache: Folder that holds it.
        corpora: "train", and "validation" or "test" where these have a source of their own.
        holdout: How the training source is divided.
        tokenizer: Its whole content is part of the fingerprint.
        progress: False for silence.
    """
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer.sha256,
        "sources": {split: corpus.stamp() for split, corpus in corpora.items()},
        "holdout": [holdout.validation, holdout.test],
    }

    def make(folder: Path) -> None:
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
        read, counts, files = _open_files(folder, dtype, corpora)
        if progress and sum(read.values()):
            print(f"going on after {sum(read.values())} documents that are tokenised", file=sys.stderr, flush=True)
        try:
            for name, corpus in corpora.items():
                with Progress(f"Tokenising {corpus.source}", show=progress) as shown:
                    split_of = holdout.split if name == "train" else lambda _, name=name: name
                    texts, in_shard = _pieces(corpus, tokenizer, split_of, read[name]), 0
                    for done, documents, whole in write_tokens(texts, tokenizer, files, counts, dtype):
                        shown.update(done, corpus.fraction)
                        read[name], in_shard = read[name] + documents, in_shard + done
                        if in_shard >= SHARD_BYTES and whole:
                            _finish_shard(folder, files, read, counts)
                            in_shard = 0
        finally:
            for file in files.values():
                file.close()
        meta = {"format": FORMAT, "dtype": dtype.name, "splits": counts, "inputs": inputs}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))

    return make_once(cache / f"tokens-{fingerprint(inputs)}", make)


def _open_files(folder: Path, dtype: np.dtype, corpora: Iterable[str]) -> tuple[dict[str, int], dict, dict]:
    """Documents read of each source, counts and open token files: of nothing, or after the last shard that was finished."""
    found = read_progress(folder)
    counts = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    read, paths = dict.fromkeys(corpora, 0), {split: folder / f"{split}.bin" for split in SPLITS}
    if found is not None:
        sizes = {split: count["tokens"] * dtype.itemsize for split, count in found["counts"].items()}
        if all(path.is_file() and path.stat().st_size >= sizes[split] for split, path in paths.items()):
            read, counts = found["read"], found["counts"]
    files = {}
    for split, path in paths.items():
        size = counts[split]["tokens"] * dtype.itemsize
        files[split] = open(path, "r+b" if size else "wb")
        files[split].truncate(size)
        files[split].seek(size)
    return read, counts, files


def _finish_shard(folder: Path, files: dict, read: dict[str, int], counts: dict) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    write_progress(folder, {"read": read, "counts": counts})


def write_tokens(pieces: Iterable[tuple], tokenizer: Tokenizer, files, counts, dtype) -> Iterator[tuple[int, int, bool]]:
    """Tokenises pieces (split, text, ends a document) into the files.

    Yields, batch by batch, the bytes done, the documents that ended, and whether the last one did.

    Reading the next batch and writing the last one go on in threads beside the tokenizer, which itself uses all cores
    but leaves them idle while it takes in and hands out Python objects.
    """

    def write(batch, encodings) -> tuple[int, int, bool]:
        ids: dict[str, list[int]] = {split: [] for split in files}
        done = 0
        for (split, text, ends), encoding in zip(batch, encodings, strict=True):
            tokens, count = ids[split], counts[split]
            before = len(tokens)
            tokens.extend(encoding.ids)
            if ends:
                tokens.append(tokenizer.eos_id)
                count["documents"] += 1
            size = len(text.encode())
            count["tokens"] += len(tokens) - before
            count["bytes"] += size
            done += size
        for split, tokens in ids.items():
            files[split].write(np.fromiter(tokens, dtype, len(tokens)).data)
        return done, sum(ends for _, _, ends in batch), batch[-1][2]

    batches = _batches(pieces)
    with ThreadPoolExecutor(2) as pool:
        reading, writing = pool.submit(next, batches, None), None
        while (batch := reading.result()) is not None:
            reading = pool.submit(next, batches, None)
            encodings = tokenizer.encode_plain([text for _, text, _ in batch])
            if writing is not None:
                yield writing.result()
            writing = pool.submit(write, batch, encodings)
            del encodings
        if writing is not None:
            yield writing.result()


def _pieces(documents: Iterable[str], tokenizer: Tokenizer, split_of, first: int = 0) -> Iterator[tuple[str, str, bool]]:
    for number, document in enumerate(documents):
        if number < first:
            continue
        split = split_of(number)
        if len(document) > 2 * PIECE_CHARACTERS and tokenizer.splits_at_newlines:
            *others, last = cut_at_newlines(document, PIECE_CHARACTERS)
            yield from ((split, piece, False) for piece in others)
        else:
            last = document
        yield split, last, True


def cut_at_newlines(text: str, size: int) -> Iterator[str]:
    """Pieces of at least `size` characters, cut before a newline that follows a visible ASCII character.

    So no run of white space is ever cut, which may be one token; `Tokenizer.splits_at_newlines` tells where that suffices.
    """
    start, at = 0, size
    while (at := text.find("\n", at)) != -1:
        if "!" <= text[at - 1] <= "~":
            yield text[start:at]
            start, at = at, at + size
        else:
            at += 1
    yield text[start:]


def _batches(pieces: Iterable[tuple]) -> Iterator[list[tuple]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class TokenBlocks:
    """Rows of exactly `length` tokens from one of the token files, memory-mapped.

    Args:
        folder: What `make_token_files` returned.
        split: "train", "validation" or "test".
        length: n, bos included.
        bos_id: First token of every row.
        pad_id: Fills up the last row.
    """

    def __init__(self, folder: Path, split: str, length: int, bos_id: int, pad_id: int):
        self.path, self.length, self.bos_id, self.pad_id = folder / f"{split}.bin", length, bos_id, pad_id
        meta = read_meta(folder)
        self.dtype, self.tokens = np.dtype(meta["dtype"]), meta["splits"][split]["tokens"]
        if self.path.stat().st_size != self.tokens * self.dtype.itemsize:
            raise ValueError(f"{self.path} is damaged: delete the folder {folder}, it will be made again")
        self._stream = None

    def __len__(self) -> int:
        return -(-self.tokens // (self.length - 1))

    @property
    def full(self) -> int:
        """Number of rows without pads."""
        return self.tokens // (self.length - 1)

    def rows(self, indices) -> np.ndarray:
        """(B, n) int64."""
        if self._stream is None:
            self._stream = np.memmap(self.path, self.dtype, "r") if self.tokens else np.zeros(0, self.dtype)
        rows = np.full((len(indices), self.length), self.pad_id, dtype=np.int64)
        rows[:, 0] = self.bos_id
        for row, index in zip(rows, indices, strict=True):
            tokens = self._stream[index * (self.length - 1) : (index + 1) * (self.length - 1)]
            row[1 : 1 + len(tokens)] = tokens
        return rows

    def __getstate__(self):
        # a memmap would be pickled with all that it maps: spawned workers open the file again
        return self.__dict__ | {"_stream": None}


def read_meta(folder: Path) -> dict:
    """meta.json: counts of documents, tokens and bytes a split, and the inputs of the fingerprint."""
    return json.loads((folder / "meta.json").read_text())
