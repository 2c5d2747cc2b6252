"""A user's own module resumes exactly, and its optimiser takes the settings given now."""

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

from lit_linformer.callbacks import Resuming
from lit_linformer.model import EncoderConfig
from tests.helpers import assert_same, load, output, slow
from tests.own_code import Plain, Rows, Stateful
from tests.test_own_code import BEST, own, rows_seen  # noqa: F401


class Noisy(Plain):
    """With its own dropout, and schedules by their names in torch."""

    def __init__(
        self, encoder: EncoderConfig | None = None, rate: float = 1e-2, decay: float = 0.0, schedule: str | None = None
    ):
        super().__init__(encoder, rate)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + torch.rand(1))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate, weight_decay=self.hparams.decay)
        schedules = torch.optim.lr_scheduler
        if self.hparams.schedule is None:
            return optimizer
        if self.hparams.schedule == "SequentialLR":
            parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.CosineAnnealingLR(optimizer, 12)]
            return [optimizer], [schedules.SequentialLR(optimizer, parts, [3])]
        if self.hparams.schedule == "ReduceLROnPlateau":
            plateau = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.hparams.schedule == "CosineAnnealingLR":
            return [optimizer], [schedules.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)]
        return [optimizer], [schedules.StepLR(optimizer, 1, 0.5)]


MODEL = ["--model", "tests.callbacks.test_resuming.Noisy"]


def last(tmp_path, name):
    return load(tmp_path / f"runs/{name}/checkpoints/last.ckpt")


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("null", []),
        slow("SequentialLR", []),
        slow("null", ["--trainer.callbacks+", "Averaging", "--trainer.callbacks.decay", "0.9"]),
    ],
)
def test_bit_for_bit_with_a_plain_loader(schedule, more, own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, *MODEL, "--model.schedule", schedule, *more]
    output([*argv, "--name", "whole", "--trainer.max_epochs", "4"], tmp_path)
    whole = rows_seen("train", 0)
    Path("seen/train.0").unlink()
    for epochs in ("1", "3", "4"):
        output([*argv, "--name", "parts", "--trainer.max_epochs", epochs, "--ckpt_path", "auto"], tmp_path)
    assert rows_seen("train", 0) == whole and whole[:16] != whole[16:32]
    one, other = last(tmp_path, "whole"), last(tmp_path, "parts")
    for weights in ("state_dict", "training_weights") if more else ("state_dict",):
        assert all(torch.equal(one[weights][name], other[weights][name]) for name in one[weights])


def test_a_schedule_that_a_checkpoint_restores_is_told(own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, *MODEL, "--model.schedule", "CosineAnnealingLR", "--name", "longer"]
    output([*argv, "--trainer.max_epochs", "1"], tmp_path)
    shown = output([*argv, "--trainer.max_epochs", "2", "--ckpt_path", "last"], tmp_path)
    told = "note: CosineAnnealingLR goes on with the T_max of the checkpoint, 8, not with that of configure_optimizers, 16"
    assert told in shown and shown.count("note: Cosine") == 1


@pytest.mark.parametrize("schedule", ["StepLR", *map(slow, ("null", "SequentialLR", "ReduceLROnPlateau"))])
def test_an_own_optimiser_takes_the_settings_of_now(schedule, own, tmp_path):  # noqa: F811
    """As if it had had them from the start."""

    def group(name, *argv):
        argv = ["fit", *own, *BEST, *MODEL, "--model.schedule", schedule, "--name", name, *argv]
        output([*argv, "--ckpt_path", "auto"], tmp_path)
        return last(tmp_path, name)["optimizer_states"][0]["param_groups"][0]

    new = ["--model.rate", "3e-3", "--model.decay", "0.1"]
    expected = group("new", "--trainer.max_epochs", "4", *new)
    group("old", "--trainer.max_epochs", "2")
    found = group("old", "--trainer.max_epochs", "4", *new)
    assert found["weight_decay"] == 0.1
    assert found["lr"] == pytest.approx(expected["lr"], rel=1e-6) and found["lr"] != pytest.approx(1e-2)


def test_a_run_out_of_patience_stays_ended(own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--trainer.max_epochs", "9", "--ckpt_path", "auto", "--trainer.callbacks+", "EarlyStopping"]
    argv += ["--trainer.callbacks.monitor", "val_loss", "--trainer.callbacks.min_delta", "1e9", "--trainer.callbacks.patience"]
    first = ""
    for patience, steps in (("1", 16), ("1", 16), ("2", 24)):  # no validation after the first counts as an improvement
        shown = output([*argv, patience], tmp_path)
        first = first or shown
        why = f"val_loss has not improved in {patience} validation{'s' * (patience != '1')}"
        assert ("before training" in shown) == (shown == first)
        assert " ".join(shown.split()).count(f"ended early at step {steps}: {why}") == 1
        assert last(tmp_path, "own")["global_step"] == steps


@pytest.mark.parametrize(
    ("limit", "other", "why"),
    [
        (["stopping_threshold", "1e9"], ["stopping_threshold", "-1"], "reached 1e+09"),
        (["divergence_threshold", "-1"], ["divergence_threshold", "1e9"], "beyond -1"),
    ],
)
def test_a_run_that_a_threshold_has_ended_stays_ended(limit, other, why, own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--trainer.max_epochs", "3", "--ckpt_path", "auto", "--trainer.callbacks+", "EarlyStopping"]
    argv += ["--trainer.callbacks.monitor", "val_loss"]
    for (name, value), steps in ((limit, 8), (limit, 8), (other, 24)):
        shown = output([*argv, f"--trainer.callbacks.{name}", value], tmp_path)
        assert (f"ended early at step {steps}: val_loss " in " ".join(shown.split())) == (why in shown) == (steps == 8)
        assert last(tmp_path, "own")["global_step"] == steps


class Follows(Plain):
    """A teacher that follows the weights after each batch, and counts its validations, both in hooks of the module's own."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2):
        super().__init__(encoder, rate)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("validations", torch.tensor(0))

    def loss(self, stage, rows):
        return super().loss(stage, rows) + (self.net(rows) - self.teacher(rows)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for weight, followed in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            weight.lerp_(followed.detach(), 0.1)

    def on_validation_end(self):
        self.validations += 1


TERM = ["--trainer.callbacks+", "tests.own_code.TermAt", "--trainer.callbacks.step", "5"]


KILL = ["--trainer.callbacks+", "tests.helpers.KillAt", "--trainer.callbacks.hook", "on_train_batch_start"]
KILL += ["--trainer.callbacks.step", "8", "--last.every_n_steps", "8"]


def test_what_the_module_s_own_hooks_change_is_in_the_checkpoint(own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--model", "tests.callbacks.test_resuming.Follows", "--data", "tests.own_code.StatefulRows"]
    output([*argv, "--name", "whole"], tmp_path)
    for name, ends, status in (("stopped", TERM, 143), ("killed", KILL, -9)):
        output([*argv, "--name", name, *ends], tmp_path, status=status)
        output([*argv, "--name", name, "--ckpt_path", "last"], tmp_path)
        assert_same(last(tmp_path, "whole")["state_dict"], last(tmp_path, name)["state_dict"], name)


class Samples(Plain):
    """Draws in its validation, as a variational autoencoder does."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss("validation", batch[0]) * torch.rand(()))


class Shuffled(Rows):
    def train_dataloader(self):
        return Stateful(TensorDataset(torch.arange(16)[:, None].repeat(1, 6)), batch_size=2, shuffle=True)


def test_a_validation_owed_within_a_pass_draws_as_the_one_that_was_due_and_leaves_the_order(own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--model", "tests.callbacks.test_resuming.Samples", "--trainer.val_check_interval", "5"]
    argv += ["--data", "tests.callbacks.test_resuming.Shuffled"]
    output([*argv, "--name", "whole"], tmp_path)
    whole = rows_seen("train", 0)
    Path("seen/train.0").unlink()
    output([*argv, "--name", "parts", *TERM], tmp_path, status=143)
    output([*argv, "--name", "parts", "--ckpt_path", "last"], tmp_path)
    assert rows_seen("train", 0) == whole
    one, other = (EventAccumulator(f"runs/{name}").Reload().Scalars("val_loss") for name in ("whole", "parts"))
    assert [(point.step, point.value) for point in one] == [(point.step, point.value) for point in other]


class ByThePass(Plain):
    """Manual optimisation, with a schedule stepped at the end of an epoch, as in Lightning's documentation."""

    def __init__(self, encoder: EncoderConfig | None = None, rate: float = 1e-2):
        super().__init__(encoder, rate)
        self.automatic_optimization = False
        self.register_buffer("begun", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        loss = self.loss("train", batch[0])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def on_train_epoch_start(self):
        self.begun += 1

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("ends", ["--trainer.max_epochs", "--trainer.max_steps"])
def test_a_pass_that_ends_without_a_validation_has_its_hooks(ends, own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--model", "tests.callbacks.test_resuming.ByThePass", ends, "3" if "epochs" in ends else "24"]
    argv += ["--trainer.check_val_every_n_epoch", "3", "--last.every_n_steps", "8"]
    output([*argv, "--name", "whole"], tmp_path)
    whole = rows_seen("train", 0)
    Path("seen/train.0").unlink()
    output([*argv, "--name", "parts", *KILL], tmp_path, status=-9)
    output([*argv, "--name", "parts", "--ckpt_path", "last"], tmp_path)
    assert rows_seen("train", 0) == whole
    one, other = last(tmp_path, "whole"), last(tmp_path, "parts")
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert_same(one[name], other[name])


@pytest.mark.parametrize(("every", "hook"), [("3", "on_train_batch_start"), ("1", "on_validation_batch_start")])
def test_early_stopping_looks_again_after_the_pass_of_which_the_mean_is_lost(every, hook, own, tmp_path):  # noqa: F811
    argv = ["fit", *own, *BEST, "--model", "tests.callbacks.test_resuming.ByThePass", "--trainer.max_epochs", "4"]
    argv += ["--trainer.check_val_every_n_epoch", every, "--last.every_n_steps", "8", "--trainer.callbacks+", "EarlyStopping"]
    argv += ["--trainer.callbacks.monitor", "train_loss", "--trainer.callbacks.check_on_train_epoch_end", "true"]
    argv += ["--trainer.callbacks.divergence_threshold", "0"]  # any loss checked ends training
    kill = ["--trainer.callbacks+", "tests.helpers.KillAt", "--trainer.callbacks.hook", hook, "--trainer.callbacks.step", "8"]
    output([*argv, "--trainer.callbacks.divergence_threshold", "1e9", *kill], tmp_path, status=-9)
    shown = output([*argv, "--ckpt_path", "last"], tmp_path)
    assert "ended early at step 16: train_loss is beyond 0" in " ".join(shown.split())


def test_after_a_failed_fit_the_module_has_its_own_hooks(tmp_path):
    """Trained again in the same process, as in a notebook, its on_train_batch_end was never called."""

    class Failing(BoringModel):
        steps = 0

        def training_step(self, batch, batch_idx):
            if self.steps == 1:
                raise RuntimeError("once")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            self.steps += 1

    module = Failing()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"accelerator": "cpu", "max_steps": 3, "limit_val_batches": 0, "default_root_dir": tmp_path, **quiet}
    with pytest.raises(RuntimeError, match="once"):
        Trainer(**settings, callbacks=[Resuming()]).fit(module)
    module.steps = 2
    Trainer(**settings, callbacks=[Resuming()]).fit(module)
    assert module.steps == 5
