"""Returns freed memory to the system, so that a run's memory on a CPU does not grow without bound."""

import contextlib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_linformer.utils.environment import give_memory_back, machine_memory, process_memory

SHARE = 4  # a quarter of the machine's memory


class TrimMemory(Callback):
    """On a CPU, makes glibc return freed blocks once the process holds a quarter of the machine's memory.

    Otherwise, if batches differ in length, a run's memory grows for hours: training on ListOps, with 32 rows of up to 2,048
    symbols, held 9.6 GiB after 2,900 steps, of which 1.7 were in use (docs/LOG.md, 25 November 2026). Returned memory has to be
    allocated again, which at 3 GiB cost an eighth of the time, so it is not returned earlier, and again only once it has
    doubled.
    """

    def __init__(self) -> None:
        self._least = 0  # resident bytes after the last time

    def _ended(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.device.type != "cpu":
            return
        with contextlib.suppress(OSError):  # a system without /proc
            if process_memory("VmRSS") > max(2 * self._least, machine_memory() // SHARE):
                give_memory_back()
                self._least = process_memory("VmRSS")

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _ended
