"""What the LightningDataModules share: a tokenizer that may be trained, loaders for every rank, and exact resuming."""

import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn

from lit_linformer.data.cache import damaged, fingerprint, make_once
from lit_linformer.data.checksums import VERIFY
from lit_linformer.data.loader import ResumableLoader
from lit_linformer.data.pieces import size_of
from lit_linformer.data.progress_bar import Preparing
from lit_linformer.data.summary import Summary
from lit_linformer.data.tokenizer import SMALLEST, Tokenizer, load_tokenizer, train_tokenizer
from lit_linformer.model.ranges import OneOf, Range
from lit_linformer.utils.errors import SettingError, UserError

STAGES = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",), "predict": ()}  # splits each reads
TRAINED = tuple(SMALLEST)  # tokenizers that are trained, not loaded
VocabularySize = Annotated[int, Range(least=1, largest=2**24)]
RowLength = Annotated[int, Range(least=8, largest=2**24)]
BatchSize = Annotated[int, Range(least=1, largest=2**16)]  # more in a step: data.global_batch_size
Workers = Annotated[int, Range(least=0, most=256)]
Verify = Annotated[str, OneOf(VERIFY)]
Rows = TypeVar("Rows")
# A batch may have this many rows even if there are fewer training rows, which then repeat in it.
SMALL_BATCH = 4096


class ResumableDataModule(LightningDataModule):
    """A data module whose training stream is one sequence of samples, counted in its state.

    A subclass sets tokenizer_name, vocab_size, batch_size, global_batch_size, num_workers, seed, cache_dir and verify. Once it
    knows its data, it sets `data_name`, with which a resumed run, and the processes of a run, check that they see the same
    data, and, if validation is a share of the training data, `held_out_name`, which shows whether a checkpoint was trained on
    some of it. `equal_rows`: the rows of all batches have the same length, padding included; otherwise a batch is as long as
    its longest row. Its setup calls `_start_anew` at the beginning of a fit, and `_compare_processes` at its end. It defines
    train_dataloader, and `_evaluation` for validation and test.
    """

    tokenizer_name: str
    vocab_size: int
    batch_size: int
    global_batch_size: int | None = None
    num_workers: int
    seed: int
    cache_dir: Path
    verify: str
    equal_rows = False

    def __init__(self):
        super().__init__()
        self.data_name: str | None = None
        self.held_out_name: str | None = None
        self._loader: ResumableLoader | None = None
        self._samples = 0
        self._divided: Any = None  # the trainer whose batches add up to the global batch

    # The tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; loaded, or trained under a lock, at first use. A subclass whose ids do not come from text has None."""
        if self.tokenizer_name not in TRAINED:
            return load_tokenizer(self.tokenizer_name)
        source, inputs, documents = self._training_texts()
        inputs = {"kind": self.tokenizer_name, "vocab_size": self.vocab_size} | inputs

        def make(folder: Path) -> None:
            with Preparing(f"Training a {self.tokenizer_name} tokenizer on {source}") as progress:

                def texts():
                    for text, fraction in documents:
                        progress.update(size_of(text), fraction)
                        yield text

                train_tokenizer(self.tokenizer_name, texts(), self.vocab_size).save(folder / "tokenizer.json")

        folder = make_once(self.cache_dir / f"tokenizer-{fingerprint(inputs)}", make)
        try:
            return Tokenizer.from_file(folder / "tokenizer.json")
        except ValueError as error:
            raise damaged(folder / "tokenizer.json", "it is no tokenizer") from error

    def _training_texts(self) -> tuple[str, dict, Iterator[tuple[str, float]]]:
        """Text to train a tokenizer on: its name in progress messages, a JSON-able description of all that shapes it, and an
        iterator of (text, share of the source read so far)."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Actual size of the vocabulary: the rows that a model's embedding needs."""
        return len(self.tokenizer)

    # What there is to train with

    def summary(self) -> Summary:
        """{split: {name of a count: value}}, after setup: rows, tokens, labels, … (data/summary.py); empty: none to show."""
        return {}

    def summary_hints(self, longest: int | None) -> list[str]:
        """Advice that follows from the summary; `longest`: the most tokens that the model reads, None if not known."""
        return []

    # Loaders

    def val_dataloader(self):
        return self._evaluation("validation")

    def test_dataloader(self):
        return self._evaluation("test")

    def _evaluation(self, kind: str):
        """The loader of the "validation" or "test" set; a list of loaders if there are several sets, or none."""
        raise NotImplementedError

    def _opened(self, rows: Mapping[str, Rows], split: str) -> Rows:
        """The rows of a split, or the prompts, as opened by setup; UserError if setup has not opened them."""
        if split not in rows:
            stage = {"test": "test", "prompts": "predict"}.get(split, "fit")
            allowed = f"its loaders after prepare_data() and setup({stage!r})"
            raise UserError(f"{type(self).__name__} has not opened {split!r}", allowed)
        return rows[split]

    def _training_loader(self, dataset, lengths=None) -> ResumableLoader:
        trainer, parallel = self.trainer, self._parallel()
        if self.batch_size > (most := max(len(dataset), SMALL_BATCH)):
            raise SettingError("data.batch_size", self.batch_size, f"up to {most}, with {len(dataset)} training rows")
        num_samples = None
        if trainer and trainer.overfit_batches > 0:  # that many batches, always of the same rows
            wanted, global_batch = trainer.overfit_batches, self.batch_size * parallel["world_size"]
            wanted = max(1, int(wanted * (len(dataset) // global_batch))) if isinstance(wanted, float) else wanted
            num_samples = min(len(dataset), wanted * global_batch)
        self._loader = ResumableLoader(
            dataset,
            self.batch_size,
            num_samples=num_samples,
            seed=self.seed,
            accumulate=trainer.accumulate_grad_batches if trainer else 1,
            samples=self.state_dict()["samples"],
            lengths=lengths,
            **parallel,
        )
        if trainer:
            check_limit(trainer, trainer.accumulate_grad_batches, len(self._loader))
        return self._loader

    def _parallel(self) -> dict:
        # Lightning advises using workers, but for rows that take 25 µs each they were not measurably faster.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        ranks = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"num_replicas": 1, "rank": 0}
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return {
            "rank": ranks["rank"],
            "world_size": ranks["num_replicas"],
            "num_workers": self.num_workers,
            "pin_memory": on_gpu,
        }

    # Several processes

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step, over all devices and the micro-batches it accumulates."""
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        return self.batch_size * self._parallel()["world_size"] * accumulate

    def _divide_global_batch(self) -> None:
        """Sets how many micro-batches the trainer accumulates, before it counts steps; val_check_interval then counts steps."""
        trainer, rows = self.trainer, self.global_batch_size
        if trainer is None or rows is None or self._divided is trainer:
            return
        devices = self._parallel()["world_size"]
        check_global_batch(rows, self.batch_size, devices, trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = rows // (self.batch_size * devices)
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval *= trainer.accumulate_grad_batches
        self._divided = trainer

    def _compare_processes(self) -> None:
        """Raises ValueError if processes differ in data (including its files' modification times), tokenizer or seed."""
        if not torch.distributed.is_initialized():
            return
        tokenizer = None if self.tokenizer is None else self.tokenizer.sha256[:16]
        mine = {"data": self.data_name or self.held_out_name, "tokenizer": tokenizer, "seed": self.seed}
        everyones: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyones, mine)
        for name, first in everyones[0].items():
            for rank, theirs in enumerate(everyones):
                if theirs[name] != first:
                    raise SettingError(
                        "data.cache_dir",
                        str(self.cache_dir),
                        "the same prepared data on every node (share data.source and data.cache_dir between them, or "
                        "copy both with their times, as rsync -a does)",
                        more=f": process 0 has {name} {first}, process {rank} {theirs[name]}",
                    )

    # State: how many samples training has seen. The loader holds it as well, but Lightning does not always restore a
    # loader's state.

    def _start_anew(self) -> None:
        """To be called by setup for a fit; a checkpoint's state, if there is one, is loaded later."""
        self._loader, self._samples = None, 0
        self._divide_global_batch()
        if self.trainer is not None:
            check_limit(self.trainer, self.trainer.accumulate_grad_batches)

    def state_dict(self) -> dict:
        samples = self._loader.samples if self._loader is not None else self._samples
        names = {"tokens": self.data_name, "held_out": self.held_out_name}
        return {"samples": samples} | {key: name for key, name in names.items() if name}

    def load_state_dict(self, state: dict) -> None:
        self._samples = int(state["samples"])
        if self._loader is not None:
            self._loader.load_state_dict(state)
        mine = self.state_dict()
        for key in ("tokens", "held_out"):
            here = mine.get(key)
            if here and state.get(key, here) != here:
                differs = "order and text differ, and it may have trained on what is held out here"
                rank_zero_warn(f"the checkpoint saw other data ({state[key]}, now {here}): {differs}")
                break


def check_global_batch(rows: int, batch_size: int, devices: int, accumulate: int) -> None:
    """Raises ValueError if the rows of a step cannot be divided evenly into the devices' batches."""
    if accumulate != 1:
        raise SettingError(
            "trainer.accumulate_grad_batches",
            accumulate,
            "1, since that determines it",
            more=f" with data.global_batch_size = {rows}",
        )
    if rows % (batch_size * devices):
        raise SettingError(
            "data.global_batch_size",
            rows,
            f"a multiple of {batch_size * devices}, data.batch_size = {batch_size} × {devices} device{'s' * (devices > 1)}",
        )


def check_limit(trainer: Any, each: int, batches: int | None = None) -> None:
    """Raises ValueError if a pass would end with a step of fewer micro-batches than ``each``.

    Lightning would still divide that step's gradient by ``each``. batches: those of a whole pass, of which the limit may be a
    share; None: not known yet.
    """
    asked = limit = trainer.limit_train_batches
    more = ""
    if isinstance(asked, float) and batches is not None:
        limit = int(asked * batches)
        more = f", {limit} of {batches} batches"
    if isinstance(limit, int) and limit % each and not (trainer.fast_dev_run or trainer.overfit_batches):
        allowed = f"a multiple of {each}, as many batches as a step has"
        raise SettingError("trainer.limit_train_batches", asked, allowed, more=more)
