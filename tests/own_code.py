"""A module and data as a Lightning user who does not know this project writes them; and mistakes that users make in them."""

import json
import os
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.tasks import MLM
from lit_linformer.tasks.base import TrainingModule


class Plain(LightningModule):
    """Keeps its arguments, logs val_loss, and writes the rows it is given to a file for each process."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2, folder: str = "seen"):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.folder = Encoder(encoder), Path(folder)

    def loss(self, stage, rows):
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / f"{stage}.{self.global_rank}", "a") as file:
            print(json.dumps(rows[:, 0].tolist()), file=file)
        return self.net(rows).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss("train", batch[0])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss("validation", batch[0]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss("test", batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


class Rows(LightningDataModule):
    """Sixteen training and eight validation rows, each filled with its number; plain loaders, for validation `sets` of them."""

    def __init__(self, sets: int = 1):
        super().__init__()
        self.sets = sets

    def loader(self, rows, shuffle=False):
        ids = torch.arange(rows)[:, None].repeat(1, 6)
        return DataLoader(TensorDataset(ids), batch_size=2, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(16, shuffle=True)

    def val_dataloader(self):
        return self.loader(8) if self.sets == 1 else [self.loader(8) for _ in range(self.sets)]

    def test_dataloader(self):
        return self.loader(8)


class OfAPass(Plain):
    """Logs the mean over an epoch, which is known only at its end."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


class TwoMetrics(Plain):
    """Logs a second metric, which falls."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_accuracy", 1 / self.trainer.global_step if self.trainer.global_step else 1.0)


class OfEach(Plain):
    """Its metric is each process's own: the first one's falls, another one's rises."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 100.0 + self.trainer.global_step * (1 if self.global_rank else -1))


class OfTheFirst(Plain):
    """Logs on the first process alone."""

    def validation_step(self, batch, batch_idx):
        loss = self.loss("validation", batch[0])
        if self.global_rank == 0:
            self.log("val_loss", loss, rank_zero_only=True)


class Listed(Plain):
    """Keeps what it validates in lists of its own, one of which shares its name with a metric of this project."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2, folder: str = "seen"):
        super().__init__(encoder, rate, folder)
        self.val_perplexity = []

    def validation_step(self, batch, batch_idx):
        self.val_perplexity.append(self.loss("validation", batch[0]).exp())
        self.log("val_loss", self.val_perplexity[-1].log())


class JudgedOtherwise(MLM):
    """Validates without perplexity, and returns nothing."""

    headline = ("val/half", "a half", ".4f", max)

    def validation_step(self, batch, batch_idx):
        self.log("val/half", 0.5, sync_dist=True)


class TwoSets(Rows):
    """Batches from two loaders at once, by name; there are no rows before setup."""

    ready = False

    def setup(self, stage):
        self.ready = True

    def calls(self):
        if not self.ready:
            Path("early").touch()

    def train_dataloader(self):
        self.calls()
        return {"one": self.loader(16), "two": self.loader(8)}

    def val_dataloader(self):
        self.calls()
        return self.loader(8)


class Trains(Plain):
    """Reads TwoSets; no validation."""

    validation_step = LightningModule.validation_step

    def training_step(self, batch, batch_idx):
        return self.loss("train", torch.cat([batch["one"][0], batch["two"][0]]))


class Ids(Rows):
    """Batches as `MLM` reads them, without num_tokens and a limit, and with a tokenizer not of this project."""

    def __init__(self, largest: int = 15, max_length: int | None = None):
        super().__init__()
        self.largest, self.max_length, self.tokenizer = largest, max_length, object()

    def loader(self, rows, shuffle=False):
        ids, positions = torch.arange(6) * self.largest // 5, torch.arange(2)
        return DataLoader([{"input_ids": ids, "positions": positions, "labels": ids[:2]}] * rows, batch_size=2)

    def test_dataloader(self):
        return self.loader(8)

    predict_dataloader = test_dataloader


class Untyped(MLM):
    def __init__(self, encoder=None, **settings):
        super().__init__(encoder, **settings)


class Bare(Rows):
    """Takes no setting."""

    def __init__(self):
        super().__init__()


class Unpacks(Plain):
    def training_step(self, batch, batch_idx):
        one, two, three = batch  # the batch has one element
        return self.loss("train", one + two + three)


class Raises(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        int("three")


class StopAt(Callback):
    """Asks training to end, as Lightning's Timer does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.should_stop = trainer.global_step == self.step


class TermAt(Callback):
    """The signal that a cluster sends, after the batch of that step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Manual(Plain):
    """Lightning's manual optimisation: training_step returns nothing."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2, folder: str = "seen", optimizers: int = 1):
        super().__init__(encoder, rate, folder)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers() if self.hparams.optimizers > 1 else [self.optimizers()]:
            optimizer.zero_grad()
            self.manual_backward(self.loss("train", batch[0]))
            optimizer.step()

    def configure_optimizers(self):
        return [super(Manual, self).configure_optimizers() for _ in range(self.hparams.optimizers)]


class Autoencoder(Plain):
    """Its net has an encoder, but not one of this project."""

    def __init__(self, rate: float = 1e-2, folder: str = "seen"):
        super().__init__(EncoderConfig(), rate, folder)
        self.net = torch.nn.ModuleDict({"encoder": torch.nn.Linear(6, 2), "decoder": torch.nn.Linear(2, 6)})

    def loss(self, stage, rows):
        return (self.net["decoder"](self.net["encoder"](rows.float())) - rows).square().mean()


class NumPyRates(Plain):
    """A schedule in NumPy, whose numbers go into every checkpoint, and settings that only share names with this project's."""

    def __init__(self, encoder: dict | None = None, pretrained: str = "imagenet", schedule: str = "cosine"):
        super().__init__(EncoderConfig(20, max_length=8, hidden_size=8, num_heads=2, num_layers=1, projection_dim=4))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=np.float64(1e-2))
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.exp(-epoch))]

    def predict_step(self, batch, batch_idx):
        return [(row.sum(), np.float32(1.5)) for row in batch[0]]


class Keeps(Callback):
    """Its state is not a plain value."""

    def state_dict(self):
        return {"share": Fraction(1, 3)}


class Draws(TrainingModule):
    """A training_step of its own, on batches without ids."""

    headline = ("val_loss", "validation loss", ".4f", min)

    def __init__(self, **optimization):
        super().__init__(**optimization)
        self.net = torch.nn.Linear(6, 6)

    def training_step(self, batch, batch_idx):
        with open("draws", "a") as file:
            print(torch.rand(()).item(), file=file)
        return self.net(batch[0].float()).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0].float()).square().mean())


class Estimates(Plain):
    """Reads the number of steps, for which Lightning makes the loader before it loads the checkpoint."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Stateful(DataLoader):
    """A loader that stores its position, like torchdata's StatefulDataLoader; at the end of an epoch that is the start."""

    given = skipped = 0

    def __iter__(self):
        skipped, self.skipped = self.skipped, 0
        for self.given, batch in enumerate(super().__iter__(), 1):
            if self.given > skipped:
                yield batch

    def state_dict(self):
        return {"given": self.given % len(self)}

    def load_state_dict(self, state):
        self.skipped = state["given"]


class StatefulRows(Rows):
    def train_dataloader(self):
        return Stateful(TensorDataset(torch.arange(16)[:, None].repeat(1, 6)), batch_size=2)


class Counts(Plain):
    """Counts its tokens in a buffer, which checkpoints keep."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2, folder: str = "seen"):
        super().__init__(encoder, rate, folder)
        self.register_buffer("tokens_seen", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.tokens_seen += batch[0].numel()
        return super().training_step(batch, batch_idx)
