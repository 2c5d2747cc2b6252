"""`report` on real runs: every number on the page compared with the runs' own files; and unfinished runs."""

import base64
import json
import platform
import re
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_linformer.studies.benchmark.layers import read_settings
from lit_linformer.studies.benchmark.tables import with_ratios
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.table import write_table
from lit_linformer.studies.report.command import main
from lit_linformer.studies.spectrum.command import main as spectrum
from lit_linformer.utils.files import read_rows
from tests.helpers import TINY, inside, run_forked
from tests.studies.conftest import tables

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
    """benchmark.json with two models and two lengths, one of which is not measured yet."""
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


def curve(folder):
    return read_rows(folder / "perplexity.csv")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, corpus, cache):
    """Real runs: a grid in which one cell fails and one is killed, and a spectrum; and a benchmark's file."""
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
        write_table(found, "python run.py grid --config figure3.yaml")
        spectrum(["--run", "runs/figure3/transformer-32-1", "--num_sentences", "3", "--output", "runs/spectrum"])
        benchmark_data(Path("runs/benchmark"))
        main(["--output", "page"])
    return folder


@pytest.fixture
def page(measured, monkeypatch):
    """report.md of everything in the working directory."""
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
    """Transformer: two finished runs. Linformer: one finished; the killed one counts only in the figure."""
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
    assert "- broken · 32 · 1: failed; the end of its log: `error: model.lr is 0.0; allowed: more than 0, up to 10000`" in found


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
    assert linked == ["figure1.png", "figure2.png", "table3.png", "figure3.png", "figure3-time.png"]
    embedded = [base64.b64decode(text) for text in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    assert embedded == [Path("page", name).read_bytes() for name in linked]
    assert all(content.startswith(PIXEL) for content in embedded)
    assert html.count("src=") == 5 and "href=" not in html and "<script" not in html and "http" not in html
    assert html.count("<table>") == html.count('<div class="scroll"') == len(re.findall(r"^\|[ :|-]+$", page, re.MULTILINE))
    row = tables(section(page, "Figure 3"))["Linformer, k = 8"]
    assert all(f">{cell}</td>" in html for cell in row)


def test_same_input_gives_the_same_bytes(page):
    before = {path.name: path.read_bytes() for path in Path("page").iterdir()}
    names = ["report.md", "report.html", "figure1.png", "figure2.png", "table3.png", "figure3.png", "figure3-time.png"]
    assert sorted(before) == sorted(names)
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
