"""The grids in conf/ that pretrain: mechanisms, long n, figure 3; test_conf.py parses the cells of all grids."""

import itertools
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from lit_linformer.cli.given import given_settings
from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.measures import Measure
from tests.data.longrange.files import write_long_range
from tests.helpers import in_one_process, run_forked
from tests.test_conf import GRIDS, ROOT, named

FIGURE3 = [path for path in GRIDS if path.name.startswith("figure3")]
MECHANISMS = sorted((ROOT / "conf/mechanisms").glob("*.yaml"))
TABLE = ROOT / "conf/lra/table.yaml"
CURRICULA = sorted((ROOT / "conf/long").glob("curriculum*.yaml"))
LONG = [path for path in GRIDS if path.parent.name == "long" and path not in CURRICULA]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*MECHANISMS, *LONG], ids=named)
def test_every_mechanism_of_a_grid_trains_and_all_it_measures_is_there(path, tmp_path, corpus, cache, monkeypatch):
    """All cells of two grids, and the last of the others, which have the same mechanisms at other n and k."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # figures have tests of their own
    os.symlink(ROOT / "conf", "conf")
    shrink = ["--model.encoder.hidden_size", "24", "--model.encoder.intermediate_size", "48", "--data.vocab_size", "300"]
    shrink += ["--data.validation_fraction", "0.02", "--data.test_fraction", "0.02", "--trainer.max_steps", "2"]
    shrink += ["--trainer.val_check_interval", "2", "--data.batch_size", "2", "--model.warmup_steps", "1"]
    shrink += ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--trainer.accelerator", "cpu"]
    shrink += ["--last.every_n_steps", "2"]
    length = 512 if path in MECHANISMS else 64
    if path in LONG:
        shrink += ["--model.encoder.max_length", f"{length}", "--model.encoder.projection_dim", "8"]
    if path in MECHANISMS:
        shrink += ["--trainer.callbacks.limit_batches", "1"]  # of LengthSweep, the last one
    grid = read_grid(path, arguments=shlex.join(shrink))
    cells = grid.cells if path in (MECHANISMS[-1], LONG[0]) else grid.cells[-1:]
    for cell, (status, printed) in zip(cells, in_one_process([cell.fit for cell in cells], tmp_path / "printed"), strict=True):
        assert status == 0, f"{cell}: {printed[-500:]}"
        there = {name: measure.read(cell.run_dir) for name, measure in grid.measures.items()}
        # Two steps do not reach a perplexity after millions of tokens, and their validation may lack one of CopySlices' slices.
        later = {name for name in there if name.endswith(" M tokens") or name.startswith("nll ")}
        assert {name for name, value in there.items() if value is None} <= later, str(cell)
        assert Measure.parse("", f"perplexity.csv perplexity tokens={2 * 2 * length}").read(cell.run_dir) > 1


@pytest.mark.slow
@pytest.mark.parametrize("path", [*MECHANISMS, *LONG], ids=named)
def test_every_cell_is_a_model_at_its_own_n_and_k(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for cell in read_grid(path).cells:
        encoder = {"vocab_size": 300}
        for name, value in given_settings(cell.fit).items():
            if name.startswith("model.encoder."):
                setting, _, option = name.removeprefix("model.encoder.").partition(".")
                encoder[setting] = {**(encoder.get(setting) or {}), option: value} if option else value
        Encoder(EncoderConfig(**encoder))


def run(cell, folder):
    """What the grid would start for that cell, in one process; its processes have tests in studies/grid/test_run.py."""
    for status, printed in in_one_process(cell.left(), folder / "printed"):
        assert status == 0, f"{cell}: {printed[-500:]}"
    assert not cell.left()


def encoder_of(cell):
    return yaml.safe_load((cell.run_dir / "hparams.yaml").read_text())["encoder"]


@pytest.mark.slow
@pytest.mark.parametrize("path", CURRICULA, ids=named)
def test_short_rows_first_then_long_ones(path, tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "conf", "conf")
    shrink = "--trainer.max_steps 2 --trainer.val_check_interval 2 --model.warmup_steps 1 --data.batch_size 1"
    shrink += " --data.validation_fraction 0.1 --data.test_fraction 0.1 --data.vocab_size 300 --trainer.accelerator cpu"
    shrink += f" --data.source {corpus} --data.cache_dir {cache} --model.encoder.hidden_size 24"
    grid = read_grid(path, arguments=shrink)
    cell = next(cell for cell in grid.cells if "lookup" in cell.values["model"])
    run(cell, tmp_path)
    encoders = [encoder_of(cell.pretraining), encoder_of(cell)]
    n = int(cell.values["n"])
    assert [encoder["max_length"] for encoder in encoders] == [512, n]
    # k stays, or each slot keeps its number of tokens.
    assert [encoder["projection_dim"] for encoder in encoders] == {4096: [64, 64], 8192: [16, 256]}[n]
    assert 1 < cell.value() < 1000
    assert None not in [measure.read(cell.run_dir) for measure in grid.measures.values()]


@pytest.mark.slow
def test_recall_is_learnt_in_short_rows_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "conf", "conf")
    shrink = "--trainer.max_steps 2 --trainer.val_check_interval 2 --data.batch_size 1 --data.validation_rows 2"
    grid = read_grid(ROOT / "conf/recall/long.yaml", arguments=f"{shrink} --trainer.accelerator cpu")
    for cell in grid.cells:
        run(cell, tmp_path)
        short, long = encoder_of(cell.pretraining), encoder_of(cell)
        assert (short["max_length"], long["max_length"]) == (128, 512)
        assert short["attention"] == "full" or long["projection_dim"] == 4 * short["projection_dim"]
        assert 0 <= cell.value() <= 1
        missing = {name for name, measure in grid.measures.items() if measure.read(cell.run_dir) is None}
        assert missing == {name for name in grid.measures if name.endswith(" M tokens")}


@pytest.mark.slow
@pytest.mark.parametrize("task", list(yaml.safe_load(TABLE.read_text())["axes"]["task"]))
def test_long_range_arena_is_pretrained_on_and_scored(task, tmp_path, monkeypatch):
    """Each task's lookup from its own weights, for a step or two on a few rows; n is cut if rows may be truncated."""
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "conf", "conf")
    write_long_range(tmp_path, task.lower())
    shrink = "--data.batch_size 2 --trainer.max_steps 2 --trainer.val_check_interval 2 --trainer.accelerator cpu "
    shrink += "--data.cache_dir cache"
    shrink += " --data.rows 6 --data.held_out_rows 4" if task in ("ListOps", "Pathfinder") else " --data.source files"
    shrink += " --model.encoder.max_length 512" if task in ("text", "retrieval") else ""
    grid = read_grid(TABLE, arguments=shrink)
    cell = next(cell for cell in grid.cells if cell.values == {"model": "lookup, self-pretrained", "task": task})
    run(cell, tmp_path)
    pretrained = json.loads((cell.pretraining.run_dir / "result.json").read_text())
    assert "val/perplexity" in pretrained["metrics"]
    config = yaml.safe_load((cell.run_dir / "config.yaml").read_text())
    assert config["model"]["init_args"]["pretrained"] == str(cell.pretraining.run_dir)
    assert cell.value() == json.loads((cell.run_dir / "test.json").read_text())["metrics"]["test/accuracy"]
    assert None not in [measure.read(cell.run_dir) for measure in grid.measures.values()]
    assert len((cell.run_dir / f"submission/{task.lower()}.tsv").read_text().splitlines()) == 5


@pytest.mark.parametrize("path", FIGURE3, ids=named)
def test_a_step_of_figure_3_has_as_many_tokens_in_every_cell(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tokens = set()
    for cell in read_grid(path).cells:
        words, settings = cell.fit, {}
        for name, value in itertools.pairwise(words):
            if name == "--config" and value != "conf/model/adamw.yaml":
                config = yaml.safe_load(Path(value).read_text())
                settings["--data.batch_size"] = config["data"]["init_args"]["batch_size"]
                settings["--model.encoder.max_length"] = config["model"]["init_args"]["encoder"]["max_length"]
            elif name in settings:
                settings[name] = int(value)
        tokens.add(settings["--data.batch_size"] * settings["--model.encoder.max_length"])
    assert tokens in ({32 * 512}, {8 * 512})


@pytest.mark.slow
def test_a_figure_3_from_end_to_end(tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "conf", "conf")
    shrink = ["--model.encoder.hidden_size", "24", "--model.encoder.intermediate_size", "48", "--data.vocab_size", "300"]
    shrink += ["--data.validation_fraction", "0.1", "--data.test_fraction", "0.1", "--trainer.max_steps", "2"]
    shrink += ["--trainer.val_check_interval", "2"]
    extra = shlex.join([*shrink, "--data.source", str(corpus), "--data.cache_dir", str(cache)])
    log = tmp_path / "out.txt"
    argv = ["grid", "--config", "conf/paper/figure3c_small.yaml", "--only", "sharing=none", "--arguments", extra]
    assert run_forked(argv, log) == 0, log.read_text()
    table = json.loads(Path("runs/figure3c-small/table.json").read_text())
    assert list(table["medians"]) == ["none", "headwise", "key-value", "layerwise"]
    assert 1 < table["medians"]["none"]["512"]["median"] < 1000


@pytest.mark.parametrize(("overlays", "devices"), [([], 1), (["conf/trainer/ddp.yaml"], "auto")])
def test_grids_at_long_n_for_gpus(overlays, devices, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for path in ("conf/long/gpu.yaml", *overlays) for word in ("--config", path)]
    cell = read_grid(LONG[0], arguments=shlex.join([*words, "--data.batch_size", "8"])).cells[0]
    assert run_forked([*cell.fit, "--print_config"], tmp_path / "out.txt") == 0
    config = yaml.safe_load((tmp_path / "out.txt").read_text())
    encoder, data = (config[part]["init_args"] for part in ("model", "data"))
    assert encoder["encoder"]["hidden_size"] == 768 and encoder["encoder"]["max_length"] == 2048 and encoder["lr"] == 5e-4
    assert (data["batch_size"], data["global_batch_size"], config["trainer"]["devices"]) == (8, 64, devices)
    assert config["trainer"]["precision"] == "bf16-mixed" and bool(config["trainer"]["strategy"] != "auto") == bool(overlays)


@pytest.mark.parametrize("figure", ["figure3b", "figure3d"])
def test_a_step_of_figure_3_has_as_many_tokens_at_every_n(figure, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = yaml.safe_load(Path("conf/paper/linformer_base.yaml").read_text())
    rows, n = base["data"]["init_args"]["global_batch_size"], base["model"]["init_args"]["encoder"]["max_length"]
    tokens = set()
    for cell in read_grid(Path(f"conf/paper/{figure}.yaml")).cells:
        given = {"--data.global_batch_size": rows, "--model.encoder.max_length": n, "--data.batch_size": 1}
        given |= {name: int(value) for name, value in zip(cell.fit, cell.fit[1:], strict=False) if name in given}
        tokens.add(given["--data.global_batch_size"] * given["--model.encoder.max_length"])
        assert given["--data.global_batch_size"] % given["--data.batch_size"] == 0
    assert tokens == {rows * n}
