"""Every file in conf/ is complete, says what it is, is parsed and run; golden losses of a seeded run."""

from pathlib import Path

import pytest
import yaml

from tests.helpers import read_log, run_forked
from tests.test_resume import fit

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "debug")
OVERLAYS = sorted((ROOT / "conf/debug").glob("*.yaml"))
# Small enough for a test; everything else stays as the file has it.
SHRINK = (
    "--model.encoder.hidden_size 24 --model.encoder.intermediate_size 48 --model.encoder.max_length 256 --data.vocab_size 300 "
    "--data.batch_size 2 --data.num_workers 0 --data.validation_fraction 0.1 --data.test_fraction 0.1 --trainer.devices 1 "
    "--trainer.max_steps 2 --trainer.accumulate_grad_batches 1 --trainer.val_check_interval 2 --trainer.accelerator cpu"
).split()


def named(path):
    return str(path.relative_to(ROOT / "conf"))


@pytest.mark.parametrize("path", CONFIGS, ids=named)
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


@pytest.mark.parametrize("path", OVERLAYS, ids=named)
def test_overlay_runs_on_quickstart(path, tmp_path, corpus, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shrink = SHRINK[: SHRINK.index("--trainer.max_steps")]
    argv = ["fit", "--config", str(ROOT / "conf/quickstart.yaml"), "--config", str(path), *shrink]
    log = tmp_path / "out.txt"
    assert run_forked([*argv, "--data.source", str(corpus), "--data.cache_dir", str(cache)], log) == 0, log.read_text()
    assert (tmp_path / f"runs/{yaml.safe_load(path.read_text())['name']}").is_dir()


@pytest.mark.parametrize("path", [*CONFIGS, *OVERLAYS], ids=named)
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
    assert different <= {"attention", "projection_dim", "sharing", "projection_init"}


def test_paper_configs_are_the_papers_model():
    encoder = yaml.safe_load((ROOT / "conf/paper/linformer_base.yaml").read_text())["model"]["init_args"]["encoder"]
    assert (encoder["norm"], encoder["local_width"], encoder["projection_init"]) == ("post", 0, "xavier")


# Losses of the twelve steps of tests/helpers.py's TINY, torch 2.13 on CPU: a refactor that moves numerics is seen here.
GOLDEN = [5.7222, 5.6948, 5.6212, 5.5637, 5.4492, 5.267, 5.3016, 5.0475, 4.9034, 4.7933, 4.831, 4.7588]


def test_golden_losses(tiny, tmp_path):
    assert fit(tiny, "golden", tmp_path / "golden") == 0
    losses = [float.fromhex(line["loss"]) for line in read_log(tmp_path / "golden.0").values()]
    assert losses == pytest.approx(GOLDEN, abs=2e-4)
