"""A loss that is not finite ends the run within a step, and leaves no trace in a checkpoint, best value or file."""

import json
import math
import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_linformer.callbacks import Finite, LastCheckpoint
from lit_linformer.tasks import MLM
from lit_linformer.tasks.perplexity import Perplexity
from lit_linformer.utils.files import json_text
from lit_linformer.utils.weights import all_finite
from tests.helpers import after, load, output, plain_trainer, slow
from tests.test_distributed import FORKED

CHECKPOINTS = "runs/tiny/checkpoints"


def spoil(monkeypatch, batch, rank=0, by=math.nan):
    """Makes the loss of one process non-finite from that batch on."""
    method = MLM.training_loss

    def loss(module, *arguments):
        bad = module.batches_seen >= batch and module.global_rank == rank
        return method(module, *arguments) * (by if bad else 1.0)

    monkeypatch.setattr(MLM, "training_loss", loss)


def strict(path):
    """Reads JSON that any reader accepts."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    "extra, batch, step",
    [
        ([], 9, 9),
        slow(["--trainer.precision", "bf16-mixed", "--trainer.gradient_clip_val", "null"], 10, 10),
        slow(["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "21"], 26, 9),
        slow(FORKED, 8, 8),
    ],
    ids=["plain", "bf16, in a step that is to be saved", "accumulating", "one of two processes"],
)
def test_a_loss_that_is_nan_ends_the_run_and_it_goes_on_from_before(extra, batch, step, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        spoil(patched, batch, rank=1 if extra is FORKED else 0)
        lines = output(["fit", *tiny, *extra], tmp_path, status=2).splitlines()
    error = lines[-1]
    assert error.startswith("error: ") and f"the loss is nan at step {step}; the last good checkpoint" in error
    for word in ("last.ckpt, is of step 5; allowed: --ckpt_path last", "a lower model.lr (now 0.01)", "gradient_clip_val"):
        assert word in error
    assert not any("Traceback" in line for line in lines)
    last = load(tmp_path / CHECKPOINTS / "last.ckpt")
    assert last["global_step"] == 5 and all_finite([*last["state_dict"].values()])
    assert [path.name.split("-")[1] for path in (tmp_path / CHECKPOINTS).glob("best*")] == ["00000007"]
    assert not (tmp_path / "runs/tiny/result.json").exists()
    output(["fit", *tiny, *extra, "--ckpt_path", "last", "--model.lr", "0.001"], tmp_path)
    assert load(tmp_path / CHECKPOINTS / "last.ckpt")["global_step"] == 12


def test_what_is_wrong_from_the_first_step_on_is_not_put_down_to_the_optimiser(tiny, tmp_path, monkeypatch):
    spoil(monkeypatch, 1)
    error = output(["fit", *tiny], tmp_path, status=2).splitlines()[-1]
    assert "the loss is nan at step 1; no checkpoint was written before it; allowed: a run without what is wrong" in error
    assert "forward of your own" in error and "model.lr" not in error and "gradient_clip_val" not in error


def test_a_learning_rate_that_is_too_high_leaves_no_checkpoint(tiny, tmp_path):
    # Weights grow a million-fold in each step: AdamW multiplies them by 1 - lr · weight_decay.
    words = ["--model.lr", "1e4", "--model.weight_decay", "100", "--trainer.max_steps", "100", "--last.every_n_steps", "100"]
    error = output(["fit", *tiny, *words, "--trainer.val_check_interval", "100"], tmp_path, status=2).splitlines()[-1]
    assert re.search(r"the loss is (nan|inf) at step \d+; no checkpoint was written before it", error)
    assert "allowed: a lower model.lr (now 10000.0)" in error
    assert not [*(tmp_path / "runs").rglob("*.ckpt")]


def test_gradients_that_are_infinite_reach_no_checkpoint(tiny, tmp_path, monkeypatch):
    """The loss is still finite when their step is about to be saved."""

    def overflow(module):
        if module.batches_seen == 9:
            module.net.encoder.tokens.weight.grad.fill_(math.inf)

    after(monkeypatch, MLM, "on_after_backward", overflow)
    error = output(["fit", *tiny, "--last.every_n_steps", "3"], tmp_path, status=2).splitlines()[-1]
    assert "weights, or AdamW's averages, are not finite after step 9; the last good checkpoint" in error
    assert load(tmp_path / CHECKPOINTS / "last.ckpt")["global_step"] == 6


def test_a_metric_that_is_not_finite_is_told_and_never_the_best(tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Perplexity, "compute", lambda self: torch.tensor(math.inf))
        shown = output(["fit", *tiny, "--trainer.max_steps", "8"], tmp_path)
    assert "warning: val/perplexity is inf at step 7, although all weights are finite" in shown
    assert not [*(tmp_path / CHECKPOINTS).glob("best*")]
    result = strict(tmp_path / "runs/tiny/result.json")
    assert result["metrics"]["val/perplexity"] is None and "best_step" not in result
    output(["fit", *tiny, "--trainer.max_steps", "15", "--ckpt_path", "last"], tmp_path)
    assert [path.name.split("-")[1] for path in (tmp_path / CHECKPOINTS).glob("best*")] == ["00000014"]
    result = strict(tmp_path / "runs/tiny/result.json")
    assert result["best_step"] == 14 and result["best_metrics"]["val/perplexity"] < 300
    rows = (tmp_path / "runs/tiny/perplexity.csv").read_text().splitlines()
    assert rows[2].split(",")[3:5] == ["inf", "inf"] and rows[3].split(",")[3] == rows[3].split(",")[4] != "inf"


class Overflowing(LightningModule):
    """A weight whose loss, or whose gradient, is infinite in some steps."""

    def __init__(self, losses=(), gradients=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.losses, self.gradients = losses, gradients

    def training_step(self, batch, index):
        return (self.weight * batch).sum() * (math.inf if index in self.losses else 1.0)

    def on_after_backward(self):
        if self.trainer.global_step in self.gradients:
            self.weight.grad.fill_(math.inf)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=None)


@pytest.mark.parametrize("losses, gradients, ends", [((3,), (5, 6, 7), 8), ((3, 4), (), 5)], ids=["skips", "stays"])
def test_with_a_gradient_scaler_only_a_loss_that_stays_infinite_ends_the_run(losses, gradients, ends, tmp_path):
    """16-mixed skips a step whose loss or gradients overflow."""
    module = Overflowing(losses, gradients)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, plugins=[scaled], callbacks=[Finite(), LastCheckpoint(2)], logger=False,
        enable_checkpointing=True, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    if ends == 8:
        trainer.fit(module)
        assert load(tmp_path / "checkpoints/last.ckpt")["global_step"] == 8
    else:
        with pytest.raises(ValueError, match=r"the loss is infinite at step 5; .*trainer.precision bf16-mixed or 32-true"):
            trainer.fit(module)
    assert trainer.global_step == ends and all_finite([module.weight])


def test_a_fit_after_one_that_ended_watches_its_own_losses(tmp_path):
    finite = Finite()
    with pytest.raises(ValueError, match="the loss is infinite at step 4"):
        plain_trainer(tmp_path, finite).fit(Overflowing(losses=(3,)))
    plain_trainer(tmp_path, finite).fit(Overflowing())
    with pytest.raises(ValueError, match="the loss is infinite at step 6"):
        plain_trainer(tmp_path, finite).fit(Overflowing(losses=(5,)))


class TwoLosses(Overflowing):
    """Manual optimisation with two losses a step, of which the first overflows."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.manual_backward((self.weight * batch).sum())
        optimizer.step()


def test_every_loss_of_a_step_is_watched(tmp_path):
    with pytest.raises(ValueError, match="the loss is infinite at step 4"):
        plain_trainer(tmp_path, Finite()).fit(TwoLosses(losses=(3,)))


def test_all_finite_looks_at_every_element_of_every_kind():
    whole = [torch.ones(3, dtype=torch.bfloat16), torch.arange(4), torch.zeros(0), "text", torch.full((2,), 65504.0).half()]
    assert all_finite(whole) and all_finite([])
    for bad in (math.nan, math.inf, -math.inf):
        assert not all_finite([*whole, torch.tensor([1.0, bad], dtype=torch.bfloat16)])


def test_json_has_null_for_what_is_not_finite():
    content = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": "nan"}
    assert json.loads(json_text(content)) == {"a": [1.5, None, [None, {"b": None}]], "c": "nan"}
