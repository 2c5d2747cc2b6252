"""Several processes: gradients, perplexity and token order equal those of one; a batch size is given once and divided."""

import json
import math
import multiprocessing
import os
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import Dataset

from lit_linformer.callbacks.checkpoint import BestCheckpoint
from lit_linformer.data import PretrainingData
from lit_linformer.data.loader import EvaluationLoader, ResumableLoader
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.model.linformer import SHARINGS
from lit_linformer.tasks.compiling import compile_training
from lit_linformer.utils.environment import lacks_bfloat16
from lit_linformer.utils.files import read_rows
from tests.helpers import HANGS, assert_same, fit, load, output, read_log, run_forked, slow, untimed
from tests.model.mechanisms import IMAGE, MECHANISMS

ROOT = Path(__file__).parents[1]
OVERLAY = ROOT / "conf/trainer/ddp.yaml"
# The overlay, except where and how its processes start: forks of the test, for speed.
FORKED = ["--config", str(OVERLAY), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
FORKED += ["--trainer.strategy.init_args.start_method", "fork"]
# Without dropout, which each process draws for itself, and in float64, the same batch gives the same step.
EXACT = "--model.encoder.dropout 0 --model.encoder.attention_dropout 0 --trainer.precision 64-true".split()
GLOBAL = ["--data.global_batch_size", "8"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fork_two(work, *args) -> None:
    """work(rank, *args) in two processes of a gloo group."""
    port = free_port()

    def process(rank):
        group = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2, "timeout": timedelta(seconds=HANGS)}
        dist.init_process_group("gloo", **group)
        try:
            work(rank, *args)
        finally:
            dist.destroy_process_group()

    processes = [multiprocessing.get_context("fork").Process(target=process, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS)
    assert [process.exitcode for process in processes] == [0, 0]


# Gradients

KINDS = [{"attention": "full"}, {"attention": "lookup"}, *({"sharing": sharing} for sharing in SHARINGS)]
KINDS += [{"projection": kind} for kind in ("conv", "mean", "gaussian")]
KINDS += [IMAGE, *MECHANISMS.values()]
MODELS = [{**kind, "activation_checkpointing": on} for kind in KINDS for on in (False, True)]


class Loss(nn.Module):
    """For DistributedDataParallel to wrap: its forward is the loss."""

    def __init__(self, settings: dict):
        super().__init__()
        torch.manual_seed(0)
        shape = {
            "vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16,
            "projection_dim": 4, "local_width": 3, "norm": "pre", "dropout": 0.0, "attention_dropout": 0.0,
        }  # fmt: skip
        self.net = MaskedLanguageModel(EncoderConfig(**shape | settings)).double()

    def forward(self, input_ids, positions, labels):
        return self.net.loss(input_ids, positions, labels)


def batches() -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((16, 50), (4, 16), (4, 50))
    return [tuple(torch.randint(0, high, (6, size), generator=generator) for size, high in shapes) for _ in range(2)]


class CompiledLoss(Loss):
    """The same as model.compile runs it: the compiler's graphs, but without its code generator."""

    def __init__(self, settings: dict):
        super().__init__(settings)
        torch._dynamo.reset()  # one function for many models
        with patch("torch.compile", partial(torch.compile, backend="aot_eager", fullgraph=True)):
            compile_training(self.net)


def two_steps(model: nn.Module, rank: int = 0, world_size: int = 1) -> list[torch.Tensor]:
    """Gradients of both steps, and the weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for batch in batches():
        optimizer.zero_grad()
        model(*(part[rank::world_size] for part in batch)).backward()
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]
        optimizer.step()
    return seen + [parameter.detach() for parameter in model.parameters()]


def models_of(kind: type[Loss]) -> list[dict]:
    if kind is Loss:
        return MODELS
    # aot_eager gets the strides of a gradient wrong there; inductor, the users' backend, does not (tests/tasks)
    apart = MECHANISMS["long-short"].items()
    return [settings for settings in MODELS if settings["activation_checkpointing"] and not apart <= settings.items()]


def train_in_two(rank: int, folder: Path, kind: type[Loss]) -> None:
    strategy = yaml.safe_load(OVERLAY.read_text())["trainer"]["strategy"]["init_args"]
    assert strategy.pop("timeout") and strategy["find_unused_parameters"] is False
    for number, settings in enumerate(models_of(kind)):
        model = nn.parallel.DistributedDataParallel(kind(settings), **strategy)
        torch.save(two_steps(model, rank, 2), folder / f"{number}.{rank}")


@pytest.mark.parametrize("kind", [Loss, slow(CompiledLoss)])
def test_two_processes_have_the_gradients_of_one_with_the_joined_batch(kind, tmp_path):
    fork_two(train_in_two, tmp_path, kind)
    for number, settings in enumerate(models_of(kind)):
        one = two_steps(Loss(settings))
        two = [load(tmp_path / f"{number}.{rank}") for rank in range(2)]
        assert_same(two[0], two[1])
        assert len(one) == len(two[0]) and any(gradient.abs().max() > 1e-3 for gradient in one)
        for a, b in zip(one, two[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text, s=settings: f"{s}: {text}")


# Whole runs


def joined(log: Path, processes: int, accumulate: int) -> list[list[str]]:
    """For each optimiser step, all processes' rows with masked tokens and labels; sorted, since ranks interleave."""
    logs = [read_log(log.with_name(f"{log.name}.{rank}")) for rank in range(processes)]
    steps: dict[int, list[str]] = {}
    for lines in logs:
        for batch, line in lines.items():
            inputs = torch.tensor(line["inputs"]).view(-1, 32)
            labels = torch.tensor(line["labels"]).view(len(inputs), -1)
            rows = [str(row) for row in torch.cat([inputs, labels], 1).tolist()]
            steps.setdefault((batch - 1) // accumulate, []).extend(rows)
    return [sorted(steps[step]) for step in sorted(steps)]


def assert_equal_runs(folder: Path, a: str, b: str) -> None:
    tolerance = 1e-9
    one, two = (load(folder / f"runs/{name}/checkpoints/last.ckpt") for name in (a, b))
    assert one["global_step"] == two["global_step"] == 12 and one["seen"]["tokens"] == two["seen"]["tokens"]
    for name, weights in one["state_dict"].items():
        torch.testing.assert_close(weights, two["state_dict"][name], rtol=tolerance, atol=tolerance)
    curves = [untimed(folder / f"runs/{name}/perplexity.csv") for name in (a, b)]
    assert len(curves[0]) == len(curves[1]) == 2
    for row, other in zip(*curves, strict=True):
        assert row == pytest.approx(other, rel=tolerance)


@pytest.fixture
def exact(tiny):
    return [*tiny, *EXACT, *GLOBAL]


@pytest.mark.slow
def test_the_same_run_on_one_process_two_and_after_changing_from_one_to_the_other(exact, tmp_path):
    assert fit(exact, "one", tmp_path / "one") == 0  # accumulates 2 × 4
    assert fit([*exact, *FORKED], "two", tmp_path / "two") == 0
    assert_equal_runs(tmp_path, "one", "two")
    shown = (tmp_path / "two.out").read_text()  # the first process prints for both
    for once in ("model   ", "step 0  ", "step 12/12  ", "  best  ", "done   "):
        assert shown.count(once) == 1, shown
    steps = joined(tmp_path / "one", 1, 2)
    assert len(steps) == 12 and all(len(step) == 8 for step in steps)
    assert steps == joined(tmp_path / "two", 2, 1)

    # Killed in step 8, after last.ckpt of step 5; the fork's parent survives, so the exit status is not the kill's.
    assert fit([*exact, *FORKED], "down", tmp_path / "down", kill_at=8) != 0
    assert fit(exact, "down", tmp_path / "down1", "--ckpt_path", "last") == 0
    assert steps[5:] == joined(tmp_path / "down1", 1, 2)
    assert fit(exact, "up", tmp_path / "up", kill_at=15) != 0
    assert fit([*exact, *FORKED], "up", tmp_path / "up2", "--ckpt_path", "last") == 0
    assert steps[5:] == joined(tmp_path / "up2", 2, 1)
    for name in ("down", "up"):
        assert_equal_runs(tmp_path, "one", name)


# Sharded


def test_learning_rate_goes_with_the_root_of_the_batch(tiny, tmp_path):
    tiny = [*tiny, "--model.schedule", "constant", "--model.warmup_steps", "0", "--trainer.max_steps", "1"]
    for name, rows, extra in (("a", 8, GLOBAL), ("b", 12, ["--trainer.accumulate_grad_batches", "3"])):
        assert fit(tiny, name, tmp_path / name, *extra, "--model.lr_batch_size", "2") == 0
        rate = read_log(tmp_path / f"{name}.0")[1]["lr"]
        assert rate == pytest.approx(0.01 * (rows / 2) ** 0.5)


@pytest.mark.parametrize("epochs", ["null", "1"])
def test_validations_count_steps_beside_a_global_batch(epochs, tiny, tmp_path):
    often = ["--trainer.val_check_interval", "3", "--trainer.check_val_every_n_epoch", epochs, "--trainer.max_steps", "7"]
    assert run_forked(["fit", *tiny, *GLOBAL, *often]) == 0
    steps = [int(row["step"]) for row in read_rows(tmp_path / "runs/tiny/perplexity.csv")]
    assert steps == [0, 3, 6]


@pytest.mark.parametrize(
    "extra, told",
    [
        (
            "--data.global_batch_size 10",
            "data.global_batch_size is 10; allowed: a multiple of 4, data.batch_size = 4 × 1 device",
        ),
        (
            "--data.global_batch_size 8 --trainer.accumulate_grad_batches 3",
            "trainer.accumulate_grad_batches is 3 with data.global_batch_size = 8; allowed: 1",
        ),
        (
            "--trainer.val_check_interval 00:00:10:00 --trainer.devices 2 --trainer.strategy ddp_fork",
            "trainer.val_check_interval is '00:00:10:00'; allowed: steps or a share of an epoch",
        ),
        ("--model.lr_batch_size 0", "model.lr_batch_size is 0; allowed: 1 or more"),
        ("--trainer.precision 16-mixed", "trainer.precision is '16-mixed', which accelerator cpu lacks"),
    ],
)
def test_what_does_not_fit_is_one_line(extra, told, tiny, tmp_path):
    lines = output(["fit", *tiny, *extra.split()], tmp_path, status=2).splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:] and told in lines[-1]


# Overlays and other checks at the start


@pytest.mark.parametrize("name", ["ddp", "ddp_nodes", "gpu"])  # fsdp and slurm run in other tests
def test_overlay_runs_with_one_process(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    overlay = ["--config", str(ROOT / f"conf/trainer/{name}.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    nodes = ["--trainer.num_nodes", "1"] if name != "gpu" else []
    shown = output(["fit", *tiny, *overlay, *nodes, "--trainer.max_steps", "2"], tmp_path)
    assert ("bf16-mixed" if name == "gpu" else "32-true") in shown
    assert ("for which this processor has no units: 32-true is faster" in shown) == (name == "gpu" and lacks_bfloat16())


class Keys(Dataset):
    """Twelve rows: a batch is the numbers of its rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, keys: list[tuple[int, int]]) -> list[int]:
        return [index for _, index in keys]


def read_a_pass(rank: int, folder: Path) -> None:
    loaders = {"training": ResumableLoader(Keys(), batch_size=2), "validation": EvaluationLoader(Keys(), batch_size=2)}
    for name, loader in loaders.items():
        (folder / f"{name}-{rank}").write_text(json.dumps([row for batch in loader for row in batch]))
    (folder / f"state-{rank}").write_text(json.dumps(loaders["training"].state_dict()))


def test_loaders_of_ones_own_data_divide_the_rows_without_being_told_the_rank(tmp_path):
    fork_two(read_a_pass, tmp_path)
    for name in ("training", "validation"):
        first, second = (json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in range(2))
        assert len(first) == 6 and sorted(first + second) == list(range(12))
    assert {(tmp_path / f"state-{rank}").read_text() for rank in range(2)} == {'{"samples": 12}'}


def judge(rank: int, folder: Path) -> None:
    cpu, environment = torch.device("cpu"), LightningEnvironment()
    environment.set_world_size(2)
    trainer = SimpleNamespace(strategy=DDPStrategy(parallel_devices=[cpu, cpu], cluster_environment=environment))
    best = BestCheckpoint(dirpath=folder, monitor="val/own")
    found = [best.check_monitor_top_k(trainer, torch.tensor([1.0, score][rank])) for score in (2.0, math.nan)]
    (folder / str(rank)).write_text(json.dumps(found))


def test_processes_agree_on_what_is_best_if_the_metric_of_one_is_undefined(tmp_path):
    fork_two(judge, tmp_path)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[True, False]] * 2


def prepare_other_data(rank: int, folder: Path, corpus: Path, report) -> None:
    source = folder / f"text{rank}.txt"
    source.write_bytes(corpus.read_bytes())
    os.utime(source, (rank, rank))  # copied with another modification time
    settings = {"validation_fraction": 0.1, "test_fraction": 0.1, "vocab_size": 300, "max_length": 32}
    data = PretrainingData(str(source), cache_dir=str(folder / f"cache{rank}"), **settings)
    try:
        data.setup("fit")
    except ValueError as error:
        report.put(str(error))


def test_processes_with_different_data_say_so(corpus, tmp_path):
    report = multiprocessing.get_context("fork").SimpleQueue()
    fork_two(prepare_other_data, tmp_path, corpus, report)
    said = [report.get(), report.get()]
    for line in said:
        assert "process 0 has data tokens-" in line and ", process 1 tokens-" in line and "allowed: the same prepared" in line
