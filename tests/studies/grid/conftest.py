import pytest

from tests.studies.grid.study import GRID


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The grid of study.py and the files it names, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "small", "sst 2", "imdb"):
        (tmp_path / f"{name}.yaml").write_text("{}")
    path = tmp_path / "study.yaml"
    path.write_text(GRID)
    return path
