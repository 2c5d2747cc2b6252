"""`spectrum` on trained runs: its files compared with the model's maps, its suggestion as a config, and bad command lines."""

import csv
import json
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lit_linformer.data import PretrainingData
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.studies.spectrum.command import main
from lit_linformer.tasks import MLM
from tests.helpers import TINY, inside, run_forked, write_corpus

SMALL = Path(__file__).parents[3] / "models/small"  # an export

SHORT = ["--trainer.max_steps", "7", "--model.encoder.initializer_range", "0.4"]  # maps of rank above one at once


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, cache):
    """A folder with runs/full and runs/lin."""
    folder = tmp_path_factory.mktemp("spectrum")
    (folder / "tiny.yaml").write_text(TINY)
    tiny = ["--config", "tiny.yaml", "--data.source", str(corpus), "--data.cache_dir", str(cache), *SHORT]
    dims = ["--model.encoder.projection_dim", "[8,4]", "--model.encoder.sharing", "headwise"]
    with inside(folder):
        assert run_forked(["fit", *tiny, "--name", "full", "--model.encoder.attention", "full"]) == 0
        assert run_forked(["fit", *tiny, "--name", "lin", *dims]) == 0
    return folder


@pytest.fixture
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)
    return runs


def read(folder):
    return json.loads((Path(folder) / "spectrum.json").read_text())


def test_one_run_end_to_end(here, corpus, cache, capsys):
    main(["--run", "runs/full", "--num_sentences", "6", "--device", "cpu"])
    shown = capsys.readouterr()
    assert "Tokenising" not in shown.err and "Training a" not in shown.err  # the run's own token files are found again
    folder = here / "runs/full/spectrum"
    assert sorted(path.name for path in folder.iterdir()) == [
        "figure1.png",
        "spectrum.csv",
        "spectrum.json",
        "spectrum.md",
        "spectrum.npz",
    ]
    assert (folder / "spectrum.md").read_text() in shown.out and "| 0     | " in shown.out

    # The same by hand: the best checkpoint on full rows of its validation text.
    model = MLM.load_from_checkpoint(find_checkpoint(here / "runs/full", "best"), map_location="cpu", weights_only=True)
    data = PretrainingData(
        source=str(corpus), cache_dir=str(cache), vocab_size=300, validation_fraction=0.1, test_fraction=0.1, max_length=32
    )
    data.setup("validate")
    blocks = data.blocks["validation"]
    places = np.linspace(0, blocks.full - 1, 6).round().astype(int)
    with torch.no_grad():
        _, maps = model.net.encoder.eval()(torch.from_numpy(blocks.rows(places)), need_weights=True)
    curves = np.load(folder / "spectrum.npz")["runs/full:cumulative"]
    for layer, P in maps.items():
        values = np.linalg.svd(P.double().numpy(), compute_uv=False)
        expected = (values.cumsum(-1) / values.sum(-1, keepdims=True)).mean(0)
        assert np.abs(curves[layer] - expected).max() < 1e-6  # the layers before it are float32
    (run,) = read(folder)["runs"]
    assert (run["index"], run["sentences"], run["length"], run["step"]) == (8, 6, 32, 7)
    assert np.allclose(run["share_at_index"], curves[:, :, 7], atol=1e-6)
    assert np.array_equal(run["k_holding_threshold"], (curves < 0.9).sum(-1) + 1)
    layer_means = curves.mean(1)
    assert run["suggested_k"] == [-(-((curve < 0.9).sum() + 1) // 8) * 8 for curve in layer_means]
    with open(folder / "spectrum.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 32
    assert float(rows[-1]["cumulative"]) == 1 and rows[-1]["index"] == "32" and rows[-1]["run"] == "runs/full"


def test_two_runs_side_by_side(here, capsys):
    arguments = ["--run", "runs/full", "--run=runs/lin", "--num_sentences", "4", "--output", "both", "--ckpt_path", "last"]
    main([*arguments, "--threshold", "0.8", "--heads", "0,1"])
    full, lin = read("both")["runs"]
    assert (full["columns"], lin["columns"]) == ([32, 32], [8, 4])
    assert (full["index"], lin["index"]) == (8, 1)  # a quarter of the singular values, in the layer with fewest
    assert full["errors"]["k"] == [8, 8] and lin["errors"]["k"] == [8, 4]
    assert "learned" not in full["errors"] and np.array(lin["errors"]["learned"]).shape == (2, 2)
    for run in (full, lin):
        best = np.array(run["errors"]["svd"])
        assert (best < 0.5).all() and all((best <= np.array(run["errors"][name])).all() for name in ("random", "block_mean"))
    assert "learned: the layer's own" in capsys.readouterr().out
    assert (Path("both") / "figure1.png").read_bytes()[1:4] == b"PNG"


def test_suggestion_is_accepted_by_the_command_line(here, capsys):
    main(["--run", "runs/full", "--num_sentences", "4", "--threshold", "0.995", "--output", "suggested"])
    shown = capsys.readouterr().out
    assert "k for 99.5%" in shown and "A Linformer whose k holds 99.5% of each layer's spectrum" in shown
    (run,) = read("suggested")["runs"]
    EncoderConfig(max_length=32, num_layers=2, projection_dim=run["suggested_k"], sharing="key-value")
    words = shlex.split(run["suggestion"])
    log = here / "suggested.out"
    assert run_forked(["fit", "--config", "runs/full/config.yaml", "--name", "suggested", *words], log) == 0, log.read_text()
    encoder = yaml.safe_load((here / "runs/suggested/config.yaml").read_text())["model"]["init_args"]["encoder"]
    assert encoder["projection_dim"] == run["suggested_k"] and encoder["attention"] == "linformer"
    assert encoder["sharing"] == "key-value"


def test_some_layers_another_text_another_index(here, tmp_path, capsys):
    text = write_corpus(tmp_path / "other.txt", documents=30)
    main(["--run", "runs/lin", "--layers", "[1]", "--index", "3", "--source", str(text), "--num_sentences", "1000"])
    (run,) = read("runs/lin/spectrum")["runs"]
    assert run["layers"] == [1] and run["index"] == 3 and run["text"] == str(text)
    assert 10 < run["sentences"] < 1000  # all the full rows that there are
    assert run["suggestion"] is None and "only where all layers are measured" in capsys.readouterr().out


def test_without_matplotlib_all_but_the_figure(here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main(["--run", "runs/full", "--num_sentences", "2", "--output", str(tmp_path / "plain")])
    assert (tmp_path / "plain/spectrum.md").is_file() and not (tmp_path / "plain/figure1.png").exists()


def test_run_of_another_kind_needs_a_source(here, tmp_path, corpus):
    shutil.copytree("runs/full", tmp_path / "classifier")
    config = tmp_path / "classifier/config.yaml"
    config.write_text(config.read_text().replace("lit_linformer.data.PretrainingData", "lit_linformer.data.FinetuningData"))
    with pytest.raises(ValueError, match=r"source is not given; allowed for .*, which pretrains on no text: a text"):
        main(["--run", str(tmp_path / "classifier")])
    main(["--run", str(tmp_path / "classifier"), "--source", str(corpus), "--num_sentences", "2"])
    assert (tmp_path / "classifier/spectrum/spectrum.md").is_file()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "--run is not given; allowed: RUN, folders of trained runs"),
        (["--run", "runs"], "run is runs, which holds no config.yaml and checkpoints/; allowed: the folder of a trained run"),
        (["--run", "runs/full", "--run", "nowhere"], "run is nowhere, which holds no config.yaml"),
        (["--runs", "runs/full"], "unknown setting '--runs' of spectrum; did you mean '--run'?; allowed: --run, --num_sent"),
        (["--run", "runs/full", "--index", "33"], "index is 33; allowed: 1 to n = 32, the tokens of a row"),
        (["--run", "runs/full", "--index", "0"], "index is '0'; allowed: a whole number, 1 or more"),
        (["--run", "runs/full", "--layers", "0,2"], "layers is [0, 2]; allowed: layers from 0 to 1"),
        (["--run", "runs/full", "--layers", "first"], "layers is 'first'; allowed: a whole number, 0 or more"),
        (["--run", "runs/full", "--layers", ""], "layers is ''; allowed: a whole number, 0 or more"),
        (["--run", "runs/full", "--heads", "2"], "heads is [2]; allowed for runs/full: heads from 0 to 1"),
        (["--run", "runs/full", "--threshold", "1.5"], "threshold is '1.5'; allowed: a number, more than 0, up to 1"),
        (["--run", "runs/full", "--threshold", "most"], "threshold is 'most'; allowed: a number"),
        (["--run", "runs/full", "--num_sentences", "0"], "num_sentences is '0'; allowed: a whole number, 1 or more"),
        (["--run", "runs/full", "--device", "abacus"], "device is 'abacus'; allowed: auto, cpu"),
        (["--run", "runs/full", "--device", "meta"], "device is 'meta'; allowed: auto, cpu"),
        (
            ["--run", "runs/full", "--ckpt_path", "gone.ckpt"],
            "ckpt_path is gone.ckpt, which is not there; allowed: a checkpoint file",
        ),
        (["--run", "runs/full", "--run", "runs/lin", "--ckpt_path", "x"], "ckpt_path is 'x'; allowed with 2 runs: best, last"),
        (["--run", str(SMALL), "--ckpt_path", "last"], f"ckpt_path is 'last'; allowed with {SMALL}: none, since an export has"),
        (["--run", "runs/full", "--source", "gone.txt"], "gone.txt"),
        (["--run", "runs/full", "--run"], "--run has no value; allowed: RUN"),
    ],
)
def test_bad_command_line(argv, expected, here):
    with pytest.raises(ValueError) as caught:
        main([*argv, *([] if argv[-1:] == ["--run"] else ["--output", "never"])])
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("never").exists()
