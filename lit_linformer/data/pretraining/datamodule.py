"""Pretraining data: from a source of text to batches of masked rows, as a LightningDataModule.

    data = PretrainingData(source="texts/", tokenizer="bpe", vocab_size=16384, max_length=512)
    data.prepare_data()                     # tokenizer and token files; done once, found again by fingerprint
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

Batches: input_ids (B, N), positions (B, M), labels (B, M) with -100 for no target, all int64; attention_mask (B, N)
bool only if a row has padding (the last row of a set).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from lit_linformer.data.cache import read_meta
from lit_linformer.data.checksums import verify
from lit_linformer.data.datamodule import STAGES, BatchSize, ResumableDataModule, RowLength, Verify, VocabularySize, Workers
from lit_linformer.data.loader import EvaluationLoader, ResumableLoader
from lit_linformer.data.notes import note
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.masking import VALIDATION_MASK_RATE, VALIDATION_SEED, MaskedBlocks, Masker
from lit_linformer.data.pretraining.prompts import encode_prompts, prompt_loader, read_prompts
from lit_linformer.data.pretraining.token_files import (
    FILES,
    LOOKED_AT,
    SPLITS,
    Holdout,
    TokenBlocks,
    least_fraction,
    make_token_files,
)
from lit_linformer.data.summary import Summary
from lit_linformer.data.tokenizer import check_vocab_size
from lit_linformer.model.ranges import Count, Range, Seed, check_ranges
from lit_linformer.utils.errors import SettingError, UserError


class PretrainingData(ResumableDataModule):
    """Text for masked language modelling: tokenised once, read in rows of max_length tokens, masked anew in each epoch.

    Args:
        source: The text: a file, a folder (with all below it) or a glob ("texts/**/*.txt") of plain text (documents are
            separated by blank lines), CSV, TSV or JSON lines (a document in each row), each also compressed (.gz .xz .zst), or
            Parquet; "hub:NAME:SPLIT" or "hub:NAME:CONFIG:SPLIT": a Hugging Face data set, by name or as a local folder;
            "embedded": the documentation that comes with Python (2 MB).
        validation_source: Text for validation; None: a share of source's documents, validation_fraction, is held out.
        test_source: Text for the test; None: a share of source's documents, test_fraction, is held out.
        validation_fraction: Share of source's documents, 0 to 1, held out for validation if validation_source is not
            given.
        test_fraction: Share of source's documents, 0 to 1, held out for the test if test_source is not given.
        column: Column or key that holds the text in tables (CSV, TSV, JSON lines, Parquet) and hub data sets.
        document_start: Regular expression for the first line (or row) of a document, matched at its start; blank lines then
            no longer separate documents. For WikiText: "^ = [^=]".
        tokenizer: "bpe" or "wordpiece": train byte-level BPE or lower-cased WordPiece on source; else a tokenizer.json,
            or a folder with one, with RoBERTa's vocab.json and merges.txt or with BERT's vocab.txt. None: that of
            model.pretrained.
        vocab_size: Size of the vocabulary of a tokenizer that is trained; a small corpus gives fewer tokens. On disk a token
            takes 2 bytes, or 4 with a vocabulary of more than 65,536.
        max_length: n, tokens in a row, the first of them bos. Changing it needs no new preparation. None: the n of
            model.pretrained.
        batch_size: Rows on each device in each micro-batch.
        global_batch_size: Rows of an optimiser step over all devices, which accumulate micro-batches as needed.
            trainer.val_check_interval then counts optimiser steps, and nothing changes with the number of devices. None:
            batch_size × devices × trainer.accumulate_grad_batches.
        mask_rate: Share of a row's tokens to predict in training; validation always has 0.15.
        whole_word: Mask whole words (runs of letters and digits) instead of single tokens in training. A word of more tokens
            than are masked in a row, such as a strand of DNA, is masked token by token.
        num_workers: Processes that load batches. 0 loads in the training process, which takes about 25 µs for a row of 512.
        seed: Seed of the order and the masks of training; which documents are held out does not depend on it.
        cache_dir: Folder for trained tokenizers and token files.
        verify: When to check the token files' checksums: "once", when a machine first reads them (a second for some 2 GB);
            "always"; "never".
        text: For predict: a text, or a list of them, with mask tokens to fill in.
        file: For predict: a file with one text on each line, or a table as for source. Texts without a mask, or with more
            than max_length tokens, are skipped.
    """

    equal_rows = True

    def __init__(
        self,
        source: str = "embedded",
        validation_source: str | None = None,
        test_source: str | None = None,
        validation_fraction: Annotated[float, Range(least=0, below=1)] = 0.01,
        test_fraction: Annotated[float, Range(least=0, below=1)] = 0.01,
        column: str = "text",
        document_start: str | None = None,
        tokenizer: str | None = "bpe",
        vocab_size: VocabularySize = 16384,
        max_length: RowLength | None = 512,
        batch_size: BatchSize = 32,
        global_batch_size: Count | None = None,
        mask_rate: Annotated[float, Range(above=0, below=1)] = 0.15,
        whole_word: bool = False,
        num_workers: Workers = 0,
        seed: Seed = 0,
        cache_dir: str = "data/cache",
        verify: Verify = "once",
        text: str | list[str] | None = None,
        file: str | None = None,
    ):
        check_ranges("data.", PretrainingData.__init__, locals())
        super().__init__()
        self.validation_fraction = 0.0 if validation_source else validation_fraction
        self.test_fraction = 0.0 if test_source else test_fraction
        self.tokenizer_name, self.vocab_size, self.max_length = tokenizer, vocab_size, max_length
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self.mask_rate, self.whole_word = mask_rate, whole_word
        self.num_workers, self.seed, self.cache_dir = num_workers, seed, Path(cache_dir)
        self.verify, self.text, self.file, self.column = verify, text, file, column
        if self.validation_fraction + self.test_fraction >= 1:
            fractions = f"{self.validation_fraction} + {self.test_fraction}"
            raise UserError(f"data.validation_fraction + data.test_fraction is {fractions}", "less than 1 in all")
        if max_length is None:
            raise SettingError("data.max_length", None, "a number of tokens, or null with model.pretrained")
        if tokenizer is None:
            raise SettingError("data.tokenizer", None, "bpe, wordpiece, a file or a folder, or null with model.pretrained")
        check_vocab_size(tokenizer, vocab_size)

        sources = {"train": source, "validation": validation_source, "test": test_source}
        names = {"train": "data.source", "validation": "data.validation_source", "test": "data.test_source"}
        self.corpora = {s: Corpus(v, column, document_start, names[s]) for s, v in sources.items() if v is not None}
        self.holdout = Holdout(self.validation_fraction, self.test_fraction)
        self.blocks: dict[str, TokenBlocks] = {}
        self.folder: Path | None = None

    # The tokenizer

    def _training_texts(self) -> tuple[str, dict, Iterator[tuple[str, float]]]:
        self._check_held_out()  # before the tokenizer, which `fit` needs first and which may take long
        corpus = self.corpora["train"]
        # it learns from training documents only
        inputs = {"source": corpus.stamp(), "holdout": [self.holdout.validation, self.holdout.test]}
        return corpus.source, inputs, ((document, corpus.fraction) for document in self.holdout.training(corpus))

    @property
    def mask_id(self) -> int:
        return self.tokenizer.mask_id

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    # Preparation

    def prepare_data(self) -> None:
        trainer = self.trainer
        if trainer is not None and trainer.state.fn == "predict":
            return  # the tokenizer is made when it is first used
        if trainer is None or trainer.state.fn == "fit":
            self._check_held_out()
            for told in filter(None, (corpus.files_read() for corpus in self.corpora.values())):
                note(told)
        self._make_token_files()
        # only the files that are read; `prepare` checks all
        splits = SPLITS if trainer is None else STAGES.get(trainer.state.fn, SPLITS)
        verify(self.folder, [FILES[split] for split in splits], self.verify)
        if trainer is None:  # `prepare`: find out now whether training could start
            for split in STAGES["fit"]:
                self._open(split)

    def _check_held_out(self) -> None:
        """Raises ValueError if a file of validation or test is trained on, too."""
        allowed = "text that is not trained on, or null, for a share of data.source"
        for split, corpus in self.corpora.items():
            if split != "train" and not corpus.local and corpus.source == self.corpora["train"].source:
                raise SettingError(corpus.setting, corpus.source, allowed, more=", and so is data.source")
        files = {split: corpus.files() for split, corpus in self.corpora.items() if corpus.local}
        trained = {path.resolve() for path in files.pop("train", [])}
        for split, paths in files.items():
            if both := [path for path in paths if path.resolve() in trained]:
                corpus = self.corpora[split]
                raise SettingError(corpus.setting, corpus.source, allowed, more=f", and data.source reads {both[0]}, too")

    def _make_token_files(self) -> None:
        self.folder = make_token_files(self.cache_dir, self.corpora, self.holdout, self.tokenizer)
        self.data_name = self.folder.name

    def setup(self, stage: str | None = None) -> None:
        if stage == "predict":
            self.prompts = encode_prompts(read_prompts(self.text, self.file, self.column), self.tokenizer, self.max_length)
            return
        if stage in ("fit", None):
            self._start_anew()
        self._make_token_files()
        for split in STAGES[stage] if stage else STAGES["fit"]:
            self.blocks[split] = self._open(split)
            if stage in ("validate", "test") and not len(self.blocks[split]):
                raise SettingError(
                    f"data.{split}_fraction", 0, f"more, or data.{split}_source", when=f"with {getattr(stage, 'value', stage)}"
                )
        self._compare_processes()

    def _blocks(self, split: str, length: int) -> TokenBlocks:
        return TokenBlocks(self.folder, split, length, self.tokenizer.bos_id, self.tokenizer.pad_id)

    def _open(self, split: str) -> TokenBlocks:
        blocks = self._blocks(split, self.max_length)
        counts = read_meta(self.folder)["splits"]
        documents = sum(count["documents"] for count in counts.values())
        if split == "train" and not counts["train"]["documents"]:
            more = ", which holds nothing to train with" if documents != 1 else ", which is one document, and that is held out"
            allowed = "several documents: lines between blank ones, or as data.document_start begins them"
            raise SettingError("data.source", self.corpora["train"].source, allowed, more=more)
        if split == "train" and blocks.full == 0:
            raise SettingError(
                "data.max_length",
                self.max_length,
                f"up to the training text's {counts['train']['tokens']} tokens (of {counts['train']['documents']} "
                "documents), for one full row",
            )
        fraction = getattr(self, f"{split}_fraction", 0.0)
        if fraction > 0 and len(blocks) == 0:
            least = least_fraction(documents, self.validation_fraction if split == "test" else 0.0)
            enough = f"{least:g} or more" if least else "more"
            raise SettingError(
                f"data.{split}_fraction",
                fraction,
                f"{enough}, or data.{split}_source (or data.document_start, if there should be more documents)",
                more=f", which holds out none of {documents} documents",
            )
        return blocks

    def summary(self) -> Summary:
        counts = read_meta(self.folder)["splits"] if self.folder else {}
        return {
            split: {
                "documents": count["documents"],
                "tokens": count["tokens"],
                "rows": -(-count["tokens"] // (self.max_length - 1)),
                "row_length": self.max_length,
            }
            for split, count in counts.items()
            if count["tokens"]
        }

    def summary_hints(self, longest: int | None) -> list[str]:
        """Advice if no document is as long as a row, since a long row then has no long-range context."""
        if "train" not in self.blocks:
            return []
        blocks, n = self.blocks["train"], self.max_length
        if (tokens := blocks.longest_document(self.tokenizer.eos_id)) >= n:
            return []
        of = " of the first 4 M tokens" if blocks.tokens > LOOKED_AT else ""
        return [f"the longest document{of} has {tokens:,} of a row's {n:,} tokens: each row joins several"]

    # Loaders

    def train_dataloader(self) -> ResumableLoader:
        masker = self._masker(self.mask_rate, self.seed, self.whole_word)
        return self._training_loader(MaskedBlocks(self._opened(self.blocks, "train"), masker))

    def predict_dataloader(self):
        return prompt_loader(self._opened(vars(self), "prompts"), self.tokenizer, self.batch_size)

    def evaluation_loader(self, split: str, max_length: int, batch_size: int | None = None) -> EvaluationLoader:
        """A held-out set in rows of another length: the batches of `validate --data.max_length`, loaded in this process.

        split: "validation" or "test" (or "train"), as opened by setup; batch_size: rows in a batch on each rank, None:
        data.batch_size.
        """
        # No workers: a loader that lives for one pass would only start and stop them.
        return self._held_out(self._blocks(split, max_length), batch_size or self.batch_size, num_workers=0)

    def _evaluation(self, kind: str):
        blocks = self._opened(self.blocks, kind)
        return self._held_out(blocks, self.batch_size) if len(blocks) else []

    def _held_out(self, blocks: TokenBlocks, batch_size: int, **parallel: int) -> EvaluationLoader:
        dataset = MaskedBlocks(blocks, self._masker(VALIDATION_MASK_RATE, VALIDATION_SEED))
        return EvaluationLoader(dataset, batch_size, **{**self._parallel(), **parallel})

    def _masker(self, mask_rate: float, seed: int, whole_word: bool = False) -> Masker:
        tokenizer = self.tokenizer
        tables = tokenizer.word_tables() if whole_word else None
        return Masker(len(tokenizer), tokenizer.special_ids, tokenizer.mask_id, mask_rate, seed, tables)
