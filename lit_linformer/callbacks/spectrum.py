"""How low the rank of attention is while a model trains: the paper's figure 1 after a validation.

    --trainer.callbacks+ Spectrum --trainer.callbacks.num_sentences 32

writes spectrum.json into the run directory and the curves into the loggers. For a trained run, and with the errors of several
approximations, there is `python run.py spectrum --run RUN`.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_linformer.callbacks.loggers import writers
from lit_linformer.callbacks.observing import Measuring, say, tokens_seen, unnoticed
from lit_linformer.model.lowrank import Measured, check_index, check_layers, check_maps, measure
from lit_linformer.model.ranges import Count, Natural, Range, check_ranges
from lit_linformer.tasks.base import encoder_of
from lit_linformer.utils.amounts import percent
from lit_linformer.utils.errors import SettingError
from lit_linformer.utils.figures import draw_spectra, figure_class
from lit_linformer.utils.files import write_json


class Spectrum(Measuring):
    """Cumulative singular values of the attention maps of validation text: spectrum.json, the loggers.

    Training is not affected. Only full rows are used, unmasked; they are divided among the processes (with DDP; it does not
    work with sharded weights). The singular values of a Transformer's 512 × 512 map take 50 ms on one core: 13 s for 16
    sentences, 4 layers and 4 heads.

    Args:
        every_n_validations: number of validations from one measurement to the next.
        layers: which layers, counted from 0; None: all.
        num_sentences: rows of data.max_length tokens, spread evenly over the validation set; fewer if it has fewer.
        index: which singular value's cumulative share is logged, counted from 1; None: a quarter of their number, like the
            paper's 128 of 512.
        threshold: cumulative share, 0 to 1, that a suggested k must reach.
    """

    def __init__(
        self,
        every_n_validations: Count = 1,
        layers: list[Natural] | None = None,
        num_sentences: Count = 16,
        index: Count | None = None,
        threshold: Annotated[float, Range(above=0, most=1)] = 0.9,
    ) -> None:
        check_ranges("Spectrum.", Spectrum.__init__, locals())
        self.every_n_validations, self.layers, self.num_sentences = every_n_validations, layers, num_sentences
        self.index, self.threshold = index, threshold
        self.history: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations, "history": [dict(entry) for entry in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations, self.history = state_dict["validations"], [dict(entry) for entry in state_dict["history"]]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        encoder = encoder_of(pl_module)
        blocks = getattr(trainer.datamodule, "blocks", {}).get("validation")
        if encoder is None or blocks is None:
            self.refuse(trainer, "PretrainingData (a fine-tuned run: python run.py spectrum --run RUN --source TEXT)")
        if blocks.full == 0:
            raise SettingError(
                "data.max_length", blocks.length, "fewer, for the validation text has no full row", when="with Spectrum"
            )
        check_maps(encoder)
        self._layers = check_layers("Spectrum.layers", self.layers, encoder.config)
        self._index = check_index("Spectrum.index", self.index, encoder.config, blocks.length)

    def after_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == "fit"
        with unnoticed(pl_module):
            rows = torch.from_numpy(trainer.datamodule.blocks["validation"].full_rows(self.num_sentences))
            rows = rows[trainer.global_rank :: trainer.world_size]
            reduce = partial(trainer.strategy.reduce, reduce_op="sum")
            measured = measure(pl_module.net.encoder, rows, self._layers, reduce=reduce)
            step = self.measured_step(trainer)
            shares = measured.at(self._index).numpy().round(6).tolist()  # layer × head
            entry = {"step": step, "tokens": tokens_seen(pl_module), "share_at_index": shares}
            entry["suggested_k"] = measured.suggested(self.threshold)
            if fitting:
                self.history.append(entry)
            held = ", ".join(map(str, entry["suggested_k"]))
            share = percent(self.threshold)
            say(trainer, f"step {step}  {share} of the spectrum, by layer: k = {held} (n = {measured.length})")
            if (path := self.file(trainer, "spectrum.json")) is None:
                return
            self._write(path, measured, self.history if fitting else [entry])
            self._show(trainer, measured, entry)

    def _write(self, path: Path, measured: Measured, history: list[dict[str, Any]]) -> None:
        content = {
            "layers": measured.layers,
            "length": measured.length,
            "columns": measured.columns,
            "sentences": measured.sentences,
            "index": self._index,
            "threshold": self.threshold,
            "history": history,
            "cumulative": np.round(measured.curves.numpy(), 6).tolist(),  # of the last entry, (layer, head, index)
        }
        write_json(path, content)

    def _show(self, trainer: Trainer, measured: Measured, entry: dict[str, Any]) -> None:
        values, figure = {}, figure_class()
        for layer, share, k in zip(measured.layers, measured.at(self._index).mean(1), entry["suggested_k"], strict=True):
            values[f"spectrum/share_at_{self._index}_layer{layer}"] = float(share)
            values[f"spectrum/k_holding_{self.threshold:g}_layer{layer}"] = float(k)
        for logger in writers(trainer):
            logger.points(values, trainer.global_step)
            if figure is not None:
                drawn = draw_spectra(figure, [(f"step {entry['step']}", measured)], [self._index], self.threshold)
                logger.figure("spectrum/figure1", drawn, trainer.global_step)
