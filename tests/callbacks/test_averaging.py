"""Averaged weights: their values, that training does not use them, and that everything else does."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule

from lit_linformer.callbacks import Averaging
from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.tasks.sharding import ShardedStrategy
from lit_linformer.utils.files import read_rows
from tests.helpers import Descending, assert_same, fit, load, output, plain_trainer, read_log


def training(step=0):
    return SimpleNamespace(global_step=step, ckpt_path=None, state=SimpleNamespace(fn="fit"))


def test_the_average_is_that_of_the_weights_after_each_step():
    module, trainer = LightningModule(), training()
    module.weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    averaging, seen, expected = Averaging(decay=0.22), [], module.weight.detach().clone()
    averaging.on_fit_start(trainer, module)
    for batch in range(8):
        averaging.on_train_batch_start(trainer, module)
        trainer.global_step = batch // 2  # every step has two batches
        if batch % 2 == 0 and batch:
            module.weight.data.normal_()
            seen.append(module.weight.detach().clone())
        averaging.on_train_batch_end(trainer, module, None, None, batch)
    for decay, weight in zip((1 / 10, 2 / 11, 0.22), seen, strict=True):  # 3 / 12 is more
        expected = decay * expected + (1 - decay) * weight
    own = module.weight.detach().clone()
    averaging.on_validation_epoch_start(trainer, module)
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-12, atol=1e-12)
    averaging.on_validation_end(trainer, module)
    assert torch.equal(module.weight, own)
    for inside in (averaging.on_validation_end, averaging.on_train_end):  # whichever weights the module holds
        inside(trainer, module)
        checkpoint = {"state_dict": dict(module.state_dict())}
        averaging.on_save_checkpoint(trainer, module, checkpoint)
        assert torch.equal(checkpoint["training_weights"]["weight"], own)
        torch.testing.assert_close(checkpoint["state_dict"]["weight"], expected, rtol=1e-12, atol=1e-12)


def test_the_average_of_half_precision_is_float32():
    module, trainer = LightningModule(), training()
    module.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    averaging = Averaging(decay=0.999)
    averaging.on_fit_start(trainer, module)
    module.weight.data.fill_(1.5)
    for trainer.global_step in range(1, 2001):
        averaging.on_train_batch_end(trainer, module, None, None, trainer.global_step)
        if trainer.global_step % 500 == 0:  # a validation loses none of its precision
            averaging.on_validation_epoch_start(trainer, module)
            assert module.weight.dtype == torch.bfloat16 and module.weight[0] > 1
            averaging.on_validation_end(trainer, module)
    checkpoint = {"state_dict": dict(module.state_dict())}
    averaging.on_save_checkpoint(trainer, module, checkpoint)
    share = 1.0
    for update in range(2000):
        share *= min(0.999, (1 + update) / (10 + update))
    assert checkpoint["state_dict"]["weight"][0].item() == pytest.approx(1.5 - 0.5 * share, rel=1e-5)
    assert checkpoint["training_weights"]["weight"][0] == 1.5


def test_a_weight_that_two_modules_share_has_one_average():
    module, trainer = LightningModule(), training(1)
    module.one, module.two = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    module.two.weight = module.one.weight
    averaging = Averaging(decay=0.5)
    averaging.on_fit_start(trainer, module)
    module.one.weight.data.add_(1.0)
    averaging.on_train_batch_end(trainer, module, None, None, 0)
    for inside in (averaging.on_validation_end, averaging.on_train_end):  # whichever weights the module holds
        inside(trainer, module)
        checkpoint = {"state_dict": dict(module.state_dict())}
        averaging.on_save_checkpoint(trainer, module, checkpoint)
        for weights in (checkpoint["state_dict"], checkpoint["training_weights"]):
            assert torch.equal(weights["one.weight"], weights["two.weight"])


def test_a_module_keeps_the_average_and_a_second_fit_begins_anew(tmp_path):
    def fit(module, **more):
        trainer = plain_trainer(tmp_path, averaging, limit_val_batches=1, **more)
        trainer.fit(module)
        return trainer

    averaging, average = Averaging(decay=0.5), 0.0
    for step, decay in enumerate((1 / 10, 2 / 11, 3 / 12, 4 / 13), 1):
        average = decay * average - (1 - decay) * step
    for module in (Descending(), Descending()):
        fit(module).validate(module, verbose=False)
        assert module.validated == pytest.approx([0.0, average, average])  # before training, in it, after it
        assert module.weight.item() == pytest.approx(average)
    trainer = plain_trainer(tmp_path, Averaging(), limit_val_batches=1)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(tmp_path / "validated.ckpt")  # the weights alone, for nothing was averaged
    assert load(tmp_path / "validated.ckpt")["state_dict"]["weight"].item() == module.weight.item()
    fit(module, num_sanity_val_steps=0)  # once more, from the average
    assert module.weight.item() == pytest.approx(2 * average)


@pytest.mark.slow
def test_training_is_the_same_and_what_reads_the_run_sees_the_average(tiny, tmp_path):
    # With averaging, the perplexity at the end of a run is that of last.ckpt as validate, export and predict read it.
    tiny = [*tiny, "--last.validation", "true"]
    averaging = ["--trainer.callbacks+", "Averaging", "--trainer.callbacks.decay", "0.9"]
    assert fit(tiny, "plain", tmp_path / "plain") == 0
    assert fit(tiny, "run", tmp_path / "run", *averaging) == 0
    assert read_log(tmp_path / "plain.0") == read_log(tmp_path / "run.0")
    plain, averaged = (load(tmp_path / f"runs/{name}/checkpoints/last.ckpt") for name in ("plain", "run"))
    assert_same(averaged["training_weights"], {name: plain["state_dict"][name] for name in averaged["training_weights"]})
    assert not torch.equal(averaged["state_dict"]["net.encoder.E.weight"], plain["state_dict"]["net.encoder.E.weight"])
    found = {name: read_rows(tmp_path / f"runs/{name}/perplexity.csv")[-1] for name in ("plain", "run")}
    assert found["plain"]["perplexity"] != found["run"]["perplexity"]
    shown = output(["validate", "--config", "runs/run/config.yaml", "--ckpt_path", "last"], tmp_path)
    assert f"{float(found['run']['perplexity']):.2f}" in shown
    weights = open_checkpoint(
        tmp_path / "runs/run/checkpoints/last.ckpt"
    ).net.state_dict()  # as for export, predict and --model.pretrained
    assert_same(dict(weights), {name: averaged["state_dict"][f"net.{name}"] for name in weights})
    # Without the callback the run continues from its own weights; if it is added now, the average starts from the current ones.
    more = ["--ckpt_path", "last", "--trainer.max_steps", "14"]
    assert fit(tiny, "plain", tmp_path / "plain", *more, *averaging) == 0
    assert fit([*tiny], "run", tmp_path / "run", *more, "--trainer.callbacks", "null") == 0
    assert read_log(tmp_path / "plain.0") == read_log(tmp_path / "run.0")


class Partial(LightningModule):
    """Its state dict leaves out what never changes, as that of an adapter beside a large frozen model."""

    def __init__(self):
        super().__init__()
        self.frozen, self.learns = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2)

    def state_dict(self, *args, **kwargs):
        return {name: weight for name, weight in super().state_dict(*args, **kwargs).items() if "frozen" not in name}


def test_what_a_module_leaves_out_of_its_state_dict_stays_out():
    module, trainer, averaging = Partial(), training(), Averaging()
    averaging.on_fit_start(trainer, module)
    checkpoint = {"state_dict": module.state_dict()}
    averaging.on_save_checkpoint(trainer, module, checkpoint)
    assert checkpoint["state_dict"].keys() == checkpoint["training_weights"].keys() == {"learns.weight", "learns.bias"}


def test_a_decay_that_is_none():
    with pytest.raises(ValueError, match=r"Averaging.decay is 1.0; allowed: at least 0, less than 1"):
        Averaging(1.0)


def test_weights_that_are_divided_are_not_averaged():
    trainer = SimpleNamespace(strategy=ShardedStrategy())
    with pytest.raises(ValueError, match=r"trainer.callbacks has Averaging, but trainer.strategy divides .* allowed: ddp"):
        Averaging().setup(trainer, LightningModule(), "fit")
