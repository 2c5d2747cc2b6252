"""`report` on folders written by hand: Table 2, what is left out, and each way to give it nothing."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import yaml

from lit_linformer.studies.grid.command import main as grid
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.table import read_table, write_table
from lit_linformer.studies.paper import TABLE2, TASKS
from lit_linformer.studies.report.command import main
from lit_linformer.studies.report.page import Page
from lit_linformer.studies.report.sources import Run, find
from lit_linformer.utils.markdown import code, plain
from tests.studies.conftest import tables, write_run

ROOT = Path(__file__).parents[3]


def write_scores(values):
    """runs/table2 as grid leaves it, with these values of model × task × seed; None: missing."""
    Path("base.yaml").write_text("{}")
    axes = {
        "model": {"Linformer, 128": "", "a | <b>": "--model.lr 1"},
        "task": {"SST-2": "", "IMDB": "--data.seed 1"},
        "seed": {"1": "", "2": "--seed_everything 2"},
    }
    table = {"rows": "model", "columns": "task", "value": "val/accuracy", "scale": 100}
    paper = {"Linformer, 128": {"SST-2": 92.4, "IMDB": 94.0}}
    Path("grid.yaml").write_text(
        yaml.safe_dump({"name": "table2", "axes": axes, "table": table, "paper": paper}, sort_keys=False)
    )
    found = read_grid(Path("grid.yaml"))
    for cell, value in zip(found.cells, values, strict=True):
        if value is not None:
            cell.run_dir.mkdir(parents=True)
            (cell.run_dir / "scores.csv").write_text(f"step,epoch,val/accuracy\n5,0,{value}\n")
            (cell.run_dir / "result.json").write_text(json.dumps({"step": 5, "metrics": {"val/accuracy": value}}))
            (cell.run_dir / "config.yaml").write_text("trainer: {max_epochs: 3}")
    return found, write_table(found, "python run.py grid --config grid.yaml")


def test_table_2_and_the_papers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _ = write_scores([0.80, 0.84, 0.9, None, 0.7, 0.7, 0.6, 0.6])
    (found.cells[3].log).write_text("$ python run.py fit\nerror: <script>alert(1)</script> `x` *y*\n")
    main(["--source", "runs/table2"])
    page = Path("runs/report/report.md").read_text()
    lines = tables(page)
    assert lines["Linformer, 128"] == ["Linformer, 128", "82.0 (80.0–84.0; 2 runs)", "90.0 (90.0–90.0; 1 of 2 runs)", "86.0"]
    assert lines["Linformer, 128: paper"] == ["Linformer, 128: paper", "92.4", "94.0", "93.2"]
    assert "## Table 2: scores after fine-tuning, table2" in page
    assert "The paper's, in percent" not in page and "Not finished, 1 of 8:" in page and "hardware: not recorded" in page
    html = Path("runs/report/report.html").read_text()
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; 'x' *y*" in html
    assert ">a | &lt;b&gt;</td>" in html and "<b>" not in html and ">70.0 (70.0–70.0; 2 runs)</td>" in html


def test_text_stays_text():
    page = Page("A & B <i>")
    page.add(plain("1 * 2 * 3, a_b_c, `d` [e](f) <br>"), "<div onclick='x'>", f"- {code('a`b <br>')}")
    html = page.html().partition("<body>")[2]
    assert "<h1>A &amp; B &lt;i&gt;</h1>" in html and "<title>A &amp; B &lt;i&gt;</title>" in page.html()
    assert "1 * 2 * 3, a_b_c, `d` [e](f) &lt;br&gt;" in html and "&lt;div onclick='x'&gt;" in html
    assert "<code>a'b &lt;br&gt;</code>" in html and not {"br", "div", "em", "a"} & set(re.findall(r"<(\w+)", html))


def test_papers_table_2_stands_below_a_grid_that_does_not_name_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, folder = write_scores([0.5] * 8)
    table = json.loads((folder / "table.json").read_text())
    del table["command"]
    (folder / "table.json").write_text(json.dumps(table | {"paper": {}}))
    main(["--source", "runs/table2"])
    page = Path("runs/report/report.md").read_text()
    assert "| Linformer, 256, shared kv | 93.3 | 93.6 | 90.6 | 90.6 | 92.03 |" in re.sub(" +", " ", page)
    assert "50.0 (50.0–50.0; 2 runs)" in page and "command: not recorded" in page


def test_a_grid_of_other_tasks_is_not_table_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, folder = write_scores([0.5] * 8)
    text = (folder / "table.json").read_text()
    (folder / "table.json").write_text(text.replace("SST-2", "ListOps").replace("IMDB", "text"))
    main(["--source", "runs/table2"])
    page = Path("runs/report/report.md").read_text()
    assert "## Scores, table2" in page and "| Linformer, 128: paper" in page
    assert "Table 2" not in page and "The paper's, in percent" not in page


def test_papers_table_2_agrees_with_itself_and_with_the_config():
    for *scores, average in TABLE2.values():
        assert abs(statistics.fmean(scores) - average) <= 0.0051
    paper = yaml.safe_load((ROOT / "conf/paper/table2.yaml").read_text())["paper"]
    assert {row: dict(zip(TASKS, TABLE2[512, row], strict=False)) for row in paper} == paper


def test_nothing_foreign_is_overwritten(tmp_path):
    write_run(tmp_path / "run", [(0, 0, 900.0), (10, 2_000_000, 50.0)])
    words = ["--source", str(tmp_path / "run"), "--output", str(tmp_path / "page")]
    (tmp_path / "page").mkdir()
    mine = tmp_path / "page/curves.png"
    mine.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"page, which holds curves.png, and `report` did not write that; allowed: another"):
        main(words)
    assert mine.read_bytes() == b"mine" and not (tmp_path / "page/report.md").exists()
    mine.unlink()
    main(words)
    main(words)  # it replaces its own page


def test_a_run_with_a_metric_of_its_own_has_no_perplexity(tmp_path, monkeypatch):
    """examples/denoising.py reads PretrainingData, and its headline is val/loss."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/own"), [(20, 2000, 0.5)])
    Path("runs/own/perplexity.csv").unlink()
    Path("runs/own/curve.csv").write_text("step,tokens,seconds,val/loss,best\n20,2000,2,0.5,0.5\n")
    result = json.loads(Path("runs/own/result.json").read_text()) | {"best_metrics": {"val/loss": 0.5}}
    Path("runs/own/result.json").write_text(json.dumps(result))
    main([])
    page = Path("runs/report/report.md").read_text()
    assert "## Other runs, by their scores" in page and "perplexity" not in page
    assert tables(page)["runs/own"][-1] == "loss 0.5000"


def test_a_pretraining_run_without_a_curve_is_told_by_its_scores(tmp_path, monkeypatch):
    """A config of one's own without PerplexityCurve: its perplexity is in result.json, and the page had none."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/own"), [(20, 2000, 9.5)])
    Path("runs/own/perplexity.csv").unlink()
    result = json.loads(Path("runs/own/result.json").read_text()) | {"best_metrics": {"val/perplexity": 9.5}}
    Path("runs/own/result.json").write_text(json.dumps(result))
    main([])
    assert tables(Path("runs/report/report.md").read_text())["runs/own"][-1] == "perplexity 9.5000"


def test_run_that_reached_its_last_step_is_finished_without_a_result(tmp_path):
    assert write_run(tmp_path / "old", [(100, 1000, 9.0)], finished=False).finished
    assert not write_run(tmp_path / "cut", [(99, 1000, 9.0)], finished=False).finished
    with open(tmp_path / "cut/perplexity.csv", "a") as file:
        file.write("100,10")
    assert [row["step"] for row in Run(tmp_path / "cut", "cut").curve] == [99]


def test_a_finished_run_without_a_validation_keeps_its_steps_and_a_failed_one_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/validated"), [(10, 1000, 60.0)])
    for name, finished in (("never", True), ("failed", False)):
        write_run(Path("runs") / name, [(100, 2_000_000, 60.0)], finished=finished)
        (tmp_path / "runs" / name / "perplexity.csv").write_text("step,tokens,seconds,perplexity,best\n")
    main([])
    page = Path("runs/report/report.md").read_text()
    assert tables(page)["runs/never"] == ["runs/never", "2.00", "100", "10", "–", "–"]
    assert tables(page)["runs/failed"] == ["runs/failed", *"–––––"]
    assert "budget: 3 runs, 55 (10–100) steps each of 2, " in page


def test_what_cannot_be_read_is_left_out_unless_it_was_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), [(10, 1000, 60.0)])
    Path("runs/broken").mkdir()
    Path("runs/broken/benchmark.json").write_text('{"settings"')
    main([])
    expected = "runs/broken, whose benchmark.json is not whole; allowed: one that `benchmark` wrote"
    assert f"left out: {expected}" in capsys.readouterr().out and "Left out:" in Path("runs/report/report.md").read_text()
    with pytest.raises(ValueError, match=f"source is {expected}"):
        main(["--source", "runs/broken"])


@pytest.mark.parametrize("left", [0, 0.5])
def test_a_spectrum_whose_curves_were_cut_is_told_without_them(left, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"run": "runs/a", "name": "a", "attention": "full", "layers": [0], "length": 8, "columns": [8], "index": 2}
    content = {"command": "python run.py spectrum", "threshold": 0.9, "runs": [run | {"sentences": 3, "step": 7}]}
    Path("runs/spectrum").mkdir(parents=True)
    Path("runs/spectrum/spectrum.json").write_text(json.dumps(content))
    file = Path("runs/spectrum/spectrum.npz")
    np.savez_compressed(file, **{"runs/a:cumulative": np.linspace(0, 1, 8, dtype="float32").reshape(1, 1, 8)})
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])
    main([])
    page = Path("runs/report/report.md").read_text()
    assert "Its curves are not drawn: spectrum.npz is missing or not whole." in page and "3 rows of 8 tokens" in page


def test_cells_and_links_are_found_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, folder = write_scores([0.5] * 8)
    Path("runs/again").symlink_to("table2")
    write_run(Path("runs/deep/run"), [(10, 1000, 60.0)])
    sources, unread = find(["runs", "runs/table2", "runs/table2/a-b-imdb-1"])
    assert [(source.kind, str(source.folder)) for source in sources] == [("grid", "runs/again"), ("run", "runs/deep/run")]
    assert unread == [] and [cell.values for cell in read_table(folder).cells] == [cell.values for cell in found.cells]


def test_what_convert_wrote_is_no_unfinished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/trained"), [(10, 1000, 60.0)])
    Path("runs/converted").mkdir()
    Path("runs/converted/config.yaml").write_text("trainer: {max_steps: 20}")
    Path("runs/converted/conversion.json").write_text('{"command": "convert", "perplexity": []}')
    sources, unread = find(["runs"])
    assert [str(source.folder) for source in sources] == ["runs/trained"] and unread == []


def test_stopped_grid_leaves_its_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scores([0.5, *[None] * 7])
    Path("runs/table2/table.json").unlink()

    def stopped(*_):
        assert Path("runs/table2/table.json").is_file()  # from the start
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_linformer.studies.grid.command.run_cells", stopped)
    with pytest.raises(KeyboardInterrupt):
        grid(["--config", "grid.yaml"])
    main(["--source", "runs/table2"])
    assert "Not finished, 7 of 8:" in Path("runs/report/report.md").read_text()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "source is runs, which is no folder; allowed: the folder of a grid (table.json), a benchmark"),
        (["--source", "nowhere"], "source is nowhere, which is no folder; allowed: the folder of a grid"),
        (["--source", "file.txt"], "source is file.txt, which is no folder; allowed"),
        (["--source", "empty"], "source is empty, which holds nothing measured; allowed: the folder of a grid"),
        (["--source", "good", "--source", "empty"], "source is empty, which holds nothing measured; allowed"),
        (["--source", "broken", "--source", "empty"], "source is empty, which holds nothing measured; allowed"),
        (["--source", "cut"], "source is cut, which holds no finished run; allowed: at least one that is finished"),
        (["--source", "table"], "table/table.json is no grid's table; allowed: what `python run.py grid` writes"),
        (["--source", "spectrum"], "source is spectrum, whose spectrum.json is not whole; allowed: one that `spectrum` wrote"),
        (["--source", "good", "--output", "file.txt"], "output is file.txt, which is no folder; allowed: a folder"),
        (["--sources", "good"], "unknown setting '--sources' of report; did you mean '--source'?; allowed: --source, --title"),
        (["--source"], "--source has no value; allowed: FOLDER"),
    ],
)
def test_bad_command_line(argv, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "table", "spectrum", "broken/table"):
        Path(name).mkdir(parents=True)
    Path("file.txt").write_text("a file")
    for name in ("table", "broken/table"):
        Path(name, "table.json").write_text('{"cells": []}')
    Path("spectrum/spectrum.json").write_text('{"runs": []}')
    write_run(Path("good"), [(100, 1000, 9.0)])
    write_run(Path("cut"), [(50, 1000, 9.0)], finished=False)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:
        main(argv)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
