"""docs/extending.md: a study in a user's own module, as a command."""

import re
from pathlib import Path

import pytest

from tests.helpers import in_one_process

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8")
STUDY = next(code for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if "def main(argv" in code)


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_study.py").write_text(STUDY)
    Path("my_ideas").mkdir()
    Path("my_ideas/study.py").write_text(STUDY)
    Path("my_ideas/broken.py").write_text("import nowhere_to_be_found\n")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/perplexity.csv").write_text("step,perplexity\n0,300\n10,42.25\n20,50.5\n")


def test_it_is_a_command(study, tmp_path):
    lines = [
        ["my_study", "--run", "runs/a", "--decimals", "2"],
        ["my_ideas.study", "--run", "runs/a"],
        ["my_study", "--help"],
        ["my_study", "--decimals", "2"],
        ["my_study", "--run", "runs/b"],
        ["my_ideas.other"],
        ["my_ideas.broken"],
        ["study"],
        ["os.path"],
    ]
    found = in_one_process(lines, tmp_path / "printed")
    assert found[0] == (0, "| run    | best perplexity | step |\n| ------ | --------------: | ---: |\n"
                           "| runs/a |           42.25 |   10 |\n")  # fmt: skip
    assert found[1][0] == 0 and "|            42.2 |" in found[1][1]
    assert found[2][0] == 0 and "--decimals N" in found[2][1] and "digits behind the point (default 1)" in found[2][1]
    assert found[3] == (2, "error: --run is not given; allowed: RUN, folders of runs\n")
    assert found[4][0] == 2 and found[4][1].startswith("error: run is 'runs/b', which holds no perplexity.csv; allowed: ")
    for name, (status, printed) in zip(("my_ideas.other", "study", "os.path"), (found[5], *found[7:]), strict=True):
        assert status == 2 and printed.startswith(f"error: the command is '{name}'; allowed: fit, "), (name, printed)
    place = f"({tmp_path}/my_ideas/broken.py, line 1; --traceback shows more)"
    assert found[6] == (2, f"error: No module named 'nowhere_to_be_found' {place}\n")
