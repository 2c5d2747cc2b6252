"""Config files as given on the command line."""

from pathlib import Path

import pytest

from lit_linformer.utils.configs import read_config


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
