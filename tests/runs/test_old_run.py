"""A run written by an earlier commit can still be read, by every command that takes a run."""

import re
import shutil
from pathlib import Path

import pytest

from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.utils.files import read_rows
from tests.helpers import output, write_corpus

OLD = Path(__file__).with_name("old_run")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """In its original place: runs/old, with its text next to runs/."""
    write_corpus(tmp_path / "text.txt")
    shutil.copytree(OLD, tmp_path / "runs/old", ignore=shutil.ignore_patterns("README.md"))
    monkeypatch.chdir(tmp_path)
    return Path("runs/old")


def test_it_is_validated_and_goes_on(run, tmp_path):
    then = read_rows(run / "perplexity.csv")[-1]["perplexity"]
    printed = output(["validate", "--config", "runs/old/config.yaml"], tmp_path)
    assert "best-00000010" in printed
    now = float(re.findall(r"perplexity\D+([\d.]+)", printed)[-1])
    assert now == pytest.approx(then, rel=5e-3)  # it masked its last, padded row like a full one
    words = ["fit", "--config", "runs/old/config.yaml", "--ckpt_path", "last", "--trainer.max_steps", "15"]
    told = output(words, tmp_path)
    assert "resuming at step 10" in told and "(step 15)\n" in told
    assert [row["step"] for row in read_rows(run / "perplexity.csv")] == [0, 5, 10, 15]


@pytest.mark.slow
def test_its_model_is_used(run, tmp_path):
    model = open_checkpoint(run)
    assert model.facts["step"] == 10 and len(model.curve) == 3 and model.encoder.projection_dim == 8
    assert "<mask>" in output(["predict", "--config", "runs/old/config.yaml", "--data.text", "a <mask> b"], tmp_path)
    output(["export", "--ckpt_path", "runs/old", "--format", "safetensors", "--output", "out"], tmp_path)
    words = ["fit", "--config", "runs/old/config.yaml", "--name", "more", "--model.pretrained", "runs/old"]
    assert "step 2" in output([*words, "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"], tmp_path)
    output(["report", "--source", "runs", "--output", "report"], tmp_path)
    assert "old" in Path("report/report.md").read_text()
