"""Long Range Arena's tasks (Tay et al., 2021) as data: long rows of few different symbols, each with a class.

    data = LongRangeData(task="listops", max_length=2048)
    data.prepare_data()                     # generated, or read, once; found again by fingerprint
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

Batches as FineTuningData's: input_ids, attention_mask, labels, index; with ``masked`` as PretrainingData's. With ``patch``
input_ids are (B, N, patch²) float32.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from lit_linformer.data.checksums import verify
from lit_linformer.data.datamodule import STAGES, BatchSize, ResumableDataModule, RowLength, Verify, Workers
from lit_linformer.data.finetuning.encoded_texts import EncodedTexts
from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.finetuning.splits import select_rows
from lit_linformer.data.finetuning.summary import of_rows
from lit_linformer.data.loader import EvaluationLoader, ResumableLoader
from lit_linformer.data.longrange.sources import BENCHMARK, FROM_FILES, TASKS, FileSource, GeneratedSource, TextSource
from lit_linformer.data.pretraining.masking import VALIDATION_MASK_RATE, VALIDATION_SEED, MaskedBlocks, Masker
from lit_linformer.data.pretraining.token_files import SPLITS
from lit_linformer.data.progress_bar import Preparing
from lit_linformer.data.row_files import CLASSES, FILES, Encoded, RowFiles, make_row_files, name_of, row_hash
from lit_linformer.data.summary import Summary
from lit_linformer.model.ranges import Count, Natural, OneOf, Range, Seed, check_ranges
from lit_linformer.utils.errors import SettingError, UserError

PAD, BOS, EOS, MASK = range(4)
SPECIAL = 4


class Patches(Dataset):
    """Batches of images whose tokens are squares of p × p pixels, row by row: input_ids (B, w²/p², p²), from 0 to 1.

    rows: a data set of batches whose input_ids are (B, w² + 2): bos, pixels row by row, eos; filler rows may be shorter.
    """

    def __init__(self, rows: Dataset, pixels: int, patch: int):
        self.rows, self.side, self.patch = rows, math.isqrt(pixels), patch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, Tensor]:
        batch = self.rows[keys]
        batch.pop("attention_mask", None)  # only filler rows have padding
        pixels = batch["input_ids"][:, 1:-1]
        pixels = functional.pad(pixels, (0, self.side**2 - pixels.shape[1]), value=SPECIAL)
        across = self.side // self.patch
        squares = pixels.unflatten(1, (across, self.patch, across, self.patch)).transpose(2, 3)  # (B, w/p, w/p, p, p)
        return batch | {"input_ids": ((squares - SPECIAL) / 255).reshape(len(pixels), across**2, self.patch**2)}


class LongRangeData(ResumableDataModule):
    """ListOps, byte-level text, retrieval, images and Pathfinder, to classify, or to pretrain on with masks.

    Rows are bos, symbols, eos; in retrieval bos, text, eos, eos, text, eos. The vocabulary is pad, bos, eos and mask,
    followed by the task's symbols (ListOps' 15, bytes, shades of gray).

    Args:
        task: listops, text (IMDB, byte by byte), retrieval (pairs of papers), image (CIFAR-10's gray pixels) or pathfinder.
        source: A folder with the task's files in their authors' layout; for text, whatever FineTuningData reads as IMDB. None:
            listops and pathfinder are generated, text comes from the Hugging Face hub.
        masked: true: rows are masked, for MLM on the task's own inputs ("self-pretraining", Amos et al., 2023); false: they
            are classified.
        mask_rate: Share of a row's symbols to predict in training, with masked; validation always has 0.15.
        max_length: n, the largest number of tokens in a row, bos and eos included. None: 2,048; on the command line, the
            encoder's.
        patch: Side p of the squares of pixels that are the tokens of an image, each p² numbers from 0 to 1 (Dosovitskiy et
            al., 2020), without bos and eos; model.encoder.input_size must be p². 0: each pixel is a token, its shade the id.
        cut: Cut rows of more than max_length tokens (the benchmark cuts text at 4,096, each text of retrieval at 4,000);
            false: refuse them.
        rows: Training rows to generate; None: as many as in the benchmark, 96,000 for ListOps and 160,000 for Pathfinder.
        held_out_rows: Rows to generate for validation, and as many for the test; None: as many as in the benchmark, 2,000 for
            ListOps and 20,000 for Pathfinder.
        level: Of generated rows; the benchmark's is hard. Pathfinder: easy, intermediate or hard, with lines of 6, 9 and 14
            dashes. For a model to begin with: lines of 2 or 3 dashes, and 3 or 5 for ListOps, expressions of up to 3 levels and
            6 to 59 tokens, or 5 and 61 to 249 (hard: 10 and 501 to 1,999).
        validation_fraction: Share of the training rows to hold out if the files have no validation split.
        batch_size: Rows on each device in each micro-batch; training puts rows of about the same length together.
        global_batch_size: Rows of an optimiser step over all devices, which accumulate micro-batches as needed. None:
            batch_size × devices × trainer.accumulate_grad_batches.
        eval_batch_size: Largest number of rows in a batch of validation and test; None: batch_size.
        num_workers: Processes that load batches. 0 loads in the training process.
        seed: Seed of the order and the masks of training. Generated rows do not depend on it.
        cache_dir: Folder for the prepared rows.
        verify: When to check their checksums: "once", when a machine first reads them; "always"; "never".
    """

    tokenizer = None  # the data are symbols, not text
    mask_id, pad_id = MASK, PAD

    def __init__(
        self,
        task: Annotated[str, OneOf(TASKS)] = "listops",
        source: str | None = None,
        masked: bool = False,
        mask_rate: Annotated[float, Range(above=0, below=1)] = 0.15,
        max_length: RowLength | None = None,
        patch: Natural = 0,
        cut: bool = True,
        rows: Count | None = None,
        held_out_rows: Count | None = None,
        level: str = BENCHMARK,
        validation_fraction: Annotated[float, Range(above=0, below=1)] = 0.1,
        batch_size: BatchSize = 32,
        global_batch_size: Count | None = None,
        eval_batch_size: BatchSize | None = None,
        num_workers: Workers = 0,
        seed: Seed = 0,
        cache_dir: str = "data/cache",
        verify: Verify = "once",
    ):
        check_ranges("data.", LongRangeData.__init__, locals())
        super().__init__()
        self.task, self.masked, self.mask_rate, self.cut = TASKS[task], masked, mask_rate, cut
        self.patch, self.max_length = patch, 2048 if max_length is None else max_length
        if patch:
            self._check_patch()
        self.validation_fraction = validation_fraction
        self.batch_size, self.eval_batch_size = batch_size, batch_size if eval_batch_size is None else eval_batch_size
        self.global_batch_size, self.num_workers, self.seed = global_batch_size, num_workers, seed
        self.cache_dir, self.verify = Path(cache_dir), verify
        self.text_task = self.task.text_task
        self.source = self._source(source, rows, held_out_rows, level)
        longest = self.task.pixels + 2 if patch else self.max_length
        self.layout = RowLayout(BOS, EOS, PAD, longest, pair=self.task.texts == 2)
        self.sets: dict[str, EncodedTexts] = {}

    def _source(self, source: str | None, rows: int | None, held_out: int | None, level: str):
        name, benchmark = self.task.name, self.task.rows
        for setting, value in (("rows", rows), ("held_out_rows", held_out), ("level", None if level == BENCHMARK else level)):
            if value is not None and (source is not None or benchmark is None):
                raise SettingError(f"data.{setting}", value, "none", when="with rows that are read from files")
        if name == "text":
            return TextSource(source or "hub:stanfordnlp/imdb:plain_text", self.cache_dir)
        if source is not None:
            if name not in FROM_FILES:
                raise SettingError("data.source", source, "none, since its rows are generated", when=f"with data.task {name}")
            return FileSource(name, source)
        if benchmark is None:
            raise UserError("data.source is not given", f"a folder with {FROM_FILES[name][0]}")
        counts = (rows or benchmark[0], held_out or benchmark[1], held_out or benchmark[2])
        return GeneratedSource(name, dict(zip(SPLITS, counts, strict=True)), level)

    def _check_patch(self) -> None:
        side = math.isqrt(self.task.pixels)
        if not side or self.masked:
            when = f"with data.task {self.task.name}" if not side else "with data.masked true"
            raise SettingError("data.patch", self.patch, "0", when=when)
        if side % self.patch:
            raise SettingError("data.patch", self.patch, f"a divisor of {side}, the side of the images")
        if self.max_length < self.image_tokens:
            tokens = f"{self.image_tokens} or more, the patches of an image"
            raise SettingError("data.max_length", self.max_length, tokens, when=f"with data.patch {self.patch}")

    # What the model needs

    @property
    def input_size(self) -> int:
        """Numbers in a token; 0: tokens are ids."""
        return self.patch**2

    @property
    def num_tokens(self) -> int:
        return SPECIAL + self.task.symbols

    @property
    def image_tokens(self) -> int:
        """Tokens of a row that is an image, with bos and eos if tokens are pixels; 0: rows are not images."""
        if self.patch:
            return self.task.pixels // self.patch**2
        return self.task.pixels + 2 if self.task.pixels else 0

    @property
    def num_labels(self) -> int:
        return len(self.task.labels)

    @property
    def equal_rows(self) -> bool:
        return bool(self.image_tokens)

    metrics, evaluation_names = ("accuracy",), ("",)

    def summary(self) -> Summary:
        found = of_rows(self.sets, self.text_task)
        for told in found.values() if self.patch else ():
            told |= {"tokens": told["rows"] * self.image_tokens, "max_length": self.image_tokens}
        return found

    # Preparation

    def prepare_data(self) -> None:
        stage = self.trainer and self.trainer.state.fn
        wanted = dict.fromkeys((*STAGES["fit"], *self.source.splits())) if stage in (None, "fit") else STAGES[stage]
        for split in map(self._stored, wanted):
            verify(self._folder(split), FILES, self.verify)

    def _stored(self, split: str) -> str:
        """The split of the files that holds the rows of ``split``: train, if validation rows are held out of it."""
        return "train" if split == "validation" and split not in self.source.splits() else split

    def _folder(self, split: str) -> Path:
        if split not in self.source.splits():
            raise self.source.missing(split)
        inputs = {"task": self.task.name, "split": split, "source": self.source.stamp(split)}

        def rows(shown: Preparing) -> Iterator[Encoded]:
            any_row = False
            for symbols, label in self.source.rows(split):
                any_row = True
                shown.update(sum(map(len, symbols)), self.source.fraction)
                hashed = row_hash(b"|".join(one.tobytes() for one in symbols))
                yield [SPECIAL + one.astype(np.uint16) for one in symbols], label, hashed
            if not any_row:
                raise UserError(f"data.source has no rows in its {split} split", "one or more")

        title = f"Rows of {self.task.name}, {split}"
        return make_row_files(self.cache_dir, inputs, rows, title, self.task.texts, CLASSES, self.num_tokens)

    def setup(self, stage: str | None = None) -> None:
        if stage == "predict":
            allowed = "PretrainingData or FineTuningData; validate and test write predictions.jsonl of these rows"
            raise UserError("data is LongRangeData", allowed, when="with predict")
        if stage in ("fit", None):
            self._start_anew()
        self.sets = {split: self._set(split) for split in STAGES[stage or "fit"]}
        self._compare_processes()

    def _set(self, split: str) -> EncodedTexts:
        held_out = self._stored("validation") == "train"
        files = RowFiles(self._folder(self._stored(split)), CLASSES)
        rows = np.arange(files.rows)
        if held_out and split != "test":
            chosen = select_rows(files.hashes, self.validation_fraction)
            rows = chosen.train if split == "train" else chosen.held_out
            self.held_out_name = name_of(files.folder, chosen.held_out)
        if split == "train":
            self.data_name = name_of(files.folder, rows) if held_out else files.folder.name
        beside = self.max_length - self.layout.capacity  # bos and eos
        longest = beside + int(files.lengths[rows].sum(1).max())
        if not self.cut and longest > self.max_length:
            raise SettingError(
                "data.max_length",
                self.max_length,
                f"{longest} or more, the {split} split's longest row",
                when="with data.cut false",
            )
        return EncodedTexts(files, self.layout, rows, by_length=split != "train")

    # Loaders

    def train_dataloader(self) -> ResumableLoader:
        rows = self._opened(self.sets, "train")
        return self._training_loader(self._batches(rows, self.mask_rate, self.seed), rows.lengths)

    def _evaluation(self, kind: str) -> EvaluationLoader:
        rows = self._opened(self.sets, kind)
        batches = self._batches(rows, VALIDATION_MASK_RATE, VALIDATION_SEED)
        return EvaluationLoader(batches, self.eval_batch_size, lengths=rows.lengths, **self._parallel())

    def _batches(self, rows: EncodedTexts, mask_rate: float, seed: int) -> Dataset:
        if self.patch:
            return Patches(rows, self.task.pixels, self.patch)
        if not self.masked:
            return rows
        return MaskedBlocks(rows, Masker(self.num_tokens, range(SPECIAL), MASK, mask_rate, seed))
