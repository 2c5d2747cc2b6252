"""docs/extending.md: a projection, an attention, layers and a callback in a user's own files, with every command."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.studies.grid.measures import Measure
from lit_linformer.utils.files import read_rows
from tests.cli.test_errors import complaint
from tests.helpers import TINY, inside, output, slow

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text(encoding="utf-8")
IDEAS = {
    "salient": "--model.encoder.projection my_ideas.Salient --model.encoder.projection_options {sharpness:\\ 2.0}",
    "cosines": "--model.encoder.projection my_ideas.Cosines --model.encoder.projection_options.learned false",
    "window": "--model.encoder.attention my_ideas.Window --model.encoder.attention_options.reach 3",
    "uncounted": "--model.encoder.attention my_ideas.Uncounted --model.encoder.attention_options.reach 3",
}
SAID = {
    "salient": "linformer, k = 8, layerwise, my_ideas.Salient",
    "cosines": "linformer, k = 8, layerwise, my_ideas.Cosines",
    "window": "my_ideas.Window, reach = 3",
    "uncounted": "my_ideas.Uncounted, reach = 3",
}

START = re.search(r"```py\n([^`]*?class Cosines.*?)```", PAGE, re.DOTALL)[1]

# With a forward of its own, inherited `flops` do not count: they are unknown, not guessed. Checkpoints contain its mask.
UNCOUNTED = """

class Uncounted(Window):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False):
        return Window.forward(self, self.scale * x, attention_mask, need_weights)

    def __init__(self, reach: int = 4, **shape):
        super().__init__(reach, **shape)
        self.register_buffer("past", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def matrix(self, x):
        return torch.eye(x.shape[1])
"""


def block(name, page=PAGE):
    """The code of a file on the page."""
    return re.search(rf"`{name}`[^`]*:\n\n```py\n(.*?)```", page, re.DOTALL)[1]


def words(text):
    return [word.replace("\\ ", " ") for word in re.split(r"(?<!\\) ", text)]


@pytest.fixture(scope="module")
def ideas(tmp_path_factory, corpus, cache):
    """A folder with the page's file and a run of each idea; their output."""
    folder = tmp_path_factory.mktemp("ideas")
    (folder / "my_ideas.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1] + START + UNCOUNTED)
    (folder / "tiny.yaml").write_text(TINY)
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--trainer.max_steps", "8"]
    with inside(folder):
        printed = {
            name: output(
                ["fit", "--config", "tiny.yaml", "--name", name, *data, "--progress.every_n_steps", "4", *words(text)], folder
            )
            for name, text in IDEAS.items()
        }
    return folder, printed


@pytest.fixture
def here(ideas, monkeypatch):
    monkeypatch.chdir(ideas[0])
    return ideas[0]


@pytest.mark.parametrize("name", IDEAS)
def test_trains_resumes_and_validates_under_its_own_name(name, ideas, here, tmp_path):
    printed = ideas[1][name]
    assert f"\nmodel       {SAID[name]}, n = 32\n" in "\n" + printed
    throughput = json.loads((here / f"runs/{name}/result.json").read_text())["throughput"]
    assert ("gflops_per_second" in throughput) is (name != "uncounted")
    shutil.copytree(here / "runs" / name, tmp_path / "runs" / name)
    argv = ["--config", f"runs/{name}/config.yaml", "--trainer.default_root_dir", str(tmp_path / "runs" / name)]
    assert "resuming at step 8" in output(["fit", *argv, "--ckpt_path", "last", "--trainer.max_steps", "10"], tmp_path)
    assert "val/perplexity" in output(["validate", *argv], tmp_path)


def test_an_infinite_mask_is_no_broken_weight(here, tmp_path):
    output(["export", "--ckpt_path", "runs/uncounted", "--format", "safetensors", "--output", str(tmp_path / "out")], tmp_path)
    argv = ["--config", "runs/uncounted/config.yaml", "--name", "next", "--trainer.default_root_dir", str(tmp_path / "next")]
    for model in ("runs/uncounted", str(tmp_path / "out")):
        output(["fit", *argv, "--model.pretrained", model, "--overwrite", "true", "--trainer.max_steps", "1"], tmp_path)


@pytest.mark.parametrize("setting", ['attention="my_ideas.Window"', 'projection="my_ideas.Salient"'])
def test_the_pages_lines_show_that_padding_does_not_matter(setting, here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    lines = re.search(r"```python3\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(lines.replace('attention="my_ideas.Window"', setting), {})
    del sys.modules["my_ideas"]  # other tests have files of that name


@pytest.mark.parametrize("setting", ["attention", "projection"])
def test_the_pages_ideas_compute_in_float16(setting, here, monkeypatch):
    """As with 16-mixed: scores are then float16, but the norm's output, from which they are computed, is float32."""
    monkeypatch.syspath_prepend(here)
    idea = {"attention": "my_ideas.Window", "projection": "my_ideas.Salient"}[setting]
    shape = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_heads": 2, "num_layers": 2, "projection_dim": 4}
    encoder, ids = Encoder(EncoderConfig(**shape, **{setting: idea})).eval(), torch.randint(50, (2, 12))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    with torch.autocast("cpu", torch.float16):
        found = encoder(ids, mask)
    torch.testing.assert_close(found[mask].float(), encoder(ids, mask)[mask], rtol=0.02, atol=0.02)
    del sys.modules["my_ideas"]


OTHER_NET = """
from torch.nn import functional

from lit_linformer.model.encoder import EncoderLayer
from lit_linformer.tasks import MLM


class Squared(EncoderLayer):
    def feed_forward(self, h):
        return self.down(functional.relu(self.up(h)).square())


class SquaredMLM(MLM):
    def __init__(self, **settings):
        super().__init__(**settings)
        for layer in self.net.encoder.layers:
            layer.__class__ = Squared
"""


def test_a_net_of_ones_own_is_not_taken_for_the_one_that_its_settings_describe(here, corpus, cache, tmp_path):
    (here / "my_net.py").write_text(OTHER_NET)
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--trainer.max_steps", "2"]
    argv = ["--config", "tiny.yaml", *data, "--model", "my_net.SquaredMLM"]
    output(["fit", *argv, "--name", "squared"], tmp_path)
    said = "is runs/squared/checkpoints/last.ckpt, whose encoder.layers.0 is my_net.Squared; allowed: a model of this"
    for setting, *words in (
        ("ckpt_path", "export", "--format", "safetensors", "--output", "out", "--ckpt_path"),
        ("ckpt_path", "embed", "--text", "a", "--output", "a.npy", "--ckpt_path"),
        ("ckpt_path", "spectrum", "--run"),
        ("from", "convert", "--max_length", "64", "--name", "longer", "--from"),
    ):
        assert f"{setting} {said}" in complaint([*words, "runs/squared"], tmp_path)
    teacher = ["--model", "lit_linformer.tasks.Distillation", "--model.teacher", "runs/squared"]
    assert f"model.teacher {said}" in complaint(["fit", *argv[:-2], *teacher, "--name", "taught"], tmp_path)
    shown = output(["fit", *argv, "--name", "next", "--model.pretrained", "runs/squared"], tmp_path)
    assert "note: encoder.layers.0 of model.pretrained=runs/squared is of the class my_net.Squared: only its weights" in shown
    output(["validate", "--config", "runs/squared/config.yaml"], tmp_path)
    found = json.loads((here / "runs/squared/validate.json").read_text())["metrics"]["val/perplexity"]
    assert f"step 0  validation perplexity {found:.2f}  " in shown


def test_draws_or_says_that_there_are_no_slots(here, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["draw", "--text", "a b", "--output", str(tmp_path / "slots.png"), "--ckpt_path"]
    assert "where columns are tokens, `torch.eye(x.shape[1])`" in PAGE
    for run in ("salient", "cosines", "uncounted"):
        shown = output([*argv, f"runs/{run}", "--slots", "8"], tmp_path)
        assert re.search(r"slot \d: .*% of the attention; fed by ", shown) and (tmp_path / "slots.png").is_file()
    expected = "whose attention is 'my_ideas.Window'; allowed: linformer, coarse, window, lookup, or one that has `matrix`"
    assert expected in complaint([*argv, "runs/window"], tmp_path)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("salient", "huggingface"),
        slow("salient", "torch"),
        slow("cosines", "onnx"),
        ("window", "safetensors"),
        slow("window", "onnx"),
        slow("uncounted", "huggingface"),
    ],
)
def test_exports(name, form, here, tmp_path):
    pytest.importorskip({"huggingface": "transformers", "onnx": "onnxruntime"}.get(form, "torch"))
    shown = output(["export", "--ckpt_path", f"runs/{name}", "--format", form, "--output", str(tmp_path / "out")], tmp_path)
    assert shown.startswith(f"{name}: {SAID[name]}, n = 32")  # and it was held against the checkpoint
    card = (tmp_path / "out/README.md").read_text()
    assert ("It needs my_ideas." in card) is (form in ("safetensors", "huggingface"))
    own = f"An encoder with the attention my_ideas.{name.capitalize()}" in card
    assert own is (name in ("window", "uncounted")) is ("projection_dim" not in card)


@pytest.mark.slow
def test_benchmark_spectrum_and_report_name_them(here, tmp_path):
    sizes = (
        "--lengths 32 --projection_dims 8 --hidden_size 16 --num_heads 2 --num_layers 1 --tokens 64 --rounds 1 --memory false"
    )
    own = ["--models", "fused", "linformer", "my_ideas.Window", "my_ideas.Uncounted", "--projection", "my_ideas.Salient"]
    output(["benchmark", *sizes.split(), *own], tmp_path)
    (cell,) = json.loads((here / "runs/benchmark/benchmark.json").read_text())["cells"].values()
    assert list(cell["models"]) == ["fused", "linformer 8", "my_ideas.Window", "my_ideas.Uncounted"]
    assert {entry["status"] for entry in cell["models"].values()} == {"ok"}
    counts = {name: "operation_counts" in found["fused"] for name, found in cell["ratios"].items()}
    assert counts == {"linformer 8": True, "my_ideas.Window": True, "my_ideas.Uncounted": False}
    output(["spectrum", "--run", "runs/window", "--run", "runs/salient", "--num_sentences", "2"], tmp_path)
    output(["report", "--source", "runs", "--output", str(tmp_path / "report")], tmp_path)
    page = (tmp_path / "report/report.md").read_text()
    assert all(SAID[name] in page for name in ("salient", "window"))
    assert re.search(r"\| +k = 8 \|.* my_ideas\.Window \|", page), page


def test_a_transformer_is_converted_to_it(here, tmp_path, corpus, cache):
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--trainer.max_steps", "2"]
    output(["fit", "--config", "tiny.yaml", "--name", "full", *data, "--model.encoder.attention", "full"], tmp_path)
    shown = output(["convert", "--from", "runs/full", "--name", "near", "--attention", "my_ideas.Window"], tmp_path)
    assert "near: my_ideas.Window, n = 32" in shown
    weights = [torch.load(f"runs/{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for name in ("full", "near")]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(a, weights[1][name]) for name, a in weights[0].items())


def test_a_fixed_e_stays_what_it_is_and_is_lengthened(here, tmp_path):
    """The page's cosines: rows of a discrete cosine transform, longer by interpolation."""
    output(
        ["convert", "--from", "runs/cosines", "--name", "longer", "--max_length", "64", "--projections", "interpolate"],
        tmp_path,
    )
    E, longer = (
        torch.load(f"runs/{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"]["net.encoder.E.weight"]
        for name in ("cosines", "longer")
    )
    torch.testing.assert_close(E @ E.T, torch.diag(torch.tensor([2.0, *[1.0] * 7])))
    assert longer.shape == (8, 64)
    torch.testing.assert_close(longer.sum(-1), E.sum(-1))


def test_a_checkpoint_elsewhere_says_what_is_missing_and_runs_nothing_that_it_names(here, tmp_path, monkeypatch):
    run = here / "runs/salient"
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    monkeypatch.chdir(tmp_path)
    argv = ["export", "--format", "torch", "--output", "out", "--ckpt_path"]
    line = complaint([*argv, str(run / "checkpoints/last.ckpt")], tmp_path)
    assert "whose projection is 'my_ideas.Salient', but there is no module my_ideas in the working directory" in line
    for name, expected in (("os.system", "but os is Python's own"), ("torch.hub.load", "which is no subclass of Projection")):
        checkpoint["hyper_parameters"]["encoder"]["projection"] = name
        torch.save(checkpoint, tmp_path / "bad.ckpt")
        assert f"bad.ckpt, whose projection is '{name}', {expected}" in complaint([*argv, "bad.ckpt"], tmp_path)


def test_unknown_names_list_what_there_is(tiny, tmp_path):
    line = complaint(["fit", *tiny, "--model.encoder.projection", "pool"], tmp_path)
    assert "projection is 'pool'; allowed: linear, conv, mean, max, gaussian, dynamic, gated, or the path of a subclass" in line
    assert (
        "attention is 'hyena'; allowed: linformer, coarse, full, window, lookup, lsh, luna, nystrom, sparse, or"
        in complaint(["fit", *tiny, "--model.encoder.attention", "hyena"], tmp_path)
    )


def test_every_row_of_the_page_names_a_test_that_is_there():
    tests = re.findall(r"\| `(tests/\S+\.py)` \|", PAGE)
    assert tests and all((Path(__file__).parents[1] / name).is_file() for name in tests)


@pytest.mark.slow
def test_a_callbacks_file_goes_on_after_a_resume_and_not_in_validate(tiny, tmp_path, monkeypatch):
    """The page's norms of weights: with the untrained model's row, and none twice."""
    monkeypatch.chdir(tmp_path)
    Path("my_norms.py").write_text(block("my_norms.py"))
    run = ["--name", "norms", "--trainer.callbacks+", "my_norms.Norms"]
    output(["fit", *tiny, *run, "--trainer.max_steps", "8"], tmp_path)
    first = read_rows(Path("runs/norms/norms.csv"))
    assert [row["step"] for row in first] == [0, 7] and first[0]["norm"] != first[1]["norm"]
    output(["fit", *tiny, *run, "--ckpt_path", "last", "--trainer.max_steps", "15"], tmp_path)
    rows = read_rows(Path("runs/norms/norms.csv"))
    assert [row["step"] for row in rows] == [0, 7, 14] and rows[:2] == first
    measure = re.search(r"`measures: \{norm: (.*?)\}`", PAGE)[1]
    assert Measure.parse("norm", measure.replace("step=20", "step=14")).read(Path("runs/norms")) == rows[2]["norm"]
    for step, checkpoint in ((14, "best"), (15, "last")):
        output(["validate", "--config", "runs/norms/config.yaml", "--ckpt_path", checkpoint], tmp_path)
        (row,) = read_rows(Path("runs/norms/validate_norms.csv"))
        assert row["step"] == step and (row["norm"] == rows[2]["norm"]) == (step == 14)
    assert read_rows(Path("runs/norms/norms.csv")) == rows


@pytest.mark.slow
def test_other_layers_train_resume_and_validate(tiny, tmp_path, monkeypatch):
    """The page's feed-forward and norms: a resumed run is the one that was never interrupted, in validate too."""
    monkeypatch.chdir(tmp_path)
    Path("my_layers.py").write_text(block("my_layers.py"))
    fit = ["fit", *tiny, "--model", "my_layers.Changed", "--model.schedule", "constant", "--data.max_length", "32"]
    output([*fit, "--name", "whole", "--trainer.max_steps", "10"], tmp_path)
    output([*fit, "--name", "halves", "--trainer.max_steps", "8"], tmp_path)
    output([*fit, "--name", "halves", "--trainer.max_steps", "10", "--ckpt_path", "last"], tmp_path)
    metrics = []
    for name in ("whole", "halves"):
        output(["validate", "--config", f"runs/{name}/config.yaml", "--ckpt_path", "last"], tmp_path)
        metrics.append(json.loads(Path(f"runs/{name}/validate.json").read_text())["metrics"])
    assert metrics[0] == metrics[1] and math.isfinite(metrics[0]["val/perplexity"])
    weights = torch.load("runs/halves/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert weights["net.encoder.layers.1.feed_forward_norm.alpha"] != 0.5  # it has been trained
