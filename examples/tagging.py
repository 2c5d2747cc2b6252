"""A label for each word, by a trained encoder with a head of your own: names in texts, parts of speech, sites in a genome.

    python run.py fit --config conf/quickstart.yaml --name tagging --model examples.tagging.Tagging \
      --model.pretrained models/small --model.encoder null --data examples.tagging.TaggedWords --data.source tagged/

tagged/ holds train.jsonl and validation.jsonl, with lines such as {"words": ["in", "Oslo"], "tags": ["-", "place"]}.
`predict` with `--data.new FILE` tags the words of another file, whose lines need no tags.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from lit_linformer.data.loader import FILLER, EvaluationLoader, ResumableLoader
from lit_linformer.data.tokenizer import load_tokenizer
from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.model.heads import IGNORED
from lit_linformer.tasks.base import TrainingModule


class Tagger(nn.Module):
    def __init__(self, config: EncoderConfig, num_labels: int):
        super().__init__()
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.hidden_size, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N) → logits (B, N, C)."""
        return self.head(self.encoder(input_ids, attention_mask))


class Tagging(TrainingModule):
    """Token classification. The score is the macro-averaged F1 of the tags, over the words of the validation set.

    Args:
        pretrained: a run folder, a checkpoint or an export, whose encoder training starts from; None: random weights.
        encoder: the encoder's settings, without `pretrained`.
        vocab_size: the command line takes it from the data's tokenizer.
        num_labels: number of tags; the command line takes it from the data.
        warmup_steps: optimiser steps over which the learning rate rises from 0.
        optimization: settings of the optimiser and its learning rate (`lit_linformer.tasks.optim.Optimization`).
    """

    headline = ("val/f1", "validation F1", ".4f", max)

    def __init__(
        self,
        pretrained: str | None = None,
        encoder: EncoderConfig | None = None,
        vocab_size: int | None = None,
        num_labels: int = 2,
        warmup_steps: int = 10,
        **optimization: Any,
    ):
        super().__init__(**optimization)
        if pretrained is None and encoder is None:
            encoder = EncoderConfig()
        source, encoder = self.start_from(pretrained, encoder, vocab_size)
        self.save_hyperparameters(
            {"encoder": asdict(encoder), "num_labels": num_labels, "warmup_steps": warmup_steps}
            | self.optimization.hyper_parameters()
        )
        self.net = Tagger(encoder, num_labels)
        if source is not None:
            source.fill(self.net.encoder, source.encoder_weights)
        self.f1 = MulticlassF1Score(num_labels, average="macro", ignore_index=IGNORED)

    def warmup(self, total_steps: int) -> int:
        return self.hparams.warmup_steps

    def training_loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["input_ids"], batch["attention_mask"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.f1.update(self.net(batch["input_ids"], batch["attention_mask"]).argmax(-1), batch["labels"])
        self.log("val/f1", self.f1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, list[str]]]:
        found, tags = self.net(batch["input_ids"], batch["attention_mask"]).argmax(-1), self.trainer.datamodule.tags
        rows = zip(found, batch["labels"] != IGNORED, strict=True)
        return [{"tags": [tags[tag] for tag in row[begins].tolist()]} for row, begins in rows]


class TaggedRows:
    """Rows of words as batches: dataset[[(epoch, index), …]]. The label of tokens that do not begin a word is IGNORED."""

    def __init__(self, path: Path, tags: list[str], tokenizer: Any, max_length: int):
        self.rows, self.pad_id = [], tokenizer.pad_id
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            ids, labels = [tokenizer.bos_id], [IGNORED]
            for place, (word, tag) in enumerate(zip(row["words"], row.get("tags", tags[:1] * len(row["words"])), strict=True)):
                pieces = tokenizer.encode(" " * (place > 0) + word) or [tokenizer.unk_id]  # of "": each word needs a token
                ids += pieces
                labels += [tags.index(tag), *[IGNORED] * (len(pieces) - 1)]
            self.rows.append((ids[:max_length], labels[:max_length]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, keys: list[tuple[int, int]]) -> dict[str, Tensor]:
        index = torch.tensor([index for _, index in keys])
        rows = [self.rows[number] for number in index.tolist()]
        ids, labels = (nn.utils.rnn.pad_sequence([torch.tensor(row[part]) for row in rows], True, IGNORED) for part in (0, 1))
        mask = ids != IGNORED
        labels[index == FILLER] = IGNORED  # no row: with several processes one may run out of them
        return {"input_ids": ids.where(mask, self.pad_id), "labels": labels, "attention_mask": mask, "index": index}


class TaggedWords(LightningDataModule):
    """Words with tags, from JSON lines; the tags are those of train.jsonl.

    Args:
        source: a folder with train.jsonl and validation.jsonl.
        new: a file whose words `predict` tags; None: validation.jsonl.
        tokenizer: the pretrained encoder's tokenizer.json.
        max_length: tokens in a row; the rest of a line is cut off.
        batch_size: rows in a batch.
        seed: seed of the order.
    """

    def __init__(
        self,
        source: str,
        new: str | None = None,
        tokenizer: str = "models/small/tokenizer.json",
        max_length: int = 128,
        batch_size: int = 32,
        seed: int = 0,
    ):
        super().__init__()
        self.folder, self.new = Path(source), new
        self.max_length, self.batch_size, self.seed = max_length, batch_size, seed
        self.tokenizer = load_tokenizer(tokenizer)
        lines = (self.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.tags = sorted({tag for line in lines for tag in json.loads(line)["tags"]})
        self.num_tokens, self.num_labels = len(self.tokenizer), len(self.tags)
        self._loader: ResumableLoader | None = None
        self._samples = 0

    def rows(self, path: Path) -> TaggedRows:
        return TaggedRows(path, self.tags, self.tokenizer, self.max_length)

    def train_dataloader(self) -> ResumableLoader:
        steps = {"accumulate": self.trainer.accumulate_grad_batches, "samples": self._samples}
        self._loader = ResumableLoader(self.rows(self.folder / "train.jsonl"), self.batch_size, seed=self.seed, **steps)
        return self._loader

    def val_dataloader(self) -> EvaluationLoader:
        return EvaluationLoader(self.rows(self.folder / "validation.jsonl"), self.batch_size)

    def predict_dataloader(self) -> DataLoader:  # a plain one, which Lightning needs for predict
        rows = self.rows(Path(self.new or self.folder / "validation.jsonl"))
        return DataLoader(range(len(rows)), batch_size=self.batch_size, collate_fn=lambda part: rows[[(0, at) for at in part]])

    # A resumed run continues after this many rows.

    def state_dict(self) -> dict[str, int]:
        return {"samples": self._loader.samples if self._loader is not None else self._samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._samples = state["samples"]
