"""What callbacks share, in a user's own Trainer."""

import torch
from lightning.pytorch import LightningModule

from lit_linformer.callbacks import Measuring
from tests.helpers import plain_trainer


class Steps(Measuring):
    def __init__(self):
        self.measured = []

    def after_validation(self, trainer, pl_module):
        self.measured.append(self.measured_step(trainer))


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        return self.weight * 1.0

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4))

    val_dataloader = train_dataloader


def test_the_step_that_is_measured_is_that_of_the_model(tmp_path):
    """With the model of a fit in the same process it was 0."""
    steps, module = Steps(), Plain()
    trainer = plain_trainer(tmp_path, steps, val_check_interval=2)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "fourth.ckpt")
    trainer.validate(module, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    trainer.validate(module, ckpt_path=tmp_path / "fourth.ckpt", verbose=False)
    trainer.validate(module, verbose=False)
    assert steps.measured == [2, 4, 4, 6, 8, 4, 8]
