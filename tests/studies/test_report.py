"""`report`: every number on the page against the runs' own files, what is unfinished, and each way to be given nothing."""

import base64
import csv
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lit_linformer.studies import environment, grid, spectrum
from lit_linformer.studies.benchmark import read_settings
from lit_linformer.studies.benchmark_report import with_ratios
from lit_linformer.studies.gridfile import read_grid, read_table
from lit_linformer.studies.paper_values import TABLE2, TASKS
from lit_linformer.studies.report import SETTINGS, main
from lit_linformer.studies.report_page import Page, code, plain
from lit_linformer.studies.report_plots import draw_curves
from lit_linformer.studies.report_sources import Group, find, read_run
from lit_linformer.studies.report_tables import ratio
from tests.helpers import TINY, inside, run_forked

ROOT = Path(__file__).parents[2]
PIXEL = b"\x89PNG\r\n\x1a\n"
FIGURE3 = """
name: figure3
arguments: --config tiny.yaml --trainer.val_check_interval 4
axes:
  model:
    Transformer: --model.encoder.attention full
    "Linformer, k = 8": ""
    broken: --model.lr 0
  n: {32: ""}
  seed: {1: --seed_everything 1, 2: --seed_everything 2}
table: {rows: model, columns: n, value: val/perplexity, decimals: 2}
skip: [{model: broken, seed: 2}]
"""


def benchmark_data(folder):
    """benchmark.json of two models, of whose two lengths one is not measured yet."""
    argv = (
        "--lengths 512 1024 --projection_dims 128 --models written-out linformer --tokens 2048 --hidden_size 64 --num_heads 2"
    )
    settings = read_settings([*argv.split(), *"--num_layers 1 --rounds 3 --memory false --device cpu --threads 3".split()])
    seconds = {"written-out": [0.030, 0.036, 0.033], "linformer 128": [0.010, 0.010, 0.012]}
    models = {name: {"status": "ok", "seconds": of} for name, of in seconds.items()}
    cell = {"kind": "time", "direction": "forward", "n": 512, "batch": 4, "models": models}
    data = {
        "command": "python run.py benchmark --lengths 512 1024 --projection_dims 128",
        "settings": settings,
        "environment": {"hardware": "An Abacus", "torch": "2.9", "python": "3.12", "commit": "abc1234", "fused": ["fused"]},
        "notes": [],
        "cells": {"time/forward/512": with_ratios(cell, settings)},
    }
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps(data))


def write_run(folder, points, attention="linformer", finished=True, log=None, **settings):
    """A pretraining run as fit leaves it: points are (step, tokens, perplexity)."""
    folder.mkdir(parents=True)
    encoder = {"attention": attention, "max_length": settings.get("n", 512), "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    data = {"class_path": "lit_linformer.data.PretrainingData", "init_args": {"source": settings.get("source", "text.txt")}}
    config = {"trainer": {"max_steps": 100}, "model": {"init_args": {"encoder": encoder}}, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [f"{step},{tokens},{step / 10},{value},{value}\n" for step, tokens, value in points]
    (folder / "perplexity.csv").write_text("step,tokens,seconds,perplexity,best\n" + "".join(lines))
    if finished:
        result = {"step": points[-1][0], "tokens": points[-1][1], "seconds": points[-1][0] / 10, "metrics": {}}
        (folder / "result.json").write_text(json.dumps(result))
    return read_run(folder, folder.name)


def write_scores(values):
    """runs/table2 as grid leaves it, with these values of model × task × seed; None: not there."""
    Path("base.yaml").write_text("{}")
    axes = {
        "model": {"Linformer, 128": "", "a | <b>": "--model.lr 1"},
        "task": {"SST-2": "", "IMDB": "--data.seed 1"},
        "seed": {"1": "", "2": "--seed_everything 2"},
    }
    table = {"rows": "model", "columns": "task", "value": "val/accuracy", "scale": 100}
    paper = {"Linformer, 128": {"SST-2": 92.4, "IMDB": 94}}
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
    return found, grid.write_table(found, "python run.py grid --config grid.yaml")


def tables(text):
    """{first cell: cells} of all lines of all tables."""
    lines = ([word.strip() for word in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|"))
    return {line[0]: line for line in lines}


def curve(folder):
    with open(folder / "perplexity.csv") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, corpus, cache):
    """Real runs: a grid of which one cell fails and one is killed, and a spectrum; beside them a benchmark's file."""
    folder = tmp_path_factory.mktemp("report")
    with inside(folder):
        Path("tiny.yaml").write_text(TINY)
        Path("figure3.yaml").write_text(FIGURE3)
        kill = {"class_path": "tests.helpers.BatchLog", "init_args": {"path": "batches", "kill_at": 9}}
        killed = shlex.join(["--trainer.callbacks+", json.dumps(kill)])
        tiny = ["--data.source", str(corpus), "--data.cache_dir", str(cache), "--model.encoder.initializer_range", "0.4"]
        found = read_grid(Path("figure3.yaml"), None, shlex.join(tiny))
        for cell in found.cells:
            words = [*cell.fit, *(shlex.split(killed) if cell.name.endswith("linformer-k-8-32-2") else [])]
            cell.log.parent.mkdir(parents=True, exist_ok=True)
            cell.log.write_text(f"$ python run.py {shlex.join(words)}\n")
            run_forked(words, cell.log)
        grid.write_table(found, "python run.py grid --config figure3.yaml")
        spectrum.main(["--run", "runs/figure3/transformer-32-1", "--num_sentences", "3", "--output", "runs/spectrum"])
        benchmark_data(Path("runs/benchmark"))
        main(["--output", "page"])
    return folder


@pytest.fixture
def page(measured, monkeypatch):
    """report.md of all that the folder holds, which is the working directory."""
    monkeypatch.chdir(measured)
    return Path("page/report.md").read_text()


def section(page, title):
    (found,) = (part for part in re.split(r"^## ", page, flags=re.MULTILINE) if part.startswith(title))
    return found


def test_sections_stand_in_the_papers_order(page):
    titles = [line for line in page.splitlines() if line.startswith(("# ", "## "))]
    assert titles == [
        "# The Linformer, measured",
        "## Figure 1: the spectrum of attention, runs/spectrum",
        "## Figure 2 and Table 3: time and memory, runs/benchmark",
        "## Figure 3: perplexity while pretraining, figure3",
    ]
    assert page.splitlines()[2] == "`python run.py report --output page`"


def test_perplexities_are_those_of_the_runs(page):
    """Transformer: two finished runs. Linformer: one finished; the killed one counts in nothing but the figure."""
    lines = tables(section(page, "Figure 3"))
    runs = [Path(f"runs/figure3/transformer-32-{seed}") for seed in (1, 2)]
    ends = [curve(run)[-1] for run in runs]
    assert [end["step"] for end in ends] == [12, 12]
    last = [end["perplexity"] for end in ends]
    seconds = sorted(json.loads((run / "result.json").read_text())["seconds"] for run in runs)
    row = lines["Transformer"]
    assert row[1:3] == [f"{12 * 4 * 32 / 1e6:.3f}", "12"]
    assert row[4] == f"{statistics.fmean(last):.2f} ({min(last):.2f}–{max(last):.2f})"
    assert row[4] == row[5] and row[6] == "–"  # it still falls
    assert row[3].startswith(f"{statistics.fmean(seconds):.0f}")
    ours = curve(Path("runs/figure3/linformer-k-8-32-1"))[-1]["perplexity"]
    row = lines["Linformer, k = 8"]
    assert row[4] == f"{ours:.2f}" and row[6] == f"{ours / statistics.fmean(last):.3f} at 0.002 M"
    assert lines["broken"][1:] == ["–"] * 6


def test_unfinished_and_failed_cells_are_listed_with_what_they_said(page):
    found = section(page, "Figure 3")
    assert "Not finished, 2 of 5:" in found
    assert (
        "- Linformer, k = 8 · 32 · 2: unfinished; validated up to step 8; planned: 12 steps; the end of its log: `step" in found
    )
    assert "- broken · 32 · 1: failed; the end of its log: `error: model.lr is 0.0; allowed: more than 0`" in found


def test_each_section_tells_command_hardware_versions_and_budget(page):
    torch_version = torch.__version__
    found = section(page, "Figure 3")
    assert "- command: `python run.py grid --config figure3.yaml`" in found
    place = json.loads(Path("runs/figure3/transformer-32-1/result.json").read_text())["environment"]
    assert f"hardware: {place['hardware']}, {place['cores']} core" in found
    assert f"Python {platform.python_version()}, torch {torch_version}, Lightning " in found
    assert f"commit {place['commit']}" in found if "commit" in place else "commit" not in found
    assert "2 layers of width 16, 2 heads, n = 32" in found and "4 runs, 12 (8–12) steps each" in found
    found = section(page, "Figure 1")
    assert "command: `python run.py spectrum --run runs/figure3/transformer-32-1" in found and f"torch {torch_version}" in found
    found = section(page, "Figure 2")
    assert "hardware: An Abacus, 3 threads" in found and "versions: Python 3.12, torch 2.9, commit abc1234" in found
    assert "budget: 1 cells, 3 timed passes of 2,048 tokens" in found


def test_table_3_has_ours_the_papers_and_what_operations_allow(page):
    lines = tables(section(page, "Figure 2"))
    assert lines["512"][1] == "3.00 (2.88–3.30)"  # of 30/10, 36/10, 33/12
    assert lines["512: paper"][1] == "1.5"
    D, k, n = 64, 128, 512
    full, ours = 24 * D * D + 4 * n * D, 20 * D * D + 6 * k * D + 4 * D * D * k / n
    assert lines["512: operation counts"][1] == f"{full / ours:.2f}"
    assert "Not finished, 1 of 2 cells: time/forward/1024." in section(page, "Figure 2")


def test_figure_1_has_the_runs_singular_values(page):
    values = np.load("runs/spectrum/spectrum.npz")["runs/figure3/transformer-32-1:cumulative"][:, :, 8 - 1]
    lines = tables(section(page, "Figure 1"))
    for layer in (0, 1):
        mean, low, high = values[layer].mean(), values[layer].min(), values[layer].max()
        assert lines[str(layer)][1] == f"{mean:.3f} ({low:.3f}–{high:.3f})"


def test_html_holds_the_same_figures_and_needs_nothing_else(page):
    html = Path("page/report.html").read_text()
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert linked == ["figure1.png", "figure2.png", "table3.png", "figure3.png"]
    embedded = [base64.b64decode(text) for text in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    assert embedded == [Path("page", name).read_bytes() for name in linked]
    assert all(content.startswith(PIXEL) for content in embedded)
    assert html.count("src=") == 4 and "href=" not in html and "<script" not in html and "http" not in html
    assert html.count("<table>") == html.count('<div class="scroll"') == len(re.findall(r"^\|[ :|-]+$", page, re.MULTILINE))
    row = tables(section(page, "Figure 3"))["Linformer, k = 8"]
    assert all(f">{cell}</td>" in html for cell in row)


def test_same_input_gives_the_same_bytes(page):
    before = {path.name: path.read_bytes() for path in Path("page").iterdir()}
    assert set(before) == {"report.md", "report.html", "figure1.png", "figure2.png", "table3.png", "figure3.png"}
    main(["--output", "page"])
    assert {path.name: path.read_bytes() for path in Path("page").iterdir()} == before


def test_nothing_of_the_machine_is_told(page, measured, corpus):
    result = json.loads(Path("runs/figure3/transformer-32-1/result.json").read_text())
    assert f"--data.source …/{corpus.name}" in result["command"] and "fit --config tiny.yaml" in result["command"]
    main(["--source", str(measured / "runs/figure3"), "--output", "elsewhere"])
    for text in (json.dumps(result), page, Path("elsewhere/report.md").read_text()):
        assert str(measured) not in text and str(corpus.parent) not in text and platform.node() not in text.split()


def test_without_matplotlib_all_but_the_figures(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(measured)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main(["--output", str(tmp_path / "plain")])
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["report.html", "report.md"]
    text = (tmp_path / "plain/report.md").read_text()
    assert "`pip install matplotlib`" in text and "![" not in text and "Linformer, k = 8" in text
    assert "pip install matplotlib" in capsys.readouterr().out


def test_table_2_and_the_papers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _ = write_scores([0.80, 0.84, 0.9, None, 0.7, 0.7, 0.6, 0.6])
    (found.cells[3].log).write_text("$ python run.py fit\nerror: <script>alert(1)</script> `x` *y*\n")
    main(["--source", "runs/table2"])
    page = Path("runs/report/report.md").read_text()
    lines = tables(page)
    assert lines["Linformer, 128"] == ["Linformer, 128", "82.0 (80.0–84.0; 2 runs)", "90.0 (90.0–90.0; 1 of 2 runs)", "86.0"]
    assert lines["Linformer, 128: paper"] == ["Linformer, 128: paper", "92.4", "94", "93.2"]
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
    for key in ("command", "rows", "columns", "decimals"):  # as they were before there was a report
        del table[key]
    (folder / "table.json").write_text(json.dumps(table | {"paper": {}}))
    main(["--source", "runs/table2"])
    page = Path("runs/report/report.md").read_text()
    assert "| Linformer, 256, shared kv | 93.3 | 93.6 | 90.6 | 90.6 | 92.03 |" in re.sub(" +", " ", page)
    assert "50.0 (50.0–50.0; 2 runs)" in page and "command: not recorded" in page


def test_papers_table_2_agrees_with_itself_and_with_the_config():
    for *scores, average in TABLE2.values():
        assert abs(statistics.fmean(scores) - average) <= 0.0051
    paper = yaml.safe_load((ROOT / "conf/paper/table2.yaml").read_text())["paper"]
    assert {row: dict(zip(TASKS, TABLE2[512, row], strict=False)) for row in paper} == paper


def test_curves_are_medians_over_tokens_and_say_what_is_unfinished(tmp_path):
    from matplotlib.figure import Figure

    full = write_run(tmp_path / "full", [(0, 0, 900.0), (10, 2_000_000, 50.0), (20, 4_000_000, 20.0)], "full")
    runs = [
        write_run(tmp_path / f"{seed}", [(0, 0, 900.0), (10, 2_000_000, 60.0 + seed), (20, 4_000_000, 30.0 + seed**2)])
        for seed in (1, 2, 3)
    ]
    stopped = write_run(tmp_path / "stopped", [(0, 0, 900.0), (10, 2_000_000, 99.0)], finished=False)
    figure = draw_curves(Figure, [Group("T", "n = 512", [full]), Group("L", "n = 512", runs), Group("S", "n = 512", [stopped])])
    (axes,) = figure.axes
    assert axes.get_yscale() == "log" and axes.get_title() == "n = 512"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens seen (millions)", "validation perplexity")
    named = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    assert set(named) == {"T", "L", "S (unfinished)"}
    assert [list(xy) for xy in named["L"].get_data()] == [[2.0, 4.0], [62.0, 34.0]]  # without the untrained model's
    looks = {(line.get_color(), line.get_linestyle()) for line in named.values()}
    assert len({colour for colour, _ in looks}) == 3 and named["T"].get_color() == "#000000"
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    assert [[list(xy) for xy in line.get_data()] for line in crosses] == [[[2.0], [99.0]]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["T", "L", "S (unfinished)", "unfinished run"]
    assert draw_curves(Figure, [Group("none", "", [read_run(tmp_path / "nothing", "none")])]) is None


def test_ratio_is_to_a_transformer_that_saw_the_same(tmp_path):
    points = [(10, 1000, 60.0), (20, 2000, 30.0)]
    ours = Group("L", "", [write_run(tmp_path / "ours", points)])
    short = Group("T1", "", [write_run(tmp_path / "short", [(10, 1000, 50.0), (15, 1500, 40.0)], "full")])
    long = Group("T2", "", [write_run(tmp_path / "long", [(10, 1000, 90.0), (20, 2000, 25.0), (30, 3000, 10.0)], "full")])
    equal = Group("T3", "", [write_run(tmp_path / "equal", [(10, 1000, 55.0), (20, 2000, 24.0)], "full")])
    other = Group("T4", "", [write_run(tmp_path / "other", points, "full", source="another.txt")])
    narrow = Group("T5", "", [write_run(tmp_path / "narrow", points, "full", n=256)])
    assert ratio(ours, [ours, short]) == "1.200 at 0.001 M"
    assert ratio(ours, [ours, long, equal]) == f"{30 / 24:.3f} at 0.002 M, T3"
    assert (
        ratio(ours, [ours, other]) == ratio(ours, [ours, narrow]) == ratio(ours, [ours]) == ratio(equal, [ours, equal]) == "–"
    )


def test_other_runs_have_a_panel_of_their_own_and_say_if_they_do_not_compare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), [(10, 1000, 60.0), (20, 2000, 30.0)])
    write_run(Path("runs/b"), [(10, 1000, 60.0), (20, 2000, 30.0)], "full", finished=False)
    Path("runs/task").mkdir()
    Path("runs/task/config.yaml").write_text("data: {class_path: lit_linformer.data.FinetuningData}")
    Path("runs/task/result.json").write_text('{"step": 7, "seconds": 4.2, "metrics": {"val/accuracy": 0.75, "train/loss": 1}}')
    main([])
    page = Path("runs/report/report.md").read_text()
    assert "![Validation perplexity against tokens seen: runs/a, runs/b](curves.png)" in page and "do not compare" not in page
    assert tables(page)["runs/a"] == ["runs/a", "0.002", "20", "2", "30.00", "30.00", "1.000 at 0.002 M"]
    assert "- runs/b: unfinished; validated up to step 20; planned: 100 steps\n" in page
    assert tables(page)["runs/task"] == ["runs/task", "7", "4", "accuracy 0.7500"]
    write_run(Path("runs/c"), [(10, 1000, 60.0)], source="another.txt")
    main([])
    assert "such perplexities do not compare" in Path("runs/report/report.md").read_text()


def test_run_that_reached_its_last_step_is_finished_without_a_result(tmp_path):
    assert write_run(tmp_path / "old", [(100, 1000, 9.0)], finished=False).finished
    assert not write_run(tmp_path / "cut", [(99, 1000, 9.0)], finished=False).finished
    with open(tmp_path / "cut/perplexity.csv", "a") as file:
        file.write("100,10")
    assert [row["step"] for row in read_run(tmp_path / "cut", "cut").curve] == [99]


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


def test_cells_and_links_are_found_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, folder = write_scores([0.5] * 8)
    Path("runs/again").symlink_to("table2")
    write_run(Path("runs/deep/run"), [(10, 1000, 60.0)])
    sources, unread = find(["runs", "runs/table2", "runs/table2/a-b-imdb-1"])
    assert [(source.kind, str(source.folder)) for source in sources] == [("grid", "runs/again"), ("run", "runs/deep/run")]
    assert unread == [] and [cell.values for cell in read_table(folder).cells] == [cell.values for cell in found.cells]


def test_stopped_grid_leaves_its_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scores([0.5, *[None] * 7])
    Path("runs/table2/table.json").unlink()

    def stopped(*_):
        assert Path("runs/table2/table.json").is_file()  # from the start
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "run_cells", stopped)
    with pytest.raises(KeyboardInterrupt):
        grid.main(["--config", "grid.yaml"])
    main(["--source", "runs/table2"])
    assert "Not finished, 7 of 8:" in Path("runs/report/report.md").read_text()


def test_environment_fails_gracefully_without_git_or_repository(tmp_path, monkeypatch):
    if (ROOT / ".git").exists():  # not in an unpacked archive
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
        assert environment.commit().removesuffix("-dirty") == head.strip()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == "" and "commit" not in environment.environment()
    monkeypatch.undo()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() == "" and environment.environment()["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data.source /home/someone/texts/a.txt", "--data.source …/a.txt"),
        ("--data.source=/home/texts/ --x", "--data.source=…/ --x"),
        ("'/a/b' ~/c/d [/e/f,/g/h]", "'…/b' …/d […/f,…/h]"),
        ("and/or 1/2 ../a/b ./a/b runs/a/b https://example.org/a/b a / b", None),
    ],
)
def test_folders_of_the_machine_are_left_out(text, expected):
    assert environment.without_folders(text) == (text if expected is None else expected)
    assert environment.without_folders(f"see {Path.cwd()}/runs/a") == "see runs/a"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "source is runs, which is no folder; allowed: the folder of a grid (table.json), a benchmark"),
        (["--source", "nowhere"], "source is nowhere, which is no folder; allowed: the folder of a grid"),
        (["--source", "file.txt"], "source is file.txt, which is no folder; allowed"),
        (["--source", "empty"], "source is empty, which holds nothing measured; allowed: the folder of a grid"),
        (["--source", "good", "--source", "empty"], "source is empty, which holds nothing measured; allowed"),
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
    for name in ("empty", "table", "spectrum"):
        Path(name).mkdir()
    Path("file.txt").write_text("a file")
    Path("table/table.json").write_text('{"cells": []}')
    Path("spectrum/spectrum.json").write_text('{"runs": []}')
    write_run(Path("good"), [(100, 1000, 9.0)])
    write_run(Path("cut"), [(50, 1000, 9.0)], finished=False)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:
        main(argv)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_is_quick_and_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lit_linformer.cli import main; main(['report', '--help']); "
        "print([m for m in ('torch', 'lightning', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
    assert all(f"--{name}" in shown for name in SETTINGS)
