"""The base class of all tasks: parameter groups, a learning rate for each step, and resuming bit for bit.

For a task of your own, pass the optimiser's settings to `super().__init__(**optimization)`, set `self.net`, and define
`warmup(total_steps)` and either `training_loss(batch)` or a training_step of your own.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

from lit_linformer.data.notes import note
from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.runs.checkpoints import take_training_weights
from lit_linformer.runs.trained_model import StoredModel, own_modules, read_model
from lit_linformer.tasks.compiling import check_compiler, compile_training
from lit_linformer.tasks.data_fits import check_ids, check_image, check_input_size, check_row_length
from lit_linformer.tasks.muon import MuonAndAdamW
from lit_linformer.tasks.optim import Optimization, check_shardable, endless, parameter_groups
from lit_linformer.tasks.pretrained import check_same_tokenizer, pretrained_encoder
from lit_linformer.tasks.sharding import check_whole, shard
from lit_linformer.utils import compat
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.weights import check_finite

Batch = dict[str, Any]


def encoder_of(module: LightningModule) -> Encoder | None:
    """A module's ``net.encoder`` if that is an ``Encoder``: a user's own net may have another one, such as nn.Transformer's."""
    encoder = getattr(getattr(module, "net", None), "encoder", None)
    return encoder if isinstance(encoder, Encoder) else None


def input_ids_of(batch: Any) -> torch.Tensor | None:
    """A batch's input_ids (B, N), or None if it has none, as batches of a user's own data may."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return ids if isinstance(ids, torch.Tensor) else None


def batches_before(module: LightningModule) -> int:
    """Training batches so far: a TrainingModule's own count, which is right on any number of devices, or else the loop's."""
    return getattr(module, "batches_seen", 0) or module.trainer.fit_loop.total_batch_idx


class TrainingModule(LightningModule):
    """A LightningModule that resumes exactly: dropout depends on (seed, batch, rank); settings override a checkpoint's.

    Args:
        compile: use torch.compile for the layers of ``net.encoder`` in training; validation, test and predictions are not
            compiled. Neither a hyper-parameter nor in the state dict: a checkpoint loads with or without it.
        optimization: settings of `Optimization`: the optimiser and its learning rate.
    """

    # What the progress lines and result.json show: metric, its name in words, format, and min or max: which value is better.
    headline = ("val/perplexity", "validation perplexity", ".2f", min)
    # Whether torch might use cuDNN's attention before setup; None after teardown, which Lightning leaves out if a fit fails.
    cudnn_allowed: ClassVar[bool | None] = None

    def __init__(self, compile: bool = False, **optimization: Any) -> None:
        super().__init__()
        self.optimization = Optimization(**optimization)
        self.compiles = compile
        self._pretrained_tokenizer: Tokenizer | None = None
        self._seed_after: int | None = None
        # With the batch that is being trained on, whatever training_step a subclass has.
        self.batches_seen = 0
        self.tokens_seen = 0  # this rank's times the number of ranks; padding included

    @property
    def attached(self) -> bool:
        """Whether this module has a Trainer; it has none in load_from_checkpoint."""
        try:
            return self.trainer is not None
        except RuntimeError:
            return False

    @classmethod
    def check_early(cls, settings: Mapping[str, Any]) -> None:
        """Called by fit before data are prepared: raises ValueError for settings, or files they name, that fail later."""
        names = [field.name for field in fields(Optimization) if field.name in settings]
        Optimization(**{name: settings[name] for name in names})

    def start_from(
        self, pretrained: str | None, encoder: EncoderConfig | dict[str, Any] | None, vocab_size: int | None
    ) -> tuple[StoredModel | None, EncoderConfig]:
        """The model that ``pretrained`` names, or None, and the encoder's settings, with the vocabulary size of the data.

        At least one of ``pretrained`` and ``encoder`` is given, the latter as a dictionary if it comes from a checkpoint.
        """
        encoder = EncoderConfig(**encoder) if isinstance(encoder, dict) else encoder
        source = read_model(pretrained) if pretrained is not None else None
        if source is not None:
            self._pretrained_tokenizer = source.own_tokenizer
            for name, kind in source.own_modules.items():
                if name.partition(".")[0] == "encoder":  # nothing is taken from the rest of the network
                    note(f"{name} of model.pretrained={pretrained} is of the class {kind}: only its weights are taken over")
            return source, pretrained_encoder(source, encoder, vocab_size)
        assert encoder is not None
        return None, encoder if vocab_size is None else replace(encoder, vocab_size=vocab_size)

    def setup(self, stage: str) -> None:
        data, encoder = self.trainer.datamodule, encoder_of(self)
        if encoder is not None:
            rows, longest = getattr(data, "max_length", None) or 0, encoder.config.max_length
            check_input_size(encoder.config.input_size, getattr(data, "input_size", None))
            check_row_length(rows, longest, windows=hasattr(data, "max_windows"))
            if encoder.config.of_images:
                check_image(getattr(data, "image_tokens", longest), longest)
            default, tokens = EncoderConfig.vocab_size, getattr(data, "num_tokens", None)
            not_given = self._pretrained_tokenizer is None and encoder.config.vocab_size == default != tokens
            if stage == "fit" and not_given and data is not None and not encoder.config.input_size:
                name = type(data).__name__
                has = f"{name} has no num_tokens" if tokens is None else f"{name}.num_tokens is {tokens:,}"
                note(f"{has}: the model's vocabulary is the default of model.encoder.vocab_size, {default:,}")
        check_same_tokenizer(data, self._pretrained_tokenizer)
        if stage == "fit":
            # Training seeds torch for each batch. What the process draws afterwards, such as the weights of an ensemble's next
            # model, must depend on what it drew before.
            with torch.random.fork_rng(devices=[]):  # training draws what it would without
                self._seed_after = int(torch.randint(2**63 - 1, ()))
        # torch prefers cuDNN's attention on some GPUs, but that takes a second for each new length on an H100 (docs/LOG.md).
        if TrainingModule.cudnn_allowed is None:
            TrainingModule.cudnn_allowed = torch.backends.cuda.cudnn_sdp_enabled()
        equal = bool(self.equal_rows) and stage != "predict"  # whose texts have any length
        torch.backends.cuda.enable_cudnn_sdp(TrainingModule.cudnn_allowed and equal)

    def teardown(self, stage: str) -> None:
        if TrainingModule.cudnn_allowed is not None:
            torch.backends.cuda.enable_cudnn_sdp(TrainingModule.cudnn_allowed)
            TrainingModule.cudnn_allowed = None
        if stage == "fit" and self._seed_after is not None:
            torch.manual_seed(self._seed_after)

    @property
    def equal_rows(self) -> bool | None:
        """Whether the rows of all batches have one length; None: the data module does not say."""
        return getattr(self.trainer.datamodule, "equal_rows", None) if self.attached else None

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.training_loss(batch)
        self.log("train/loss", loss.detach())
        # A tensor on the CPU, since Lightning would copy a number to the GPU and wait for that.
        self.log("train/lr", torch.tensor(self.optimizers().param_groups[0]["lr"]))
        return loss

    def training_loss(self, batch: Batch) -> torch.Tensor:
        """The loss that training minimises, a scalar."""
        raise NotImplementedError

    def warmup(self, total_steps: int) -> int:
        """Optimiser steps over which the learning rate rises from 0."""
        return 0

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            check_shardable(self.optimization.optimizer)
            check_whole(self, self.net)
            shard(self.net, self.device_mesh["data_parallel"])
        if self.compiles and self.trainer.state.fn == "fit":
            check_compiler(self.trainer.strategy.root_device)
            compile_training(self.net, None if self.equal_rows is None else not self.equal_rows)

    def training_flops(self, batch: Batch) -> int | None:
        """Operations of the forward and backward pass of a batch (model/flops.py), for MFU; None: not known."""
        return None

    def peak_lr(self) -> float:
        """The highest learning rate: lr or, with lr_batch_size, lr · √(rows of an optimiser step / lr_batch_size)."""
        meant_for, lr = self.optimization.lr_batch_size, self.optimization.lr
        if self.hparams.get("lr") != self.hparams_initial.get("lr"):
            lr = self.hparams.lr  # as Lightning's Tuner.lr_find has set it
        if meant_for is None or not self.attached:
            return lr
        rows = getattr(self.trainer.datamodule, "rows_per_step", None)
        if rows is None:
            name = type(self.trainer.datamodule).__name__
            raise SettingError("model.lr_batch_size", meant_for, f"null, since {name} has no rows_per_step")
        return lr * math.sqrt(rows / meant_for)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self, self.peak_lr(), self.optimization)  # of self, since a subclass may have more than net

    def _check_ids(self, batch: Any, batch_idx: int) -> None:
        encoder, ids = encoder_of(self), input_ids_of(batch)
        if ids is None or encoder is None or encoder.config.input_size:
            return
        if batch_idx == 0 or ids.device.type == "cpu":
            check_ids(ids, encoder.config.vocab_size)  # on a GPU only once, since the CPU has to wait for it

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._check_ids(batch, batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._check_ids(batch, batch_idx)
        # Dropout depends on seed, batches so far and rank alone, so that a resumed run repeats it bit for bit.
        state = seeds_at(batches_before(self), self.global_rank).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))
        self.batches_seen += 1
        if (ids := input_ids_of(batch)) is not None:
            self.tokens_seen += ids.shape[:2].numel() * self.trainer.world_size

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        total_steps = self._total_steps()
        warmup_steps = self.warmup(total_steps)
        if 0 < total_steps <= warmup_steps and not self.trainer.fast_dev_run:
            most = self.optimization.lr_factor(total_steps - 1, warmup_steps, total_steps)
            short = f"training ends after {total_steps:,} steps, within a warm-up of {warmup_steps:,}"
            rank_zero_warn(f"{short}: the learning rate rises to {most:.2g} of model.lr")
        factor = partial(self.optimization.lr_factor, warmup_steps=warmup_steps, total_steps=total_steps)
        scheduler = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _optimizer(self) -> torch.optim.Optimizer:
        groups, betas, eps = self.parameter_groups(), tuple(self.optimization.betas), self.optimization.eps
        if self.optimization.optimizer == "muon":
            return MuonAndAdamW(groups, betas, eps)
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
        compat.clip_before_fused_step(optimizer)
        return optimizer

    def _total_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf") and self.optimization.schedule != "constant":
            raise endless(self.optimization.schedule, self.trainer.max_steps)
        return 0 if steps == float("inf") else int(steps)

    def on_train_start(self) -> None:
        # A restored optimiser has the old run's settings; they are replaced by this run's, which Lightning does not do.
        optimizer, scheduler, groups = self.optimizers(), self.lr_schedulers(), self.parameter_groups()
        own = isinstance(optimizer, list) or not isinstance(scheduler, LambdaLR)  # a list where there are several
        if own or _kinds(optimizer.param_groups) != _kinds(groups):
            return  # a subclass's own configure_optimizers made them
        done, total = scheduler.last_epoch, self._total_steps()
        if 0 < total < done and (rest := scheduler.lr_lambdas[0](done)) < 1:  # passes over other data may have fewer steps
            over = f"trainer.max_epochs comes to {total:,} steps on these data, and {done:,} are done"
            rank_zero_warn(f"{over}: the schedule is over, and the learning rate stays at {rest:.2g} of model.lr")
        for index, group in enumerate(groups):
            scheduler.base_lrs[index] = group["lr"]
            restored = optimizer.param_groups[index]
            restored["name"] = group["name"]
            restored["lr"] = group["lr"] * scheduler.lr_lambdas[index](scheduler.last_epoch)
            restored["weight_decay"] = group["weight_decay"]
            if "betas" in restored:  # AdamW's
                restored["betas"], restored["eps"] = tuple(self.optimization.betas), self.optimization.eps

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {"batches": self.batches_seen, "tokens": self.tokens_seen}
        if self.attached:  # not where `trainer.strategy.connect(module)` was all that came before trainer.save_checkpoint
            checkpoint["seen"] |= {"accumulate": self.trainer.accumulate_grad_batches, "rows": self._rows()}
        net = getattr(self, "net", None)
        if own := own_modules(net) if isinstance(net, torch.nn.Module) else {}:
            checkpoint["own_modules"] = own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        seen = checkpoint.get("seen", {})
        fits = self.attached and self.trainer.state.fn == "fit"
        if fits:
            if "state_dict" in checkpoint and "optimizer_states" not in checkpoint:
                trained = checkpoint.get("global_step", 0) > 0
                why = "was saved without its optimiser's state" if trained else "has trained nothing yet"
                raise UserError(f"ckpt_path is a model that {why}", "to start from it, with model.pretrained")
            self._recount(checkpoint, seen)
            if checkpoint.get("optimizer_states"):
                self.check_optimizer(checkpoint.get("hyper_parameters", {}))
            take_training_weights(checkpoint)
        self.batches_seen, self.tokens_seen = seen.get("batches", 0), seen.get("tokens", 0)
        if "state_dict" in checkpoint:  # a sharded checkpoint has none: the strategy has loaded it
            check_fit(self.state_dict(), checkpoint["state_dict"])
            buffers = dict(self.named_buffers(remove_duplicate=False))  # one of them may be a mask
            weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name not in buffers}
            check_finite(weights, f"ckpt_path is {self.trainer.ckpt_path if self.attached else '?'}")
        if self.attached and self.trainer.precision == "64-true":
            self.double()  # Lightning does so only after it has loaded the weights, which would lose half of their digits

    def check_optimizer(self, before: dict[str, Any]) -> None:
        """ValueError if an optimiser's state from a checkpoint with these hyper-parameters does not fit this run's."""
        mine = self.optimization.optimizer
        if before.get("optimizer", mine) != mine:
            raise SettingError("model.optimizer", mine, before["optimizer"], when="to continue from this checkpoint")

    def _rows(self) -> int:
        """Rows of an optimiser step; micro-batches, if the data module has no rows_per_step."""
        trainer = self.trainer
        return getattr(trainer.datamodule, "rows_per_step", trainer.world_size * trainer.accumulate_grad_batches)

    def _recount(self, checkpoint: dict[str, Any], seen: dict[str, int]) -> None:
        """Converts the counts of micro-batches, since with another number of devices a step may consist of more or fewer.

        Lightning counts micro-batches, too, and would make the first step of a continued run from too few. If the rows of a
        step have changed, the finished part of a pass over the data is not a whole number of steps, so a new pass begins.
        """
        before, now = seen.get("accumulate"), self.trainer.accumulate_grad_batches
        rows = self._rows()
        steps_differ = seen.get("rows", rows) != rows
        if before is None or not (steps_differ or before != now):
            return
        if steps_differ and self.trainer.max_epochs not in (None, -1):
            counted = hasattr(self.trainer.datamodule, "rows_per_step")
            unit = "rows" if counted else "batches"
            same = f"data.global_batch_size {seen['rows']}" if counted else "trainer.accumulate_grad_batches × devices"
            raise UserError(
                f"a step has {rows} {unit}, in the checkpoint {seen['rows']}, and trainer.max_epochs counts epochs",
                f"as many ({same}), or trainer.max_steps without trainer.max_epochs",
            )
        seen["batches"] = seen["batches"] // before * now
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for name in ("total", "current"):
            counts = progress[name]
            done = 0 if name == "current" and steps_differ else counts["processed"] // before * now
            unfinished = counts["processed"] - counts["completed"]  # 1 where the checkpoint was written at a batch's end
            counts.update({count: done for count in counts}, completed=done - unfinished)


def seeds_at(*place: int) -> np.random.SeedSequence:
    """Seeds for a place in a run, such as (batch, rank); a resumed run with the same seed gets the same ones."""
    return np.random.SeedSequence((int(os.environ.get("PL_GLOBAL_SEED", 0)), *place))


def _kinds(groups: list[dict[str, Any]]) -> list[str]:
    """The groups' names without the factor of layer_lr_decay, which may have changed."""
    return [str(group.get("name")).partition(" × ")[0] for group in groups]


def check_fit(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Raises ValueError, in one line, if a checkpoint's weights (``theirs``) differ from a model's in name or shape."""
    for name, tensor in theirs.items():
        if name not in mine or mine[name].shape != tensor.shape:
            here = f"has {list(mine[name].shape)}" if name in mine else "has none"
            raise UserError(
                f"the checkpoint does not fit this model: {name} is {list(tensor.shape)} there, the model {here}",
                "a checkpoint made with the same model.encoder and vocabulary",
            )
    if missing := [name for name in mine if name not in theirs]:
        raise UserError(f"the checkpoint does not fit this model: it lacks {missing[0]} ({len(missing)} missing in all)")
