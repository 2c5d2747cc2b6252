"""The spectrum while a model trains; test_length_sweep.py shows, for both callbacks, that training is not affected."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.callbacks import Spectrum
from lit_linformer.data import PretrainingData
from lit_linformer.model import EncoderConfig
from lit_linformer.model.lowrank import measure
from lit_linformer.studies.spectrum.command import main
from lit_linformer.tasks import MLM
from tests.helpers import run_forked

TWO = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
WIDE = ["--model.encoder.initializer_range", "0.4"]  # gives maps with a rank above one from the start


def spectrum(**settings):
    words = ["--trainer.callbacks+", "Spectrum"]
    return words + [word for name, value in settings.items() for word in (f"--trainer.callbacks.{name}", str(value))]


def run(command, tiny, tmp_path, *extra):
    log = tmp_path / "out"
    assert run_forked([command, *tiny, "--name", "run", *WIDE, *extra], log) == 0, log.read_text()
    return json.loads((tmp_path / f"runs/run/{'validate_' if command == 'validate' else ''}spectrum.json").read_text())


@pytest.mark.parametrize("attention", ["full", "linformer"])
def test_numbers_are_those_of_the_study(attention, tiny, tmp_path):
    found = run("fit", tiny, tmp_path, "--model.encoder.attention", attention, *spectrum(num_sentences=5, index=3))
    (entry,) = found["history"]
    assert (entry["step"], entry["tokens"], found["sentences"], found["index"]) == (7, 7 * 4 * 32, 5, 3)
    curves = np.array(found["cumulative"])
    assert curves.shape == (2, 2, 32 if attention == "full" else 8)
    assert (np.diff(curves) >= 0).all() and np.allclose(curves[..., -1], 1)
    assert np.allclose(entry["share_at_index"], curves[..., 2])
    main(["--run", "runs/run", "--num_sentences", "5", "--index", "3"])  # of the best checkpoint, that of step 7
    (study,) = json.loads((tmp_path / "runs/run/spectrum/spectrum.json").read_text())["runs"]
    assert np.allclose(study["share_at_index"], entry["share_at_index"], atol=2e-6)
    assert study["suggested_k"] == entry["suggested_k"]


@pytest.mark.slow
def test_validate_and_two_processes(tiny, tmp_path):
    assert run_forked(["fit", *tiny, "--name", "run", *WIDE]) == 0
    one = run("validate", tiny, tmp_path, *spectrum(num_sentences=5))
    two = run("validate", tiny, tmp_path, *spectrum(num_sentences=5), *TWO)
    assert one["history"][0]["step"] == 7 and one["sentences"] == two["sentences"] == 5
    assert np.allclose(one["cumulative"], two["cumulative"], atol=2e-6)
    assert not (tmp_path / "runs/run/spectrum.json").exists()


@pytest.mark.slow
def test_history_goes_on_after_resuming(tiny, tmp_path):
    often = ["--trainer.val_check_interval", "2", *spectrum(every_n_validations=2, layers=[1], num_sentences=2)]
    run("fit", tiny, tmp_path, *often, "--trainer.max_steps", "6")
    found = run("fit", tiny, tmp_path, *often, "--ckpt_path", "last")
    assert [entry["step"] for entry in found["history"]] == [4, 8, 12] and found["layers"] == [1]
    events = EventAccumulator(str(tmp_path / "runs/run")).Reload()
    points = {point.step: point.value for point in events.Scalars("watch_spectrum/share_at_2_layer1")}
    assert points == pytest.approx({entry["step"]: np.mean(entry["share_at_index"]) for entry in found["history"]}, abs=1e-5)
    assert (
        "watch_spectrum/k_holding_0.9_layer1" in events.Tags()["scalars"]
        and "watch_spectrum/figure1" in events.Tags()["images"]
    )


def test_rows_are_full_spread_and_few_enough(corpus, cache):
    data = PretrainingData(source=str(corpus), cache_dir=str(cache), vocab_size=300, validation_fraction=0.1, max_length=32)
    data.setup("validate")
    blocks = data.blocks["validation"]
    assert blocks.full < len(blocks)  # the last one is padded
    for most in (1, 2, blocks.full, 10_000):
        rows = blocks.full_rows(most)
        assert rows.shape == (min(most, blocks.full), 32) and rows.dtype == np.int64
        assert (rows != data.pad_id).all() and (rows != data.mask_id).all() and len(np.unique(rows, axis=0)) == len(rows)


def test_points_are_means_over_a_layers_heads_and_k_is_that_of_the_threshold(tmp_path, capsys):
    """Each of two processes has every second row: with one the sum over both is its own."""
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "max_length": 16, "hidden_size": 24, "num_layers": 2, "num_heads": 2, "initializer_range": 0.4}
    module = MLM(EncoderConfig(**shape, attention="full")).eval()
    rows = torch.randint(5, 50, (4, 16))
    points: dict = {}
    figures: list = []
    writer = SimpleNamespace(
        points=lambda values, step: points.update(values), figure=lambda name, drawn, step: figures.append(drawn)
    )
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), global_step=3, global_rank=1, world_size=2, is_global_zero=True, fast_dev_run=False,
        datamodule=SimpleNamespace(blocks={"validation": SimpleNamespace(full_rows=lambda most: rows[:most].numpy())}),
        strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor), default_root_dir=tmp_path,
        callbacks=[SimpleNamespace(writers=[writer])], progress_bar_callback=None,
    )  # fmt: skip
    callback = Spectrum(threshold=0.999)
    callback._layers, callback._index = [0, 1], 3
    callback.after_validation(trainer, module)
    assert capsys.readouterr().out.startswith("step 3  99.9% of the spectrum, by layer: k = ")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["99.9%"]
    expected = measure(module.net.encoder, rows[1::2], [0, 1])
    (entry,) = callback.history
    assert np.allclose(entry["share_at_index"], expected.at(3), atol=1e-6)
    assert entry["suggested_k"] == expected.suggested(0.999) != expected.suggested(0.9)
    for layer in (0, 1):
        assert points[f"spectrum/share_at_3_layer{layer}"] == pytest.approx(expected.at(3)[layer].mean().item())
        assert points[f"spectrum/k_holding_0.999_layer{layer}"] == expected.suggested(0.999)[layer]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every_n_validations": 0}, "Spectrum.every_n_validations is 0; allowed: 1 or more"),
        ({"num_sentences": 0}, "Spectrum.num_sentences is 0; allowed: 1 or more"),
        ({"index": 0}, "Spectrum.index is 0; allowed: 1 or more"),
        ({"threshold": 0.0}, "Spectrum.threshold is 0.0; allowed: more than 0, up to 1"),
    ],
)
def test_bad_settings(settings, expected):
    with pytest.raises(ValueError) as caught:
        Spectrum(**settings)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "extra", "expected"),
    [
        ({"layers": [0, 2]}, [], "error: Spectrum.layers is [0, 2]; allowed: layers from 0 to 1"),
        ({"index": 33}, [], "error: Spectrum.index is 33; allowed: 1 to n = 32, the tokens of a row"),
        ({}, ["--data.validation_fraction", "0"], "error: data.max_length is 32; allowed with Spectrum: fewer, for the"),
    ],
)
def test_what_does_not_fit_is_one_line_before_training(settings, extra, expected, tiny, tmp_path):
    log = tmp_path / "out"
    assert run_forked(["fit", *tiny, "--name", "run", *spectrum(**settings), *extra], log) == 2
    assert expected in log.read_text().splitlines()[-1]
    assert not (tmp_path / "runs/run/checkpoints").exists()
