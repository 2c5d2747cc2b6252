"""Every file in conf/ is complete, describes itself, and is parsed and run; golden losses of a seeded run."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from lit_linformer.studies.grid.file import read_grid
from tests.data.finetuning.glue import FILES, write_glue
from tests.data.longrange.files import write_long_range
from tests.helpers import TINY, in_one_process, inside, read_log, run_forked, slow, write_reviews

ROOT = Path(__file__).parents[1]
TRAINERS = sorted((ROOT / "conf/trainer").glob("*.yaml"))
DEBUG = sorted((ROOT / "conf/debug").glob("*.yaml"))
LOGGERS = sorted((ROOT / "conf/logger").glob("*.yaml"))  # run in tests/callbacks/test_loggers.py
MODERN, ADAMW = ROOT / "conf/model/modern.yaml", ROOT / "conf/model/adamw.yaml"
IMAGES, ON_GPUS = [ROOT / "conf/lra/squares.yaml", ROOT / "conf/lra/patches.yaml"], ROOT / "conf/long/gpu.yaml"
OVERLAYS = [*DEBUG, *LOGGERS, MODERN, ADAMW, *IMAGES, ON_GPUS]
OVERLAYS += [ROOT / "conf/finetune/small.yaml", ROOT / "conf/convert/mlm.yaml"]
DISTILL = ROOT / "conf/convert/distill.yaml"
GRIDS = [path for path in sorted((ROOT / "conf").rglob("*.yaml")) if "axes" in yaml.safe_load(path.read_text())]
FINETUNE = sorted(set((ROOT / "conf/finetune").glob("*.yaml")) - {*OVERLAYS, *GRIDS})
RECALL = sorted(set((ROOT / "conf/recall").glob("*.yaml")) - {*GRIDS})
TASKS = ("image", "listops", "pathfinder", "retrieval", "text")  # run in tests/test_grids.py
LRA = sorted(set((ROOT / "conf/lra").glob("*.yaml")) - {*IMAGES, *GRIDS})
# The others are variants in size, data or attention; .ci/run runs them all.
QUICK = ("quickstart", "linformer_base", "small", "sst2", "own")
SPACES = sorted((ROOT / "conf/tune").glob("*.yaml"))  # run in tests/studies/tune
CONFIGS = set((ROOT / "conf").rglob("*.yaml")) - {*OVERLAYS, *TRAINERS, *FINETUNE, *GRIDS, *SPACES, *RECALL, *LRA, DISTILL}
CONFIGS = sorted(CONFIGS)
# Small enough for a test; everything else is as in the file.
SHRINK = (
    "--model.encoder.num_layers 2 --model.encoder.hidden_size 24 --model.encoder.intermediate_size 48 "
    "--model.encoder.max_length 256 --data.vocab_size 300 "
    "--data.batch_size 2 --data.global_batch_size null --data.num_workers 0 --data.validation_fraction 0.1 "
    "--data.test_fraction 0.1 --trainer.devices 1 "
    "--trainer.max_steps 2 --trainer.accumulate_grad_batches 1 --trainer.val_check_interval 2 --trainer.accelerator cpu"
).split()


def named(path):
    return str(path.relative_to(ROOT / "conf"))


def quick_first(paths):
    return [path if path.stem in QUICK else slow(path) for path in paths]


@pytest.mark.parametrize("path", quick_first(CONFIGS), ids=named)
def test_config_runs(path, tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = ["--data.source", str(corpus), "--data.validation_source", "null", "--data.test_source", "null"]
    sources += ["--data.document_start", "null"]
    argv = ["fit", "--config", str(path), *SHRINK, *sources, "--data.cache_dir", str(cache)]
    log = tmp_path / "out.txt"
    assert run_forked(argv, log) == 0, log.read_text()
    name = yaml.safe_load(path.read_text())["name"]
    assert (tmp_path / f"runs/{name}/checkpoints/last.ckpt").is_file()
    assert (tmp_path / f"runs/{name}/perplexity.csv").is_file()


@pytest.mark.parametrize("path", quick_first(RECALL), ids=named)
def test_recall_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["fit", "--config", str(path), "--data.batch_size", "2", "--data.validation_rows", "4"]
    argv += ["--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    log = tmp_path / "out.txt"
    assert run_forked(argv, log) == 0, log.read_text()
    name = yaml.safe_load(path.read_text())["name"]
    assert "val/accuracy" in json.loads((tmp_path / f"runs/{name}/result.json").read_text())["metrics"]


@pytest.mark.parametrize("path", [*(path for path in LRA if path.stem not in TASKS), *IMAGES], ids=named)
def test_long_range_arena_runs(path, tmp_path, monkeypatch):
    """Two steps of each, then the test, on a few generated rows or small files."""
    monkeypatch.chdir(tmp_path)
    path, overlay = (ROOT / "conf/lra/image.yaml", ["--config", str(path)]) if path in IMAGES else (path, [])
    config = yaml.safe_load(path.read_text())
    argv = ["--config", str(path), *overlay, "--data.batch_size", "2", "--trainer.accelerator", "cpu"]
    argv += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.cache_dir", "cache"]
    task = config["data"]["init_args"]["task"]
    write_long_range(tmp_path, task)
    generated = ["--data.rows", "6", "--data.held_out_rows", "4"]
    argv += generated if task in ("listops", "pathfinder") else ["--data.source", "files"]
    log = tmp_path / "out.txt"
    assert run_forked(["fit", *argv], log) == 0, log.read_text()
    name = config["name"]
    assert (tmp_path / f"runs/{name}/checkpoints/last.ckpt").is_file()
    if path.stem == "pretrain":  # and the second command that its head names
        argv = ["--config", str(ROOT / "conf/lra/listops.yaml"), "--model.pretrained", f"runs/{name}"]
        argv += [*generated, "--data.batch_size", "2", "--trainer.accelerator", "cpu", "--data.cache_dir", "cache"]
        argv += ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
        assert run_forked(["fit", *argv], log) == 0, log.read_text()
        argv, name = ["--config", "runs/listops/config.yaml"], "listops"
    assert run_forked(["test", *argv], log) == 0, log.read_text()
    assert not overlay or "positions of an image" in log.read_text()
    assert len((tmp_path / f"runs/{name}/submission/{task}.tsv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("task", "length", "said"),
    [
        ("pathfinder", "1602", "model.encoder.max_length is 1602; allowed where tokens are pixels: 1026, the data's image"),
        ("listops", "2025", "model.encoder reads images (position image, or projection_init squares), but the rows of"),
    ],
)
def test_positions_of_an_image_ask_for_rows_that_are_one(task, length, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--config", str(ROOT / f"conf/lra/{task}.yaml"), "--model.encoder.position", "image", "--data.rows", "6"]
    argv += ["--model.encoder.max_length", length, "--data.held_out_rows", "4", "--data.cut", "true"]
    log = tmp_path / "out.txt"
    assert run_forked(["fit", *argv, "--trainer.accelerator", "cpu", "--data.cache_dir", "cache"], log) == 2
    assert log.read_text().splitlines()[-1].startswith(f"error: {said}")


@pytest.fixture(scope="module")
def finetuning(tmp_path_factory, corpus, cache):
    """A folder with a pretrained run, runs/tiny, and data/ with a small set for every task; uses the session's cache."""
    root = tmp_path_factory.mktemp("finetuning")
    (root / "tiny.yaml").write_text(TINY)
    os.symlink(ROOT / "conf", root / "conf")
    argv = ["fit", "--config", "tiny.yaml", "--data.source", str(corpus), "--data.cache_dir", str(cache)]
    with inside(root):
        assert run_forked([*argv, "--trainer.max_steps", "2"], root / "out.txt") == 0, (root / "out.txt").read_text()
    for task in FILES:
        write_glue(root / "data", task)
    for task in ("IMDB", "ag_news"):
        (root / "data" / task).mkdir()
        for split in ("train", "test"):
            rows = ({"text": f"{split} text {number}", "label": number % 2} for number in range(18))
            (root / "data" / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_reviews(root / "data" / "reviews.csv")
    return root


def test_conversion_configs_run(finetuning, corpus, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finetuning / "runs/tiny", "runs/teacher")
    argv = ["fit", "--config", str(DISTILL), "--model.pretrained", "runs/teacher", "--model.teacher", "runs/teacher"]
    argv += ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--trainer.accelerator", "cpu"]
    argv += ["--data.validation_fraction", "0.1", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    for overlay, name in (([], "distilled"), (["--config", str(ROOT / "conf/convert/mlm.yaml")], "recovered")):
        log = tmp_path / "out.txt"
        assert run_forked([*argv[:3], *overlay, *argv[3:]], log) == 0, log.read_text()
        assert (tmp_path / f"runs/{name}/perplexity.csv").is_file()


def source_of(path):
    return {"imdb": "data/IMDB", "agnews": "data/ag_news", "own": "data/reviews.csv"}.get(path.stem, "data")


# The others differ only in name and data, as a test below shows. Pairs, numbers: tests/data/finetuning/test_own_tasks.py.
@pytest.mark.parametrize("path", quick_first(FINETUNE), ids=named)
def test_finetuning_config_runs(path, finetuning, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuning)
    log = tmp_path / "out.txt"
    argv = ["--config", str(path), "--data.source", source_of(path), "--data.cache_dir", str(cache)]
    small = ["--model.pretrained", "runs/tiny", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "1"]
    assert run_forked(["fit", *argv, *small], log) == 0, log.read_text()
    if Path(source_of(path)).is_file():  # its rows are trained on, so others are tested
        argv[3] = shutil.copy(source_of(path), tmp_path / "other.csv")
    assert run_forked(["test", *map(str, argv)], log) == 0, log.read_text()
    config = yaml.safe_load(path.read_text())
    assert config["name"] == path.stem
    assert list((finetuning / f"runs/{path.stem}/submission").glob("*.tsv"))


def test_finetuning_configs_differ_in_name_and_data_alone():
    configs = [yaml.safe_load(path.read_text()) for path in FINETUNE]
    for config in configs:
        del config["name"], config["data"]
    assert len(configs) == 12 and all(config == configs[0] for config in configs)


@pytest.mark.parametrize("path", GRIDS, ids=named)
def test_cells_of_a_grid_are_commands_that_parse(path, finetuning, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuning)
    log = tmp_path / "out.txt"
    assert run_forked(["grid", "--config", str(path), "--print_commands", "true"], log) == 0, log.read_text()
    commands = [command for line in log.read_text().splitlines() for command in line.split(" && ")]
    lines = [command for command in commands if "run.py fit" in command]
    assert lines
    settings = {word for line in lines for word in shlex.split(line) if word.startswith("--")}
    known = "config name ckpt_path seed_everything trainer.precision trainer.max_epochs data.limit_train model.pretrained "
    known += "model.load_weights model.projection_lr_factor model.warmup_steps trainer.max_steps data.batch_size "
    known += "model.encoder.attention model.encoder.projection_dim model.encoder.sharing model.encoder.max_length "
    known += "model.encoder.projection model.encoder.projection_init model.encoder.order trainer.val_check_interval "
    known += "trainer.limit_val_batches data.validation_fraction data.test_fraction trainer.callbacks+ "
    known += "trainer.callbacks.lengths trainer.callbacks.every_n_validations trainer.callbacks.at_end "
    known += "trainer.callbacks.limit_batches data.source model.encoder.local_width model.encoder.norm model.lr "
    known += "last.every_n_steps data.global_batch_size data.task data.cut data.pairs data.validation_rows "
    known += "model.encoder.position model.encoder.feed_forward model.encoder.norm_type model.encoder.bias model.optimizer "
    known += "model.encoder.head_bias model.schedule model.decay_share data.mask_rate trainer.callbacks"
    settings = {name for name in settings if "_options." not in name}
    assert settings <= {f"--{name}" for name in known.split()}


@pytest.mark.slow
def test_a_grid_of_the_paper_from_end_to_end(finetuning, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuning)
    for name in ("small-linformer", "small-transformer"):
        shutil.copytree("runs/tiny", f"runs/{name}")
    extra = f"--data.source data --data.limit_train 4 --trainer.max_epochs 1 --data.cache_dir {cache}"
    path, only, log = "conf/paper/table2_small.yaml", ["task=QNLI", "seed=1"], tmp_path / "out.txt"
    lines = [line for cell in read_grid(Path(path), arguments=extra).select(only) for line in cell.left()]
    assert [status for status, _ in in_one_process(lines, tmp_path / "printed")] == [0] * len(lines)
    assert run_forked(["grid", "--config", path, "--arguments", extra, "--only", *only], log) == 0, log.read_text()
    assert log.read_text().count("finished before") == 4
    table = (finetuning / "runs/table2-small/table.md").read_text()
    assert table.count("1 of 3 runs") == 4 and "Linformer, from scratch" in table


@pytest.mark.slow
@pytest.mark.parametrize("path", DEBUG, ids=named)
def test_overlay_runs_on_quickstart(path, tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shrink = SHRINK[: SHRINK.index("--trainer.max_steps")]
    argv = ["fit", "--config", str(ROOT / "conf/quickstart.yaml"), "--config", str(path), *shrink]
    log = tmp_path / "out.txt"
    assert run_forked([*argv, "--data.source", str(corpus), "--data.cache_dir", str(cache)], log) == 0, log.read_text()
    assert (tmp_path / f"runs/{yaml.safe_load(path.read_text())['name']}").is_dir()


def test_the_plain_recipe_is_trained(tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "out.txt"
    argv = ["--config", str(ROOT / "conf/pretrain/small.yaml"), "--config", str(ADAMW), *SHRINK]
    argv += ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
    assert run_forked(["fit", *argv], log) == 0, log.read_text()
    settings = yaml.safe_load((tmp_path / "runs/small/config.yaml").read_text())
    recipe = settings["model"]["init_args"], settings["data"]["init_args"]
    assert (recipe[0]["optimizer"], recipe[0]["schedule"], recipe[1]["mask_rate"]) == ("adamw", "linear", 0.15)


@pytest.mark.parametrize("attention", ["linformer", "lookup", "full"])
def test_a_modern_encoder_is_trained_and_answers(attention, tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "out.txt"
    argv = ["--config", str(ROOT / "conf/pretrain/small.yaml"), "--config", str(MODERN), *SHRINK]
    argv += ["--model.encoder.attention", attention, "--data.source", str(corpus), "--data.cache_dir", str(cache)]
    assert run_forked(["fit", *argv], log) == 0, log.read_text()
    assert "rotary positions, GeGLU, RMSNorm, no biases" in " ".join(log.read_text().split())
    asked = ["predict", "--config", "runs/modern/config.yaml", "--data.text", "one <mask> here"]
    assert run_forked(asked, log) == 0, log.read_text()


def test_small_overlay_runs_on_a_finetuning_config(finetuning, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuning)
    log = tmp_path / "out.txt"
    argv = ["--config", "conf/finetune/rte.yaml", "--config", "conf/finetune/small.yaml", "--name", "overlay"]
    small = ["--model.pretrained", "runs/tiny", "--data.source", "data", "--data.cache_dir", str(cache)]
    assert run_forked(["fit", *argv, *small], log) == 0, log.read_text()
    assert "pooling: mean" in (finetuning / "runs/overlay/config.yaml").read_text()


def test_fast_overlay_runs_on_a_table_of_few_batches(finetuning, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(finetuning)
    log = tmp_path / "out.txt"
    (tmp_path / "reviews.csv").write_text("text,label\n" + "a good film,good\na bad film,bad\n" * 20)
    argv = ["fit", "--config", "conf/finetune/own.yaml", "--config", "conf/debug/fast.yaml", "--model.pretrained", "runs/tiny"]
    argv += ["--data.source", str(tmp_path / "reviews.csv"), "--data.labels", "[bad, good]", "--data.cache_dir", str(cache)]
    assert run_forked(argv, log) == 0, log.read_text()
    curve = (finetuning / "runs/debug-fast/scores.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in curve] == ["step", "5", "10"]


@pytest.mark.parametrize("path", [*CONFIGS, *FINETUNE, *GRIDS, *SPACES, *OVERLAYS, *TRAINERS], ids=named)
def test_config_says_at_its_top_what_it_is_and_how_to_run_it(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(head) >= 2 and any(f"conf/{named(path)}" in line for line in head)


@pytest.mark.parametrize("kind", ["pretrain", "paper"])
def test_transformer_config_differs_from_linformers_in_attention_alone(kind):
    linformer, transformer = (
        yaml.safe_load((ROOT / f"conf/{kind}/{name}_base.yaml").read_text()) for name in ("linformer", "transformer")
    )
    encoders = [config["model"]["init_args"].pop("encoder") for config in (linformer, transformer)]
    linformer.pop("name"), transformer.pop("name")
    assert linformer == transformer
    different = {key for key in encoders[0] | encoders[1] if encoders[0].get(key) != encoders[1].get(key)}
    assert different <= {"attention", "attention_options", "projection_dim", "sharing", "projection_init", "short_rows"}


def test_paper_configs_are_the_papers_model():
    encoder = yaml.safe_load((ROOT / "conf/paper/linformer_base.yaml").read_text())["model"]["init_args"]["encoder"]
    assert (encoder["norm"], encoder["local_width"], encoder["projection_init"]) == ("post", 0, "xavier")


# Losses of the twelve steps of tests/helpers.py's TINY, torch 2.13 on CPU: a refactoring that changes numerics shows here.
GOLDEN = [5.7243, 5.6886, 5.6291, 5.556, 5.3775, 5.3284, 5.2132, 4.9935, 5.1715, 4.9765, 4.8585, 4.8132]


def test_golden_losses(finished):
    losses = [float.fromhex(line["loss"]) for line in read_log(finished / "tiny.0").values()]
    assert losses == pytest.approx(GOLDEN, abs=2e-4)
