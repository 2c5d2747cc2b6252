"""Config files as given on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_linformer.utils.configs import read_config

RUN = Path(__file__).parents[2] / "run.py"


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("conf/quickstart", "conf/quickstart.yaml"),
        ("quickstart.yaml", "conf/quickstart.yaml"),
        ("conf/table2.yaml", "conf/paper/table2.yaml"),
        ("small.yaml", "conf/pretrain/small.yaml"),
        ("../sst2.yml", "../sst2.yaml"),
        ("../number.yaml", None),
        ("nowhere/else.yaml", None),
        (".", None),
    ],
)
def test_a_file_that_is_not_there_may_be_one_with_a_similar_name(given, near, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (
        "conf/quickstart.yaml",
        "conf/lra/table.yaml",
        "conf/paper/table2.yaml",
        "conf/pretrain/small.yaml",
        "../sst2.yaml",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    with pytest.raises(ValueError, match=f"^config is '{given}', which is no file") as refused:
        read_config(Path(given))
    assert (f"; did you mean '{near}'?; allowed: " in str(refused.value)) == (near is not None)
    assert ("did you mean" in str(refused.value)) == (near is not None)


def test_a_run_is_answered_with_its_config_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("conf/quickstart.yaml", "runs/quickstart/config.yaml"):
        Path(name).parent.mkdir(parents=True)
        Path(name).touch()
    told = "^config is 'runs/quickstart', which is no file; allowed: runs/quickstart/config.yaml$"
    with pytest.raises(ValueError, match=told):
        read_config(Path("runs/quickstart"))


def test_a_locale_that_is_not_utf_8_is_named(tmp_path):
    """The parser opens files in the locale's encoding: in Latin-1 it would read other words, or none at all."""
    config = tmp_path / "words.yaml"
    config.write_text("# Größe\nname: a\n", encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, str(RUN), "fit", "--config", str(config)]
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True)
    told = "words.yaml has characters beyond ASCII, which this locale reads as ascii; allowed: PYTHONUTF8=1 before the command"
    assert done.returncode == 2 and told in done.stderr, done.stderr
