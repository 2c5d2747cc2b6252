"""Perplexity: token-weighted, in float64, equal on one and two processes."""

import pytest
import torch

from lit_linformer.tasks.perplexity import Mean, Perplexity
from lit_linformer.tasks.scores import Scores
from lit_linformer.utils.files import read_rows
from tests.helpers import run_forked


def test_weights_by_tokens_not_by_batches():
    metric = Perplexity()
    metric.update(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[5, 5, 5]]))
    metric.update(torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([[5, -100, -100]]))
    assert metric.compute().item() == pytest.approx(torch.tensor(2.0).exp().item())  # 8 nats over 4 tokens


def test_stays_finite_and_exact_where_softmax_then_log_does_not():
    metric = Perplexity()
    logits = torch.tensor([[0.0, -200.0]])
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor([1]), reduction="none")
    metric.update(nll[None], torch.tensor([[1]]))
    assert metric.compute().item() == pytest.approx(torch.tensor(200.0, dtype=torch.float64).exp().item())


def test_a_million_small_batches_lose_nothing():
    metric = Perplexity()
    nll, labels = torch.full((1, 1000), 3.1), torch.ones(1, 1000, dtype=torch.int64)
    for _ in range(1000):
        metric.update(nll, labels)
    assert metric.compute().log().item() == pytest.approx(float(nll[0, 0]), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_of_half_precision_sums_as_exactly(dtype):
    """Modules converted as by bf16-true and 16-true."""
    module = torch.nn.ModuleDict({"perplexity": Perplexity(), "mean": Mean(), "scores": Scores(["accuracy"], 2)}).to(dtype)
    for _ in range(2):  # again after a reset, which restores the defaults
        for _ in range(300):
            module["perplexity"].update(torch.full((1, 100), 7.7), torch.ones(1, 100, dtype=torch.int64))
            module["mean"].update(torch.ones(100), torch.full((100,), 1.0))
        assert module["perplexity"].compute().log().item() == pytest.approx(7.7, rel=1e-6)
        assert module["mean"].weight == 30_000 and module["mean"].compute() == 1
        assert module["scores"].loss.dtype == torch.float64
        for metric in module.values():
            metric.reset()


def test_training_may_follow_a_validation_of_its_own():
    """Trainer.validate resets metrics in inference mode, in which fit doesn't validate."""
    perplexity, mean = Perplexity(), Mean()
    with torch.inference_mode():
        perplexity.reset()
        mean.reset()
    perplexity.update(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int64))
    mean.update(torch.ones(3))
    assert perplexity.compute().log() == 1 and mean.compute() == 1


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_seen_is_nan():
    assert Perplexity().compute().isnan()


# One process and two agree in float64; in float32 AdamW's first steps, which divide a gradient by its own size, amplify
# rounding errors of small ones, and some processors round a row differently next to other rows.
EXACT = ["--trainer.precision", "64-true"]


def perplexities(path):
    return [row["perplexity"] for row in read_rows(path)]


def test_equal_on_one_and_two_processes(tiny, tmp_path):
    """Before training both runs have the same model: the curve's first value is a sum over one rank or two."""
    odd = [*EXACT, "--data.batch_size", "3", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    assert run_forked(["fit", *tiny, "--name", "one", *odd]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    assert run_forked(["fit", *tiny, "--name", "two", *odd, *two]) == 0
    one, two = (perplexities(tmp_path / f"runs/{name}/perplexity.csv")[0] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-9)


def test_two_processes_train_like_one_on_the_joined_batch(tiny, tmp_path):
    still = [*EXACT, "--model.encoder.dropout", "0", "--model.encoder.attention_dropout", "0"]
    assert run_forked(["fit", *tiny, "--name", "one", *still, "--data.batch_size", "8"]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    assert run_forked(["fit", *tiny, "--name", "two", *still, "--data.batch_size", "4", *two]) == 0
    one, two = (perplexities(tmp_path / f"runs/{name}/perplexity.csv") for name in ("one", "two"))
    assert len(one) == 2 and two == pytest.approx(one, rel=1e-9)


def test_bf16_true_has_the_perplexity_of_bf16_mixed(tiny, tmp_path):
    """For one model, before training: the first value of each curve."""
    for precision in ("bf16-true", "bf16-mixed"):
        argv = ["fit", *tiny, "--name", precision, "--trainer.precision", precision, "--trainer.max_steps", "1"]
        assert run_forked(argv) == 0
    true, mixed = (perplexities(tmp_path / f"runs/{name}/perplexity.csv")[0] for name in ("bf16-true", "bf16-mixed"))
    assert true == pytest.approx(mixed, rel=0.02)
