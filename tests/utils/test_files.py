"""Files that a command writes into a user's folder: its own are replaced, others never."""

import pytest

from lit_linformer.studies.benchmark.layers import main as benchmark
from lit_linformer.studies.benchmark.loop import main as loop
from lit_linformer.studies.spectrum.command import main as spectrum
from lit_linformer.utils.files import check_own, write_text


def test_only_what_a_command_wrote_is_replaced(tmp_path):
    names = ("table.json", "figure.png")
    check_own(tmp_path / "new", names, "table.json", "study")
    write_text(tmp_path / "other.txt", "mine")
    with pytest.raises(ValueError, match=r"other.txt, which is no folder; allowed: a folder, or a name that is free"):
        check_own(tmp_path / "other.txt", names, "table.json", "study")
    check_own(tmp_path, names, "table.json", "study")  # its own files are not there
    write_text(tmp_path / "figure.png", "mine")
    with pytest.raises(ValueError, match=r"which holds figure.png, and `study` did not write that; allowed: another folder"):
        check_own(tmp_path, names, "table.json", "study")
    write_text(tmp_path / "table.json", '{"rows": []}')
    with pytest.raises(ValueError, match=r"which holds table.json, and `study` did not"):
        check_own(tmp_path, names, "table.json", "study")
    write_text(tmp_path / "table.json", '{"command": "python run.py study --of it", "rows": []}')
    check_own(tmp_path, names, "table.json", "study")


@pytest.mark.parametrize(
    ("main", "words", "name"),
    [
        (benchmark, [], "figure2.png"),
        (loop, ["--config", "conf/quickstart.yaml"], "loop.json"),
        (spectrum, ["--run", "run"], "spectrum.md"),
    ],
)
def test_it_is_refused_before_anything_is_measured(main, words, name, tmp_path):
    write_text(tmp_path / name, "mine")
    words = [str(tmp_path / word) if word == "run" else word for word in words]
    write_text(tmp_path / "run/config.yaml", "a: 1")
    (tmp_path / "run/checkpoints").mkdir()
    with pytest.raises(ValueError, match=rf"^output is {tmp_path}, which holds {name}, and `\w+` did not write that"):
        main([*words, "--output", str(tmp_path)])
    assert (tmp_path / name).read_text() == "mine"
