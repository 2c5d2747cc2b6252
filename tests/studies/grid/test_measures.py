"""Numbers from the files of runs: which row, which key, medians over seeds, and the second table made of them."""

import json
import math
from pathlib import Path

import pytest

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.measures import Measure, medians, shown
from lit_linformer.studies.grid.table import measured, not_found, read_table, write_table

GRID = """
axes: {k: {few: --a 1, many: --a 2}, n: {16: "", 32: --b 2}, seed: {1: --c 1, 2: --c 2}}
table: {rows: k, columns: n, value: val/perplexity}
measures:
  early: perplexity.csv perplexity tokens=100
  rare: copy_slices.csv nll slice=beside_rare
  tokens/s: result.json throughput.tokens_per_second
skip: [{k: few, n: 32}]
"""


def test_the_last_row_that_is_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("step,slice,nll\n1,x,5.5\n2,x,4.5\n2,y,3.0\n3,x,\n")
    (tmp_path / "r.json").write_text(json.dumps({"a": {"val/b": 2.5}, "c": None, "d": "text"}))
    expected = {
        "a.csv nll slice=x step=2": 4.5, "a.csv nll step=2": 3.0, "a.csv nll step=2.0 slice=x": 4.5, "a.csv nll": None,
        "a.csv nll slice=z": None, "a.csv other": None, "a.csv nll color=x": None, "b.csv nll": None,
        "r.json a.val/b": 2.5, "r.json c": None, "r.json d": None, "r.json a": None, "r.json a.val/b.c": None,
    }  # fmt: skip
    for text, value in expected.items():
        assert Measure.parse("m", text).read(tmp_path) == value, text


@pytest.mark.parametrize(
    "text", ["", "a.csv", "../a.csv x", "a.txt x", "a.csv x y", "a.json x y=1", "a.csv x =1", "a.csv 'x", 3]
)
def test_what_is_no_measure_is_refused(text):
    with pytest.raises(ValueError, match=r"measures.m is .*; allowed: a file of the run's folder and a number in it"):
        Measure.parse("m", text)


def test_a_second_table_of_medians_over_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("g.yaml").write_text(GRID)
    grid = read_grid(Path("g.yaml"))
    for number, cell in enumerate(grid.cells[:3]):  # few 16 1, few 16 2, many 16 1
        cell.run_dir.mkdir(parents=True)
        speed = {"throughput": {"tokens_per_second": 1000.0 * (number + 1)}, "metrics": {"val/perplexity": 9.0}}
        (cell.run_dir / "result.json").write_text(json.dumps(speed))
        (cell.run_dir / "perplexity.csv").write_text(f"step,tokens,perplexity\n1,100,{20 + number}\n2,200,9\n")
    unfinished = grid.cells[3].run_dir  # many 16 2: is not counted
    unfinished.mkdir(parents=True)
    (unfinished / "perplexity.csv").write_text("step,tokens,perplexity\n1,100,500\n")
    folder = write_table(grid, "command")
    table = json.loads((folder / "table.json").read_text())
    places = [(entry["row"], entry["column"]) for entry in table["measured"]]
    assert places == [("few", "16"), ("many", "16"), ("many", "32")]
    assert table["measured"][0]["values"] == {"early": 20.5, "rare": None, "tokens/s": 1500.0}
    lines = [line.split() for line in measured(table).splitlines()]
    assert lines[2] == ["|", "few", "|", "16", "|", "20.5", "|", "–", "|", "1,500", "|"]
    assert table["measured"][1]["values"]["early"] == 22.0
    assert not_found(grid) == ["rare"]
    main(["--config", "g.yaml", "--only", "k=few", "seed=1"])
    shown = capsys.readouterr()
    assert shown.err == "note: measures.rare: no finished run's copy_slices.csv has nll in such a row\n"
    assert measured(table) in (folder / "table.md").read_text() and read_table(folder).name == grid.name


def test_a_name_with_signs_of_tables_stays_in_its_row():
    entries = [{"row": row, "column": "16", "values": {"tokens/s": 1500.0}} for row in ("a | b", "a\nb")]
    _, rule, *lines = measured({"rows": "model", "columns": "n", "measured": entries}).splitlines()
    assert lines == ["| a \\| b |    1,500 |", "| a b    |    1,500 |"] and rule == "| ------ | -------: |"


def test_numbers_are_shown_with_four_digits():
    assert [shown(value) for value in (None, 0.012345, 37.0123, 1234567.8, math.nan)] == [
        "–",
        "0.01235",
        "37.01",
        "1,234,568",
        "nan",
    ]
    assert medians({}, []) == {}
