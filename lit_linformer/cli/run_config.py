"""The run's config.yaml: written once, kept in each checkpoint, compared when a run is resumed."""

import functools
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from lit_linformer.runs.checkpoints import config_of
from lit_linformer.runs.folder import CONFIG, TOKENIZER, Claim
from lit_linformer.utils.files import flat, write_text


class RunConfig(SaveConfigCallback):
    """Writes config and tokenizer to the run folder and into each checkpoint, and prints what a resumed run changes."""

    claim: Claim | None = None  # on the run's folder, for the process that writes it

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any):
        # These belong to one start of the run, not to the run: used as --config it must neither delete nor resume anything.
        config = config.clone()
        config.ckpt_path, config.overwrite = None, False
        super().__init__(parser, config, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes nothing yet: model and data may still turn out not to fit each other, and must then leave no run behind."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if self.claim is not None:
            self.claim.begin()
        folder = Path(trainer.default_root_dir)
        write_text(folder / CONFIG, self._text)
        if (tokenizer := _tokenizer(trainer)) is not None:
            write_text(folder / TOKENIZER, tokenizer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self._text
        if (tokenizer := _tokenizer(trainer)) is not None:  # so that the file alone can be fine-tuned
            checkpoint["tokenizer"] = tokenizer

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" or "config" not in checkpoint or not trainer.is_global_zero:
            return
        earlier = config_of(checkpoint, Path(trainer.ckpt_path or "ckpt_path"), "ckpt_path")
        before, now = (flat(config) for config in (earlier, yaml.safe_load(self._text)))
        print(f"resuming at step {checkpoint['global_step']}", flush=True)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                print(f"  {key.replace('.init_args', '')}: {before.get(key)} → {now.get(key)}", flush=True)

    @functools.cached_property
    def _text(self) -> str:  # each checkpoint carries it, and making it takes longer than writing a small one
        return self.parser.dump(self.config, skip_unset=False)


def _tokenizer(trainer: Trainer) -> str | None:
    """The text of tokenizer.json, if the data have a tokenizer of this project."""
    tokenizer = getattr(trainer.datamodule, "tokenizer", None)
    return tokenizer.to_str() if hasattr(tokenizer, "to_str") else None
