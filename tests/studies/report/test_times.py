"""Perplexity against training time: which clock is used, and comparisons at equal time."""

from pathlib import Path

from lit_linformer.studies.report.command import main
from lit_linformer.studies.report.figures import draw_curves
from lit_linformer.studies.report.sources import Group, Run
from lit_linformer.studies.report.times import clock_of, time_table
from tests.studies.conftest import tables, write_run


def test_the_better_model_in_the_same_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    points = [(0, 0, 900.0), (10, 2_000_000, 50.0), (20, 4_000_000, 20.0)]
    write_run(Path("runs/full"), points, "full", seconds=(0, 3600, 7200))
    write_run(Path("runs/plain"), [(0, 0, 900.0), (20, 4_000_000, 25.0)], "full", seconds=(0, 7000))
    faster = [*points[:2], (20, 4_000_000, 24.0), (30, 8_000_000, 12.0), (40, 12_000_000, 8.0)]
    write_run(Path("runs/ours"), faster, seconds=(0, 1800, 3600, 7200, 9000))
    main([])
    page = Path("runs/report/report.md").read_text()
    assert "(curves.png)" in page and "(curves-time.png)" in page
    assert "At equal processor time in training, that of the best Transformer (runs/full, 2.0 hours):" in page
    lines = tables(page.partition("At equal")[2].split("\n\n")[1])
    assert lines["run"] == ["run", "hours", "tokens, millions", "perplexity", "÷ runs/full"]
    assert lines["runs/ours"] == ["runs/ours", "2.0", "8.00", "12.00", "0.600"]
    assert lines["runs/full"] == ["runs/full", "2.0", "4.00", "20.00", "–"]
    assert lines["runs/plain"] == ["runs/plain", "1.9", "4.00", "25.00", "1.250"]

    from matplotlib.figure import Figure

    groups = [Group(name, "", [Run(Path("runs") / name, name)]) for name in ("full", "ours")]
    (axes,) = draw_curves(Figure, groups, "cpu_seconds").axes
    assert axes.get_xlabel() == "processor time in training (hours)"
    named = {line.get_label(): [list(xy) for xy in line.get_data()] for line in axes.get_lines()}
    assert named["ours"] == [[0.0, 0.5, 1.0, 2.0, 2.5], [900.0, 50.0, 24.0, 12.0, 8.0]]
    # With more threads a second of processor time is not one of the clock; runs from before have neither.
    assert clock_of(groups) == "cpu_seconds"
    for other in ({"threads": 8}, {"processes": 2}, {"cpu": "An Abacus"}):  # with a cpu beside it the hardware is a GPU
        for group in groups:
            group.runs[0].result["environment"] = {"hardware": "An Abacus", "threads": 1, **other}
        assert clock_of(groups) == "training_seconds"
    groups[1].runs[0].result["environment"] |= {"processes": 2}
    assert clock_of(groups) is None  # two GPUs against one
    old = Group("old", "", [write_run(tmp_path / "old", points)])
    assert clock_of([old, groups[0]]) is None
    groups[1].runs[0].result["environment"] = {"threads": 1, "hardware": "another"}
    assert clock_of(groups) is None  # whose seconds differ
    past = write_run(tmp_path / "past", [*points, (30, 6_000_000, 30.0)], "full", seconds=(0, 3600, 7200, 9000))
    full = [groups[0], Group("past", "", [past])]  # which was as good, but not at its end
    assert "÷ full" in time_table([*full[::-1], groups[1]], "cpu_seconds")


def group(folder, label, panel, attention, value, n=512):
    """A group of one run, trained for an hour."""
    points, seconds = [(0, 0, 900.0), (10, 1_000_000, 2 * value), (20, 2_000_000, value)], (0, 1800, 3600)
    return Group(label, panel, [write_run(folder / f"{label}-{panel}", points, attention, seconds=seconds, n=n)])


def test_each_panel_has_its_own_equal_time(tmp_path):
    """Panels of several n each have a Transformer; where they are attentions, all are compared with the best Transformer."""
    short = [group(tmp_path, name, "n 512", name, value) for name, value in (("full", 40.0), ("linformer", 50.0))]
    long = [group(tmp_path, name, "n 4096", name, value, n=4096) for name, value in (("full", 60.0), ("linformer", 30.0))]
    shown = time_table([*short, *long], "cpu_seconds")
    of_512, of_4096 = shown.split("n 4096, at equal processor time in training, that of the best Transformer (full, 60.0 min")
    assert of_512.startswith("n 512, at equal processor time") and of_512.rstrip().endswith("1.250 |")
    assert tables(of_4096)["linformer"][-1] == "0.500"
    names = {"plain": 80.0, "modern": 25.0}
    full = [group(tmp_path, name, "Transformer", "full", value) for name, value in names.items()]
    ours = [group(tmp_path, name, "lookup", "lookup", 0.8 * value) for name, value in names.items()]
    shown = time_table([*full, *ours], "cpu_seconds")
    assert shown.startswith("lookup, at equal processor time in training, that of the best Transformer (modern · Transformer, ")
    found = tables(shown)
    assert found["plain"][-1] == "2.560" and found["modern"][-1] == "0.800" and found["modern · Transformer"][-1] == "–"
    assert time_table(full, "cpu_seconds") == ""


def test_a_run_on_another_text_is_in_no_equal_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    points = [(0, 0, 900.0), (10, 2_000_000, 50.0)]
    write_run(Path("runs/full"), points, "full", seconds=(0, 3600))
    write_run(Path("runs/ours"), points, seconds=(0, 1800))
    write_run(Path("runs/other"), points, source="another.txt", seconds=(0, 1800))
    main([])
    lines = tables(Path("runs/report/report.md").read_text().partition("At equal")[2].split("\n\n")[1])
    assert {name for name in lines if name.startswith("runs/")} == {"runs/full", "runs/ours"}
