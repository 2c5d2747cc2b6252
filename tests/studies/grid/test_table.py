"""A grid's table: the value of a cell, medians and averages, and what it says about a missing one."""

import json

import pytest

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.table import summary, write_table
from lit_linformer.studies.report.command import main as report
from tests.studies.grid.study import GRID, finish, finish_all


def test_value_is_that_of_the_best_validation(file):
    cell = read_grid(file).cells[0]
    finish(cell, result={"metrics": {"val/accuracy": 0.5}, "best_step": 3, "best_metrics": {"val/accuracy": 0.75}})
    assert cell.value() == 0.75
    finish(cell, result={"metrics": {"val/accuracy": 0.5}})
    assert cell.value() == 0.5


def test_medians_averages_and_the_papers_numbers(file):
    grid = read_grid(file)
    finish_all(grid, [0.80, 0.84, 0.81, 0.9, 0.88, 0.7, 0.75, None, 0.9, None, 0.91])
    folder = write_table(grid, "python run.py grid --config study.yaml")
    title, _, what, command, _, *lines = (folder / "table.md").read_text().splitlines()
    assert (title, command) == ("# study", "`python run.py grid --config study.yaml`")
    assert what == "SST-2: val/accuracy, IMDB: test/accuracy × 100; median (min–max; how many) over seed"
    assert len({len(line) for line in lines}) == 1
    assert [[word.strip() for word in line.strip("|").split("|")] for line in (lines[0], *lines[2:])] == [
        ["model", "SST-2", "IMDB", "average"],
        ["Transformer", "81.0 (80.0–84.0; 3 runs)", "89.0 (88.0–90.0; 2 runs)", "85.0"],
        ["Linformer, 128, layerwise", "72.5 (70.0–75.0; 2 of 3 runs)", "90.5 (90.0–91.0; 2 of 3 runs)", "81.5"],
        ["Linformer, 128, layerwise: paper", "93.2", "94", "93.6"],
    ]
    table = json.loads((folder / "table.json").read_text())
    entry = table["medians"]["Transformer"]["SST-2"]
    assert entry == pytest.approx({"median": 81, "min": 80, "max": 84, "runs": 3, "of": 3})
    assert table["averages"] == pytest.approx({"Transformer": 85, "Linformer, 128, layerwise": 81.5})
    assert [cell["value"] for cell in table["cells"][5:8]] == [pytest.approx(70), pytest.approx(75), None]
    assert table["cells"][5]["seed"] == "1" and table["paper"]["Linformer, 128, layerwise"] == {"SST-2": 93.2, "IMDB": 94}


def test_no_average_over_some_columns_and_no_order_with_a_nan(file):
    grid = read_grid(file)
    finish_all(grid, [0.8, 0.8, float("nan"), *[None] * 8])
    table = summary(grid)
    assert str(table["medians"]["Transformer"]["SST-2"]["median"]) == "nan"
    assert table["medians"]["Transformer"].keys() == {"SST-2"} and table["averages"]["Transformer"] is None


def test_table_without_repetitions(file, capsys):
    text = GRID.replace("seed: {1: --seed_everything 1, 2: --seed_everything 2, 3: --seed_everything 3}", "")
    text = text.replace("{SST-2: val/accuracy, IMDB: test/accuracy}", "val/perplexity").replace("scale: 100", "")
    file.write_text(text.partition("paper:")[0])
    grid = read_grid(file)
    for cell, value in zip(grid.cells, (12.34, 56.78, 9.0, 10.0), strict=True):
        finish(cell, result={"metrics": {"val/perplexity": value}})
    main(["--config", "study.yaml"])
    shown = capsys.readouterr().out
    assert "[1/4] Transformer · SST-2: val/perplexity 12.34 (finished before)" in shown
    assert "val/perplexity\n`python run.py grid --config study.yaml`" in shown
    assert "| Transformer               |  12.3 | 56.8 |    34.6 |" in shown


def test_missing_metric_is_named_with_those_that_are_there(file, capsys):
    grid = read_grid(file)
    finish_all(grid, [0.5] * 11)
    finish(grid.cells[0], result={"metrics": {"val/perplexity": 9.0, "val/loss": 2.0}})
    with pytest.raises(
        ValueError, match=r"1 of 11 cells failed: Transformer · SST-2 · 1; .*runs/study/\*\.log; allowed: the same"
    ):
        main(["--config", "study.yaml"])
    shown = capsys.readouterr().out
    expected = "which runs/study/transformer-sst-2-1/result.json does not hold; allowed: val/perplexity, val/loss"
    assert f"failed: table.value is 'val/accuracy', {expected}" in shown
    assert "50.0 (50.0–50.0; 2 of 3 runs)" in shown


def test_rows_that_were_never_started_are_listed_below(file, tmp_path):
    """Of the Linformer only a failed cell's log exists; report also infers from it that the cell was started."""
    grid = read_grid(file)
    finish_all(grid, [0.5, *[None] * 10])
    table = tmp_path / "runs/study/table.md"
    write_table(grid, "grid")
    text = table.read_text()
    assert "| Transformer | 50.0" in text and "| Linformer" not in text
    assert text.endswith("\n\nNot started: Linformer, 128, layerwise\n")
    report(["--source", "runs/study", "--output", "page"])
    page = (tmp_path / "page/report.md").read_text()
    assert "| Transformer | 50.0" in page and "| Linformer" not in page and "layerwise · IMDB · 3: not started" in page
    grid.cells[-1].log.write_text("error: model.lr is 0\n")
    write_table(grid, "grid")
    text = table.read_text()
    words = [[word.strip() for word in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| Linf")]
    assert words == [["Linformer, 128, layerwise", "–"], ["Linformer, 128, layerwise: paper", "93.2"]]
    assert "Not started" not in text
