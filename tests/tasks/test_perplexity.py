"""Perplexity: token-weighted, in float64, equal on one and two processes."""

import csv

import pytest
import torch

from lit_linformer.tasks.perplexity import Perplexity
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


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_seen_is_nan():
    assert Perplexity().compute().isnan()


def perplexities(path):
    with open(path) as file:
        return [float(row["perplexity"]) for row in csv.DictReader(file)]


def test_equal_on_one_and_two_processes(tiny, tmp_path):
    """Before training the two runs are the same model: the curve's first value is a sum over one or two ranks."""
    odd = ["--data.batch_size", "3", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    assert run_forked(["fit", *tiny, "--name", "one", *odd]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    assert run_forked(["fit", *tiny, "--name", "two", *odd, *two]) == 0
    one, two = (perplexities(tmp_path / f"runs/{name}/perplexity.csv")[0] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-9)


def test_two_processes_train_like_one_on_the_joined_batch(tiny, tmp_path):
    still = ["--model.encoder.dropout", "0", "--model.encoder.attention_dropout", "0"]
    assert run_forked(["fit", *tiny, "--name", "one", *still, "--data.batch_size", "8"]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    assert run_forked(["fit", *tiny, "--name", "two", *still, "--data.batch_size", "4", *two]) == 0
    one, two = (perplexities(tmp_path / f"runs/{name}/perplexity.csv") for name in ("one", "two"))
    assert len(one) == 2 and two == pytest.approx(one, rel=1e-4)
