"""Scores compared with scikit-learn's and SciPy's; the same for any batches, ranks and filler rows."""

import math
import multiprocessing
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from sklearn import metrics as sk
from torch.nn import functional

from lit_linformer.tasks.scores import Scores, score, task_loss
from tests.helpers import HANGS

CLASSIFICATION = ("accuracy", "f1", "macro_f1", "matthews")
SEVERAL = ("micro_f1", "macro_f1", "accuracy")
EXPECTED = {
    "accuracy": lambda p, t, c: sk.accuracy_score(t, p),
    "f1": lambda p, t, c: sk.f1_score(t, p, average="binary" if c == 2 else "macro"),
    "macro_f1": lambda p, t, c: sk.f1_score(t, p, average="macro"),
    "matthews": lambda p, t, c: sk.matthews_corrcoef(t, p),
    "pearson": lambda p, t, c: stats.pearsonr(p, t).statistic,
    "spearman": lambda p, t, c: stats.spearmanr(p, t).statistic,
}


def random_set(num_labels, rows=301, seed=0):
    """Logits and labels, about half of which agree."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, num_labels, generator=generator)
    if num_labels == 1:  # ties as in STS-B, whose targets have few distinct values
        return logits, (logits[:, 0] + torch.randn(rows, generator=generator)).mul(2).round() / 2
    labels = torch.randint(0, num_labels, (rows,), generator=generator)
    agree = torch.rand(rows, generator=generator) < 0.5
    return logits, torch.where(agree, logits.argmax(1), labels)


@pytest.mark.parametrize("num_labels", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_scikit_learn_and_scipy(num_labels, seed):
    logits, labels = random_set(num_labels, seed=seed)
    names = ("pearson", "spearman") if num_labels == 1 else CLASSIFICATION
    predictions = logits[:, 0] if num_labels == 1 else logits.argmax(1)
    for name in names:
        expected = EXPECTED[name](predictions.numpy().astype(np.float64), labels.numpy(), num_labels)
        assert score(name, predictions, labels, num_labels) == pytest.approx(expected, abs=1e-6), name


def several(num_labels, rows=301, seed=0):
    """Logits and labels of rows that may have any number of labels; no row has the last one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, num_labels, generator=generator)
    labels = (logits + torch.randn(rows, num_labels, generator=generator) > 0.5).float()
    labels[:, -1] = 0
    return logits, labels


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_several_labels_are_scored_as_by_scikit_learn(num_labels):
    logits, labels = several(num_labels)
    told, gold = (logits > 0).numpy(), labels.numpy()
    expected = {f"{kind}_f1": sk.f1_score(gold, told, average=kind, zero_division=0) for kind in ("micro", "macro")}
    for name, value in (expected | {"accuracy": sk.accuracy_score(gold, told)}).items():
        assert score(name, logits > 0, labels, num_labels) == pytest.approx(value, abs=1e-6), name
    scores = Scores(SEVERAL, num_labels, several_labels=True, keep_logits=True)
    fill(scores, logits, labels, list(range(301))[::-1])
    found = scores.results()
    assert torch.equal(found["predictions"].bool(), logits > 0) and torch.equal(found["targets"].float(), labels)
    loss = functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert found["scores"]["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert torch.allclose(task_loss(logits, labels, several_labels=True).double(), loss)
    scores = Scores(SEVERAL, num_labels, several_labels=True)
    scores.update(logits[:1], labels[:1], torch.tensor([7]))
    assert scores.results()["predictions"].shape == (1, num_labels)
    with pytest.raises(
        ValueError, match=r"labels of a batch have the shape \(4,\); allowed: \(4, .\), a 0 or 1 for each class"
    ):
        task_loss(logits[:4], torch.zeros(4), several_labels=True)
    with pytest.raises(ValueError, match=r"metric is 'f1'; allowed where a row may have several labels: micro_f1, macro_f1"):
        score("f1", logits > 0, labels, num_labels)


@pytest.mark.parametrize("constant", [0, 1])
def test_one_class_for_all_scores_as_scikit_learn_has_it(constant):
    _, labels = random_set(2)
    predictions = torch.full_like(labels, constant)
    for name in CLASSIFICATION:
        expected = EXPECTED[name](predictions.numpy(), labels.numpy(), 2)
        assert score(name, predictions, labels, 2) == pytest.approx(expected, abs=1e-6), name
    assert score("pearson", torch.full((9,), 0.5), torch.arange(9.0), 1) == 0.0


def test_own_tables_score_does_not_depend_on_the_order_of_labels():
    """val/score chooses the best checkpoint: `[spam, ham]` and `[ham, spam]` must choose the same one."""
    metrics = yaml.safe_load(Path("conf/finetune/own.yaml").read_text())["data"]["init_args"]["metrics"]
    predictions, labels = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 1])
    both = {name: [score(name, predictions, labels, 2), score(name, 1 - predictions, 1 - labels, 2)] for name in metrics}
    assert all(one == pytest.approx(other) for one, other in both.values()), both


def fill(scores, logits, labels, rows):
    """Batches of 8 as a loader gives them to one rank; the last is filled up with rows that do not count."""
    for start in range(0, len(rows), 8):
        index = torch.tensor(rows[start : start + 8])
        filler = 8 - len(index)
        batch = torch.cat([index, torch.zeros(filler, dtype=torch.int64)])
        index = torch.cat([index, torch.full((filler,), -1)])
        scores.update(logits[batch], None if labels is None else labels[batch], index)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_order_and_fillers_do_not_matter(num_labels):
    logits, labels = random_set(num_labels, rows=45)
    names = ("pearson", "spearman") if num_labels == 1 else CLASSIFICATION
    scores = Scores(names, num_labels)
    fill(scores, logits, labels, list(range(45))[::-1])
    result = scores.compute()
    expected = logits[:, 0] if num_labels == 1 else logits.argmax(1)
    assert torch.equal(result["predictions"].float(), expected.float()) and torch.equal(
        result["targets"].float(), labels.float()
    )
    values = [score(name, expected, labels, num_labels) for name in names]
    assert [result["scores"][name] for name in names] == values
    assert result["scores"]["score"] == pytest.approx(sum(values) / len(values))
    loss = functional.mse_loss(expected, labels) if num_labels == 1 else functional.cross_entropy(logits, labels)
    assert result["scores"]["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_of_outputs_that_are_no_numbers_there_is_no_score(num_labels):
    logits, labels = random_set(num_labels, rows=20)
    logits[3] = math.nan
    scores = Scores(["spearman"] if num_labels == 1 else ["accuracy"], num_labels)
    fill(scores, logits, labels, list(range(20)))
    assert all(math.isnan(value) for value in scores.compute()["scores"].values())


def test_without_labels_there_are_predictions_and_no_scores():
    logits, _ = random_set(2, rows=20)
    scores = Scores(["accuracy"], 2)
    fill(scores, logits, None, list(range(20)))
    result = scores.compute()
    assert result["targets"] is None and result["scores"] == {} and len(result["predictions"]) == 20


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_batch_does_not_wait_for_the_gpu(num_labels):
    """Tensors of the meta device have no numbers: what looks at one, as a selection of the real rows does, is an error."""
    logits, labels = random_set(num_labels, rows=4)
    scores = Scores(("spearman",) if num_labels == 1 else CLASSIFICATION, num_labels, keep_logits=True).to("meta")
    scores.update(logits.to("meta"), labels.to("meta"), torch.tensor([2, 0, 1, -1], device="meta"))
    assert [tuple(found.shape) for found in scores.logits] == [(4, num_labels)]


def of_kind(kind, rows):
    """Scores and a set of rows with one label each, or with several."""
    if kind == "several":
        return Scores(SEVERAL, 3, several_labels=True), *several(3, rows=rows)
    return Scores(CLASSIFICATION, 3), *random_set(3, rows=rows)


def one_rank(rank, port, rows, kind, queue):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    scores, logits, labels = of_kind(kind, rows)
    # A rank without rows of its own still gets a batch: a filler.
    fill(scores, logits, labels, list(range(rank, rows, 2)) or [])
    if rank >= rows:
        scores.update(logits[:1], labels[:1], torch.tensor([-1]))
    result = scores.compute()
    queue.put((rank, result["scores"], result["predictions"].tolist()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("rows", "kind"), [(301, "one"), (2, "one"), (1, "one"), (301, "several"), (1, "several")])
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_two_processes_score_like_one(rows, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=one_rank, args=(rank, port, rows, kind, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=HANGS) for _ in processes]
    for process in processes:
        process.join(HANGS)
        assert process.exitcode == 0
    alone, logits, labels = of_kind(kind, rows)
    fill(alone, logits, labels, list(range(rows)))
    expected = alone.compute()
    for _, scores, predictions in results:
        assert scores == pytest.approx(expected["scores"], abs=1e-12)
        assert predictions == expected["predictions"].tolist()


@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_set_of_one_row_is_a_set(num_labels):
    scores = Scores(("pearson",) if num_labels == 1 else ("accuracy",), num_labels, keep_logits=True)
    scores.update(torch.ones(1, num_labels), torch.zeros(1, dtype=torch.int64), torch.tensor([7]))
    found = scores.results()
    assert found["logits"].shape == (1, num_labels) and found["index"].tolist() == [7]
    assert found["predictions"].shape == found["targets"].shape == (1,)
