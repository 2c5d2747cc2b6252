"""Throughput: what counts as time, what it writes, and that training is not affected."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.callbacks import Throughput, throughput
from lit_linformer.data import PretrainingData
from lit_linformer.model import EncoderConfig
from lit_linformer.model.flops import training_flops
from lit_linformer.tasks import MLM
from lit_linformer.utils.peaks import matmul_precision, peak_flops
from tests.helpers import assert_same, output

NAMES = {"tokens_per_second", "samples_per_second", "gflops_per_second", "data_wait", "peak_memory_gib"}


def test_validation_and_checkpoints_are_no_training_time(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock.now)
    logged = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((step, values)))
    trainer = SimpleNamespace(
        global_step=0, world_size=2, log_every_n_steps=2, loggers=[logger], callbacks=[], precision="32-true",
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    module = SimpleNamespace(device=torch.device("cpu"), training_flops=lambda batch: 1e9)
    callback = Throughput(peak_tflops=0.002)
    batch = {"input_ids": torch.zeros(4, 8), "labels": torch.zeros(4, 2)}

    def step(waited, worked):
        clock.now += waited
        callback.on_train_batch_start(trainer, module, batch, 0)
        clock.now += worked
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, batch, 0)

    callback.on_train_start(trainer, module)
    step(50.0, 1.0)  # the first wait is for start-up
    step(0.5, 1.0)
    assert [place for place, _ in logged] == [2]
    assert logged[0][1]["throughput/tokens_per_second"] == pytest.approx(2 * 2 * 32 / 2.5)
    assert logged[0][1]["throughput/data_wait"] == pytest.approx(0.5 / 2.5)
    clock.now += 0.25
    callback.on_validation_start(trainer, module)
    clock.now += 70.0
    step(5.0, 1.0)
    callback.on_save_checkpoint(trainer, module, {})
    clock.now += 30.0
    step(0.0, 0.75)
    spent = logged[1][1]
    assert spent["throughput/samples_per_second"] == pytest.approx(2 * 2 * 4 / 2.0)
    assert spent["throughput/gflops_per_second"] == pytest.approx(2 / 2.0)  # for each of the two devices
    assert spent["throughput/mfu"] == pytest.approx(1 / 2)
    assert spent["throughput/data_wait"] == 0.0  # before a validation no batch is fetched
    callback.on_train_end(trainer, module)
    assert callback.summary()["tokens_per_second"] == pytest.approx(2 * 2 * 32 / 2.0)  # without the first window
    before = callback.totals()
    callback._count(module, {"input_ids": torch.zeros(6, 4, 16), "labels": torch.zeros(3)})  # six windows of four patches
    counted = callback.totals() - before
    assert (counted.tokens, counted.samples) == (2 * 6 * 4, 2 * 3)


def test_a_run_that_ends_with_its_first_window_has_a_speed(tiny, tmp_path):
    output(["fit", *tiny, "--name", "run", "--trainer.max_steps", "3", "--trainer.log_every_n_steps", "3"], tmp_path)
    result = json.loads((tmp_path / "runs/run/result.json").read_text())["throughput"]
    assert result["tokens_per_second"] > 0 and result["gflops_per_token"] > 0


def test_training_s_peak_of_memory_stays_where_a_sweep_counts_anew(monkeypatch):
    memory = SimpleNamespace(now=5 * 2**30)
    monkeypatch.setattr(throughput, "peak_memory", lambda device: memory.now)
    trainer = SimpleNamespace(
        global_step=0, world_size=1, log_every_n_steps=50, loggers=[], callbacks=[], precision="32-true",
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    module, batch = SimpleNamespace(device=torch.device("cpu")), {"input_ids": torch.zeros(4, 8)}
    callback = Throughput()
    callback.on_train_start(trainer, module)
    callback.on_train_batch_start(trainer, module, batch, 0)
    trainer.global_step += 1
    callback.on_train_batch_end(trainer, module, None, batch, 0)
    callback.on_validation_start(trainer, module)
    memory.now = 2**30  # from LengthSweep, after its last length
    callback.on_train_end(trainer, module)
    assert callback.summary()["peak_memory_gib"] == 5


def test_training_does_not_notice(corpus, cache):
    weights = []
    for callbacks in ([], [Throughput()]):
        seed_everything(5, verbose=False)
        held_out = {"validation_fraction": 0.1, "test_fraction": 0.1}
        data = PretrainingData(str(corpus), cache_dir=str(cache), vocab_size=300, max_length=32, batch_size=4, **held_out)
        encoder = EncoderConfig(
            max_length=32, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, projection_dim=8
        )  # fmt: skip
        model = MLM(encoder, data.num_tokens)
        trainer = Trainer(
            accelerator="cpu", max_steps=4, max_epochs=-1, logger=False, enable_checkpointing=False, callbacks=callbacks,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(model, data)
        weights.append(model.state_dict())
    assert_same(*weights)
    summary = callbacks[0].summary()
    assert summary.keys() == {*NAMES, "gflops_per_token"} and summary["data_wait"] < 1
    per_token = training_flops(model.net.encoder, 32, masked=5) / 32
    assert summary["gflops_per_second"] * 1e9 == pytest.approx(summary["tokens_per_second"] * per_token, rel=1e-3)


def test_speed_is_shown_as_counts_are():
    speeds = (99.6, 999.0, 12_390.0, 2_900_000.0)
    assert [throughput.cells({"tokens_per_second": speed}) for speed in speeds] == [
        ["100 tokens/s"],
        ["999 tokens/s"],
        ["12.4 k tokens/s"],
        ["2.9 M tokens/s"],
    ]


def test_progress_tensorboard_and_result_have_it(tiny, tmp_path):
    extra = ["--throughput.peak_tflops", "0.1", "--progress.every_n_steps", "4", "--trainer.log_every_n_steps", "3"]
    shown = output(["fit", *tiny, "--name", "run", "--trainer.accumulate_grad_batches", "2", *extra], tmp_path)
    lines = [text for text in shown.splitlines() if text.startswith(("step 4/", "step 8/", "step 12/"))]
    assert len(lines) == 3
    for words in ("tokens/s", "MFU"):
        assert all(words in text for text in lines), shown
    events = EventAccumulator(str(tmp_path / "runs/run")).Reload()
    for name in (*NAMES, "mfu"):
        points = events.Scalars(f"watch/{name}")
        assert [point.step for point in points] == [3, 6, 9, 12] and all(point.value >= 0 for point in points)
    result = json.loads((tmp_path / "runs/run/result.json").read_text())["throughput"]
    assert result.keys() == {*NAMES, "mfu", "gflops_per_token"} and result["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA L4", 121.0, 30.3),
        ("Tesla V100-SXM2-16GB", None, 15.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA H1000", None, None),
    ],
)
def test_peaks_by_name(name, bf16, fp32):
    for precision, expected in (("bf16", bf16), ("fp32", fp32)):
        found = peak_flops(name, precision)
        assert found is None if expected is None else found == pytest.approx(expected * 1e12)


def test_precisions_by_name(monkeypatch):
    names = ("bf16-mixed", "bf16-true", "16-mixed", "fp16", "32-true", "float32", "64-true")
    assert [matmul_precision(name) for name in names] == ["bf16", "bf16", "fp16", "fp16", "fp32", "fp32", None]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert matmul_precision("32-true") == "tf32"


def test_a_peak_is_positive():
    with pytest.raises(ValueError, match=r"throughput.peak_tflops is 0; allowed: more than 0"):
        Throughput(peak_tflops=0)
