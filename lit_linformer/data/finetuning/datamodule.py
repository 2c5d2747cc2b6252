"""Fine-tuning data: from labelled texts, or pairs of texts, to batches, as a LightningDataModule.

    data = FineTuningData(task="SST-2", source="glue/", tokenizer="runs/linformer/tokenizer.json", max_length=512)
    data.prepare_data()                     # tokenised once, found again by fingerprint
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

Shapes: B rows of the data set, R rows of tokens (B, or more with data.max_windows > 1), L tokens of the longest one, C classes.
Batches: input_ids (R, L) int64; attention_mask (R, L) bool only if a row has padding; labels (B,) int64, float32 for a
regression, or (B, C) float32 where a row may have several, unless the split has none; index (B,) int64, the row's number in
its file, -1 for a filler row; document (R,) int64, only with data.max_windows > 1; for predict also texts, a list of B strings
or pairs.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from lit_linformer.data.checksums import verify
from lit_linformer.data.datamodule import BatchSize, ResumableDataModule, RowLength, Verify, VocabularySize, Workers
from lit_linformer.data.finetuning.encoded_texts import EncodedTexts, encoded_files, inputs_of, stored_labels
from lit_linformer.data.finetuning.labelled_rows import EMPTY_TEXTS, SOURCES, LabelledSource
from lit_linformer.data.finetuning.prompts import read_texts, text_loader
from lit_linformer.data.finetuning.row_layout import TRUNCATIONS, RowLayout
from lit_linformer.data.finetuning.splits import Splits, select_rows
from lit_linformer.data.finetuning.summary import class_hint, cut_hint, leaked_hint, missing_hints, of_rows
from lit_linformer.data.finetuning.text_tasks import chosen_task
from lit_linformer.data.loader import EvaluationLoader, ResumableLoader
from lit_linformer.data.row_files import FILES, RowFiles, name_of, row_folder
from lit_linformer.data.summary import Summary
from lit_linformer.data.tokenizer import check_vocab_size
from lit_linformer.model.ranges import Count, Natural, OneOf, Range, Seed, check_ranges
from lit_linformer.utils.errors import SettingError, UserError


class FineTuningData(ResumableDataModule):
    """Labelled texts for classification or regression: GLUE, IMDB or a task of your own.

    Args:
        task: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI or IMDB; none: columns and labels describe your own task.
        source: The rows: a table (.csv, .tsv as GLUE's, .jsonl, each also .gz .xz .zst, or .parquet), of which
            validation_fraction is held out (`test` reads all of it); or a folder with train, validation (or dev) and test,
            each a table or a folder of texts for each class, there or in a subfolder named like the task; "hub:NAME" or
            "hub:NAME:CONFIG": a Hugging Face data set, by name or as a local folder in the hub's layout. None: the task's
            data set on the hub.
        columns: For your own task: the column of texts, or the two columns of pairs.
        label_column: For your own task: the column of labels.
        labels: For your own task: names of the classes, in the order of their numbers, from 0; rows hold a name or a number.
            None: regression.
        label_separator: For your own task, whose rows may have several labels, or none: what separates them in a table's cell,
            as in sport|politics; JSON lines and Parquet may hold lists. None: a row has one label.
        metrics: For your own task: accuracy, f1 (that of the second of two classes), macro_f1 (the mean over classes),
            matthews (none given: accuracy); for regression pearson, spearman (none given: both); for several labels micro_f1
            (none given), macro_f1 and accuracy, the share of rows whose labels are all right.
        validation_fraction: Share of the training rows, 0 to 1, to hold out where source has no validation split; always
            the same rows. None: 0.1 for IMDB and your own task; GLUE's tasks need the split.
        drop_leaked: Drop training rows whose texts are also in validation or test.
        tokenizer: "bpe" or "wordpiece": train one on the training texts; else a tokenizer.json, a checkpoint that carries
            one, or a folder with tokenizer.json, RoBERTa's vocab.json and merges.txt or BERT's vocab.txt. On the command
            line model.pretrained provides it.
        vocab_size: Size of the vocabulary of a tokenizer that is trained.
        max_length: Largest number of tokens in a row, bos and eos included. None: 512; on the command line, the encoder's.
            Changing it needs no new preparation.
        truncation: How pairs that are too long are cut: longest_first (the longer text until both fit), only_first or
            only_second. A single text is cut at its end.
        max_windows: Largest number of overlapping rows ("windows") in which a text longer than max_length is read; the model
            averages their logits. 1: it is cut. Not for pairs.
        window_overlap: Tokens that consecutive windows share.
        batch_size: Rows on each device in each micro-batch; training puts rows of about the same length together.
        global_batch_size: Rows of an optimiser step over all devices, which accumulate micro-batches as needed.
            trainer.val_check_interval then counts optimiser steps, and nothing changes with the number of devices. None:
            batch_size × devices × trainer.accumulate_grad_batches.
        eval_batch_size: Largest number of rows in a batch of validation, test and predict; batches are smaller where more than
            5 % would be padding. None: batch_size.
        limit_train: Use only this many training rows, always the same ones; None: all.
        empty_texts: "error" refuses rows with an empty text, "keep" accepts them.
        num_workers: Processes that load batches. 0 loads in the training process.
        seed: Seed of the order of training; neither the held-out rows nor those of limit_train depend on it.
        cache_dir: Folder for trained tokenizers and tokenised rows.
        verify: When to check the checksums of tokenised rows: "once", when a machine first reads them (a second for some
            2 GB); "always"; "never".
        text: For predict: a text, or a list of them.
        text_pair: For predict, with a task on pairs: the second text, or a list of them.
        file: For predict: a file with one text on each line, or the two texts of a pair separated by a tab; or a table as for
            source, whose labels, if they are the task's, are shown beside the predictions.
    """

    def __init__(
        self,
        task: str | None = None,
        source: str | None = None,
        columns: list[str] | None = None,
        label_column: str = "label",
        labels: list[str] | None = None,
        label_separator: str | None = None,
        metrics: list[str] | None = None,
        validation_fraction: Annotated[float, Range(least=0, below=1)] | None = None,
        drop_leaked: bool = False,
        tokenizer: str | None = None,
        vocab_size: VocabularySize = 8192,
        max_length: RowLength | None = None,
        truncation: Annotated[str, OneOf(TRUNCATIONS)] = "longest_first",
        max_windows: Annotated[int, Range(least=1, largest=10000)] = 1,
        window_overlap: Natural = 32,
        batch_size: BatchSize = 32,
        global_batch_size: Count | None = None,
        eval_batch_size: BatchSize | None = None,
        limit_train: Count | None = None,
        empty_texts: Annotated[str, OneOf(EMPTY_TEXTS)] = "error",
        num_workers: Workers = 0,
        seed: Seed = 0,
        cache_dir: str = "data/cache",
        verify: Verify = "once",
        text: str | list[str] | None = None,
        text_pair: str | list[str] | None = None,
        file: str | None = None,
    ):
        check_ranges("data.", FineTuningData.__init__, locals())
        super().__init__()
        self.text_task = chosen_task(task, columns, label_column, labels, metrics, source, label_separator)
        if source is None:
            if self.text_task.hub is None:
                raise UserError("data.source is not given", SOURCES)
            source = "hub:" + ":".join(self.text_task.hub)
        self.source = LabelledSource(source, self.text_task, empty_texts, Path(cache_dir))
        self.empty_texts = empty_texts
        self.splits = Splits(self.source, validation_fraction, drop_leaked, limit_train)
        self.vocab_size, self.max_length = vocab_size, 512 if max_length is None else max_length
        self.truncation, self.max_windows, self.window_overlap = truncation, max_windows, window_overlap
        self.batch_size, self.eval_batch_size = batch_size, batch_size if eval_batch_size is None else eval_batch_size
        self.global_batch_size, self.num_workers, self.seed = global_batch_size, num_workers, seed
        self.cache_dir, self.verify, self.text, self.text_pair, self.file = Path(cache_dir), verify, text, text_pair, file
        if tokenizer is None:
            raise UserError(
                "data.tokenizer is not given",
                "bpe, wordpiece, a tokenizer.json, a folder or a checkpoint with one (on the command line, "
                "model.pretrained carries one over)",
            )
        self.tokenizer_name = tokenizer
        check_vocab_size(tokenizer, vocab_size)
        self._layout(0, 0, 0)  # checks its settings
        self.sets: dict[str, EncodedTexts] = {}
        self._trained_name: str | None = None  # for `test` of a table: data_name of a fit on it

    def _layout(self, bos_id: int, eos_id: int, pad_id: int) -> RowLayout:
        pair = len(self.text_task.columns) == 2
        windows = (self.truncation, self.max_windows, self.window_overlap)
        return RowLayout(bos_id, eos_id, pad_id, self.max_length, pair, *windows)

    @property
    def layout(self) -> RowLayout:
        return self._layout(self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id)

    # What the model needs

    @property
    def num_labels(self) -> int:
        """Number of classes; 1 for regression."""
        return len(self.text_task.labels) if self.text_task.labels else 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.text_task.metrics

    @property
    def evaluation_names(self) -> tuple[str, ...]:
        """Names of the evaluation sets: ("",), or MNLI's two."""
        return self.text_task.evaluation

    def _training_texts(self) -> tuple[str, dict, Iterator[tuple[str, float]]]:
        return self.source.source, self.splits.stamp(), self.splits.training_texts()

    def prepare_data(self) -> None:
        stage = self.trainer and self.trainer.state.fn
        if stage == "predict":
            return
        for split in self.splits.needed(stage) if stage else self.source.splits():
            verify(self._folder(split), FILES, self.verify)
        if stage is None:  # `prepare`: find out now whether training could start
            self.sets = self._training_sets()

    def _folder(self, split: str) -> Path:
        if self.source.find(split) is None:
            raise self.source.missing(split)
        return encoded_files(self.cache_dir, self.source, split, self.tokenizer)

    def _files(self, split: str) -> RowFiles:
        return RowFiles(self._folder(split), stored_labels(self.text_task))

    def setup(self, stage: str | None = None) -> None:
        if stage == "predict":
            self.prompts = read_texts(self.text, self.text_pair, self.file, self.text_task, self.empty_texts)
            return
        if stage in ("fit", None):
            self._start_anew()
            self.sets = self._training_sets()
        elif stage == "validate":
            self.sets = self._validation_sets()
        else:
            self.sets = {split: self._set(split, self._files(split), by_length=True) for split in self.splits.needed("test")}
            if self.source.is_table:
                (tested,) = self.sets.values()
                folder = row_folder(self.cache_dir, inputs_of(self.source, "train", self.tokenizer))
                with contextlib.suppress(ValueError):  # too few rows to be split: trained on others
                    self._trained_name = name_of(folder, self.splits.select(lambda split: tested.files.hashes).train)
            for split, rows in self.sets.items():
                if not rows.labelled and not self.text_task.unlabelled_test:
                    raise SettingError(
                        "data.source",
                        self.source.source,
                        "one with labels (`predict` with data.file classifies texts without)",
                        more=f", whose {split} split has no labels",
                    )
        self._compare_processes()

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        if self._trained_name is not None and state.get("tokens") == self._trained_name:
            allowed = "a table of other rows, or `validate`, which scores the held-out ones"
            source = self.source.source
            raise SettingError("data.source", source, allowed, more=", which the model was trained on", when="with test")

    def _training_sets(self) -> dict[str, EncodedTexts]:
        files = {split: self._files(split) for split in self.splits.needed("fit")}
        selection = self.splits.select(lambda split: files[split].hashes)
        if self.splits.drop_leaked:
            rank_zero_only(print)(f"{selection.leaked} training rows dropped: their texts are in validation or test too")
        self.data_name = name_of(files["train"].folder, selection.train)
        return {"train": self._set("train", files["train"], selection.train)} | self._validation_sets()

    def _validation_sets(self) -> dict[str, EncodedTexts]:
        validation, fraction = self.splits.validation()
        if validation:
            return {split: self._set(split, self._files(split), by_length=True) for split in validation}
        if fraction == 0:
            if self.trainer is not None and self.trainer.state.fn == "validate":
                raise SettingError("data.validation_fraction", 0, "more than 0", when="with validate")
            return {}
        files = self._files("train")
        held_out = select_rows(files.hashes, fraction).held_out
        self.held_out_name = name_of(files.folder, held_out)
        return {"validation": self._set("train", files, held_out, by_length=True)}

    def _set(self, split: str, files: RowFiles, rows: np.ndarray | None = None, by_length: bool = False) -> EncodedTexts:
        rows = np.arange(files.rows) if rows is None else rows
        if (bad := self.layout.too_long(files.lengths[rows])) is not None:
            raise SettingError(
                "data.truncation",
                self.truncation,
                f"one that leaves room in data.max_length = {self.max_length}, or longest_first, which cuts both",
                more=f", and row {rows[bad]} (from 0) of the {split} split is too long",
            )
        return EncodedTexts(files, self.layout, rows, by_length)

    def summary(self) -> Summary:
        return of_rows(self.sets, self.text_task)

    def summary_hints(self, longest: int | None) -> list[str]:
        summary = self.summary()
        labels = [*missing_hints(summary), class_hint(self.sets, self.text_task)]
        hints = [cut_hint(self.sets, summary, longest), *labels, leaked_hint(self.sets)]
        if summary.keys() == {"train"}:
            hints.append("data.validation_fraction is 0: no validation, so no scores, no best checkpoint, no early stopping")
        return [hint for hint in hints if hint]

    def evaluated_texts(self, split: str) -> Iterator[tuple[int, dict, tuple[str, ...]]]:
        """(number, place, texts) of the rows of one of the `sets`, ordered by number, which is the `index` in its batches.

        place: where the row is, {"line": 3} or {"row": 3}, with "file" if there are several files. The source is read again.
        """
        stored = split if self.source.find(split) is not None else "train"  # held out of the training rows
        wanted, several = set(self.sets[split].rows.tolist()), len(self.source.find(stored).files) > 1
        for number, ((file, unit, at), texts, _) in enumerate(self.source.texts(stored)):
            if number in wanted:
                yield number, ({"file": str(file)} if several else {}) | {unit: at}, texts

    # Loaders

    def train_dataloader(self) -> ResumableLoader:
        rows = self._opened(self.sets, "train")
        return self._training_loader(rows, rows.lengths)

    def predict_dataloader(self):
        prompts = self._opened(vars(self), "prompts")
        return text_loader(prompts, self.tokenizer, self.layout, self.text_task, self.eval_batch_size)

    def _evaluation(self, kind: str):
        sets = [self.sets[split] for split in self.text_task.splits(kind) if split in self.sets]
        if not sets and (kind == "test" or self.splits.validation() != ([], 0)):  # no validation is asked for
            self._opened(self.sets, kind)
        loaders = [EvaluationLoader(rows, self.eval_batch_size, lengths=rows.lengths, **self._parallel()) for rows in sets]
        return loaders[0] if len(loaders) == 1 else loaders
