"""A process's resident memory, before and after training."""

import platform

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_linformer.callbacks import TrimMemory, trim_memory
from lit_linformer.utils.environment import give_memory_back, process_memory

MIB = 2**20


class Fragmenting(LightningModule):
    """Each step makes blocks of 100 kB and frees nine out of ten."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.weight, self.kept = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        self.kept += [torch.zeros(25_000) for _ in range(2_000)][::10]

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], 0.1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
def test_freed_memory_goes_back(monkeypatch, tmp_path):
    monkeypatch.setattr(trim_memory, "machine_memory", lambda: 200 * MIB)
    monkeypatch.setattr(trim_memory, "process_memory", lambda key: process_memory(key) - before)
    grown = {}
    for callbacks in ((), (TrimMemory(),)):
        give_memory_back()  # frees what other tests have left behind
        before = process_memory("VmRSS")
        module = Fragmenting()
        trainer = Trainer(
            accelerator="cpu", max_steps=-1, max_epochs=1, callbacks=list(callbacks), default_root_dir=tmp_path, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(2, 1)))
        grown[bool(callbacks)] = process_memory("VmRSS") - before
        del module, trainer
    # A tenth of the 191 MiB of each step is kept.
    assert grown[False] > 150 * MIB
    assert grown[True] < 80 * MIB
