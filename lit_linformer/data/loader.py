"""Loaders: which rows a step reads, resumable exactly.

The samples of a training run are one endless sequence: sample t belongs to pass t // S over the S blocks and is block
t % S of that pass, shuffled by a permutation that depends on (seed, pass) and is computed on demand, never
stored. A global batch is the next G = batch_size · ranks of them, of which rank r takes every `ranks`-th. So the state is
one number, that of the samples handed out, and means the same for any number of ranks and workers. Batches continue across
the end of a pass: none is short, no sample is left out.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from lit_linformer.utils.signals import START_METHOD

# The second word of Philox's key; masks use 0, so that they and the order of buckets share no random numbers.
BUCKET_STREAM = 2
HELD_OUT_KEY = [20200608, 6]  # not a run's seed
ROUNDS = 8  # of the shuffle's Feistel network
AHEAD = 4096  # samples whose order is computed at once
FILLER = -1
LEAST_REAL = 0.95  # share of real tokens in a batch of a held-out set; the rest is padding
WINDOW = 256  # steps whose rows are sorted by length together; IMDB at n = 4,096 then has 2 % padding, with 64 steps 6 %


# Lightning replaces a loader's sampler by its own, unless it is a DistributedSampler (with several ranks) or a
# SequentialSampler (with overfit_batches). Ours handle ranks and overfitting themselves, so they are both.
class _Order(SequentialSampler, DistributedSampler):
    def __init__(self):
        pass

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning; the order does not depend on its epochs."""


class StreamOrder(_Order):
    """One rank's batches of (epoch, index): `length` batches, from sample `start` of the endless sequence on."""

    def __init__(self, num_samples: int, batch_size: int, length: int, seed: int, rank: int, world_size: int):
        self.num_samples, self.batch_size, self.length, self.seed = num_samples, batch_size, length, seed
        self.rank, self.world_size, self.start = rank, world_size, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start, step = self.start, self.batch_size * self.world_size
        end = start + self.length * step
        ahead = max(1, AHEAD // self.batch_size) * step
        for first in range(start, end, ahead):  # many at once: a numpy call takes longer than the computation
            samples = np.arange(first + self.rank, min(first + ahead, end), self.world_size)
            for batch in self.keys(samples).reshape(-1, self.batch_size, 2).tolist():
                yield [tuple(key) for key in batch]

    def keys(self, samples: np.ndarray) -> np.ndarray:
        """Samples (T,) of the endless sequence → (T, 2) int64, (epoch, index) of each."""
        epochs, places = np.divmod(samples, self.num_samples)
        return np.stack([epochs, shuffled(places, epochs, self.num_samples, self.seed)], 1)


class BucketOrder(StreamOrder):
    """The same stream in batches of rows of about the same length, so that there is little padding.

    Windows of 256 optimiser steps of the stream (or of a pass, if that is shorter) are sorted by length and cut into steps,
    which are shuffled. So which rows a step reads depends on its number and size alone, not on how ranks and micro-batches
    share them, and a pass still has every sample once.
    """

    def __init__(self, lengths: np.ndarray, num_samples: int, *args: int, accumulate: int = 1):
        super().__init__(num_samples, *args)
        self.lengths, self.accumulate = lengths, accumulate
        self.global_batch = self.batch_size * self.world_size
        self.step_rows = self.global_batch * accumulate
        # Sorting puts copies of a sample next to each other. A window is never longer than a pass, so it holds at most two
        # copies; it may hold two, since windows do not begin where passes do. In a set of RTE's size, 4 % of the rows share a
        # step with their copy.
        self.window = min(WINDOW, max(1, num_samples // self.step_rows))
        self._steps: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        # If the rows of a step have changed, `start` may lie within a step, and the rest of its window is divided anew.
        first = self.start // self.global_batch
        for number in range(first, first + self.length):
            yield [(int(epoch), int(index)) for epoch, index in self.batch(number)[self.rank :: self.world_size]]

    def batch(self, number: int) -> np.ndarray:
        """(G, 2): (epoch, index) of a global batch, of which ``accumulate`` make a step."""
        step, part = divmod(number, self.accumulate)
        window, place = divmod(step, self.window)
        if self._steps is None or self._steps[0] != window:
            start, size = window * self.window * self.step_rows, self.window * self.step_rows
            keys = self.keys(np.arange(start, start + size))
            keys = keys[np.argsort(self.lengths[keys[:, 1]], kind="stable")]
            generator = np.random.Generator(np.random.Philox(key=[self.seed, BUCKET_STREAM], counter=[0, 0, window, 0]))
            order = generator.permutation(self.window)
            self._steps = window, keys.reshape(self.window, self.step_rows, 2)[order]
        return self._steps[1][place, part * self.global_batch :][: self.global_batch]


def shuffled(places: np.ndarray, epochs: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Maps places (T,) in epochs (T,) by a shuffle of range(size) that depends on (seed, epoch) alone: (T,) int64.

    A Feistel network on a place's bits (Luby and Rackoff, 1988), which is a bijection for any round function, and stays one
    when repeated until the result is in range(size) (cycle walking: Black and Rogaway, 2002). So the order of a pass over 1 TB
    of text takes no memory, and training starts at once.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = _mixed(_mixed(np.array([seed], np.uint64)) + epochs.astype(np.uint64))
    keys = [_mixed(keys + np.uint64(number)) for number in range(ROUNDS)]
    found, walking = places.astype(np.uint64), np.arange(len(places))
    while len(walking):
        left, right = found[walking] >> half, found[walking] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key[walking]) & low)
        found[walking] = left << half | right
        walking = walking[found[walking] >= size]
    return found.astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """A hash of each 64-bit word: SplitMix64's step (Steele, Lea and Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


class FixedOrder(_Order):
    """One rank's batches of a held-out set: every row once over all ranks, all at epoch 0.

    All ranks have the same number of batches, because a forward pass under DistributedDataParallel waits for the others; a
    rank that runs out of rows gets a filler row without targets.

    size: number of rows; lengths: tokens of each. With lengths a batch has rows of about the same length, and rows and batches
    are shuffled, always in the same way, so that Trainer.limit_val_batches scores a random sample, not the longest texts or
    one class. None: the data set's order.
    """

    def __init__(self, size: int, lengths: np.ndarray | None, batch_size: int, rank: int, world_size: int):
        if lengths is None:
            of_all = even_batches([1] * size, batch_size * world_size)
        else:
            order = mixed(size)
            batches = by_length(lengths[order].tolist(), batch_size * world_size)
            of_all = [order[batches[number]].tolist() for number in mixed(len(batches))]
        self.batches = [[(0, row) for row in batch[rank::world_size]] or [(0, FILLER)] for batch in of_all]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def mixed(count: int) -> np.ndarray:
    """A permutation of range(count), the same in every run."""
    return np.random.Generator(np.random.Philox(key=HELD_OUT_KEY)).permutation(count)


def even_batches(lengths: Sequence[int], size: int) -> list[range]:
    """Rows of these lengths, the longest first, cut into batches of up to `size`, each at least 95 % real tokens."""
    found, first, real = [], 0, 0
    for place, length in enumerate(lengths):
        count = place - first
        if count == size or real + length < LEAST_REAL * lengths[first] * (count + 1):
            found.append(range(first, place))
            first, real = place, 0
        real += length
    return [*found, range(first, len(lengths))] if len(lengths) else []


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """As ``even_batches``, for rows in any order: the rows of each batch."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [[order[place] for place in batch] for batch in even_batches([lengths[row] for row in order], size)]


def _left_to_the_one_that_trains(worker: int) -> None:
    # A signal to a job's process group (`timeout`) or to each of its processes (Slurm, systemd, `pkill -f`) is meant for the
    # training process. It finishes its step, for which it needs its workers, and ends them itself.
    os.setpgrp()
    if not hasattr(signal, "sigwaitinfo"):
        return  # macOS does not tell who sent a signal: here SIGTERM ends a worker, whoever sends it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also in threads that are started from here on
    threading.Thread(target=_ended_by, args=(os.getppid(),), daemon=True).start()


def _ended_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class _Loader(DataLoader):
    def __init__(self, dataset: Dataset, sampler: _Order, num_workers: int, pin_memory: bool):
        super().__init__(
            dataset,
            batch_size=None,  # an item already is a batch
            sampler=sampler,
            num_workers=num_workers,
            # Forked workers share the rows in memory, start at once and have this process as their parent. With Python 3.14's
            # default start method they would not know whose SIGTERM is to end them.
            multiprocessing_context=START_METHOD if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else every iterator draws a seed from torch's global generator
            worker_init_fn=_left_to_the_one_that_trains,
        )

    def __iter__(self):
        # With workers this forks, and `tokenizers`, once used here, warns about that in each child unless
        # TOKENIZERS_PARALLELISM is set.
        with _tokenizers_single_threaded():
            return super().__iter__()


class EvaluationLoader(_Loader):
    """A held-out set, the same in every pass; for validation and test, since Lightning makes loaders for predict anew.

    Args:
        dataset: Its items are whole batches, keyed by the (epoch, index) of every row. On a rank that has run out of rows the
            index is FILLER, for a row of any content, which must not count in a metric.
        batch_size: Rows in a batch on each rank.
        rank: Rank of this process; None: torch.distributed's, so that with a user's own data module, which Lightning does not
            shard, not every rank reads all rows.
        world_size: Number of ranks; None: torch.distributed's.
        num_workers: Processes that load batches; 0: this one does.
        pin_memory: Use page-locked memory, for faster copies to a GPU.
        lengths: Tokens of each row: batches have rows of about the same length, fewer where lengths differ, and are shuffled.
            None: all rows have the same length, and are read in the data set's order.
    """

    def __init__(self, dataset, batch_size, rank=None, world_size=None, num_workers=0, pin_memory=False, lengths=None):
        rank, world_size = _place(rank, world_size)
        super().__init__(dataset, FixedOrder(len(dataset), lengths, batch_size, rank, world_size), num_workers, pin_memory)


class ResumableLoader(_Loader):
    """The training stream; `state_dict()` counts the samples handed out, not those that workers have prefetched.

    Its length, which Lightning calls an epoch, is a pass over the data rounded down to whole optimiser steps (at least one),
    because Lightning makes a step at an epoch's end even if it has not accumulated enough. The next iteration continues where
    this one ended.

    Args:
        dataset, batch_size, rank, world_size, num_workers, pin_memory: As EvaluationLoader's.
        num_samples: Use only this many rows, the first ones; None: all.
        seed: Seed of the order.
        accumulate: Micro-batches in an optimiser step.
        samples: Samples handed out before; the stream continues after them.
        lengths: Tokens of each row, to put rows of about the same length together; None: all are equal.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        num_samples=None,
        seed=0,
        accumulate=1,
        samples=0,
        rank=None,
        world_size=None,
        num_workers=0,
        pin_memory=False,
        lengths=None,
    ):
        rank, world_size = _place(rank, world_size)
        size = num_samples or len(dataset)
        self.global_batch, self.samples = batch_size * world_size, samples
        length = max(1, size // (self.global_batch * accumulate)) * accumulate
        settings = (size, batch_size, length, seed, rank, world_size)
        order = StreamOrder(*settings) if lengths is None else BucketOrder(lengths, *settings, accumulate=accumulate)
        super().__init__(dataset, order, num_workers, pin_memory)

    def __iter__(self):
        # A generator: nothing is prefetched before the first batch is requested, so a state that is loaded before that
        # takes effect.
        self.sampler.start = self.samples
        for batch in super().__iter__():
            self.samples += self.global_batch
            yield batch

    def state_dict(self) -> dict:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict) -> None:
        self.samples = int(state["samples"])


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    together = torch.distributed.is_initialized()
    here = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
    return here[0] if rank is None else rank, here[1] if world_size is None else world_size


@contextmanager
def _tokenizers_single_threaded():
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
