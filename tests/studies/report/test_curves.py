"""The curves of `report`: figures, medians, and which runs are comparable."""

import math
from pathlib import Path

import pytest
import yaml

from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.table import write_table
from lit_linformer.studies.report.command import main
from lit_linformer.studies.report.figures import draw_curves
from lit_linformer.studies.report.sources import Group, Run, find
from lit_linformer.studies.report.tables import conversion_table, curve_table, ratio
from tests.studies.conftest import tables, write_run


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
    assert set(named) == {"T", "L", "S"}
    assert [list(xy) for xy in named["L"].get_data()] == [[0.0, 2.0, 4.0], [900.0, 62.0, 34.0]]  # the untrained model's, too
    looks = {(line.get_color(), line.get_linestyle()) for line in named.values()}
    assert len({colour for colour, _ in looks}) == 3 and named["T"].get_color() == "#000000"
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    assert [[list(xy) for xy in line.get_data()] for line in crosses] == [[[2.0], [99.0]]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["T", "L", "S", "unfinished run"]
    assert draw_curves(Figure, [Group("none", "", [Run(tmp_path / "nothing", "none")])]) is None
    assert Group("L", "", [*runs, stopped]).median() == Group("L", "", runs).median()  # of finished runs, if there are any
    assert tables(curve_table([Group("L", "", runs)]))["L"][4:] == ["34.00 (31.00–39.00)"] * 2
    timed = [write_run(tmp_path / f"timed-{end}", [(10, 2_000_000, 60.0)], seconds=(end,)) for end in (3, 9, 4)]
    assert Group("L", "", timed).median("cpu_seconds") == {4: 60.0}


@pytest.mark.parametrize(("start", "top"), [(9000.0, 78.0), (900.0, 1000.0)])
def test_a_start_far_above_all_later_points_leaves_the_picture(start, top, tmp_path):
    from matplotlib.figure import Figure

    run = write_run(tmp_path / "a", [(0, 0, start), (10, 2_000_000, 60.0), (20, 4_000_000, 20.0)], seconds=(0, 3, 5))
    for by in ("tokens", "cpu_seconds"):
        (axes,) = draw_curves(Figure, [Group("a", "", [run])], by).axes
        assert axes.get_ylim()[0] < 20 and axes.get_ylim()[1] == pytest.approx(top, rel=0.2)


def test_of_equal_curves_the_thinner_lies_on_the_thicker_and_the_legend_says_so(tmp_path):
    from matplotlib.figure import Figure

    points = [(0, 0, 900.0), (10, 2_000_000, 50.0), (20, 4_000_000, 20.0)]
    groups = [Group(name, "", [write_run(tmp_path / name, points)]) for name in "abc"]
    figure = draw_curves(Figure, groups)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert lines["a"].get_linewidth() > lines["b"].get_linewidth() + 1 > lines["c"].get_linewidth() + 2
    assert len({lines[name].get_linestyle() for name in "abc"}) == 3
    assert figure.legends[0].get_title().get_text() == "equal curves: thin on thick"
    other = Group("d", "", [write_run(tmp_path / "d", [(0, 0, 900.0), (10, 2_000_000, 60.0), (20, 4_000_000, 30.0)])])
    slower = Group("e", "", [write_run(tmp_path / "e", [(0, 0, 900.0), (5, 1_000_000, 90.0), (15, 3_000_000, 40.0)])])
    for pair in ([groups[0], other], [groups[0], slower]):  # all points in common, or only the untrained model's
        figure = draw_curves(Figure, pair)
        assert len({line.get_linewidth() for line in figure.axes[0].get_lines()}) == 1
        assert figure.legends[0].get_title().get_text() == ""


def test_a_model_that_diverged_leaves_axes_readable_and_other_curves_as_they_are(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    points = {"a": [900.0, 60.0, 20.0], "b": [900.0, 50.0, 30.0], "huge": [900.0, 1e12, 3e25]}
    points["off"] = [900.0, 70.0, math.nan]
    monkeypatch.chdir(tmp_path)
    runs = {
        name: write_run(Path("runs") / name, [(10 * place, 9_000_000_000 * place, value) for place, value in enumerate(values)])
        for name, values in points.items()
    }
    for names in (["a", "b"], ["a", "b", "huge"], ["a", "b", "off"]):
        figure = draw_curves(Figure, [Group(name, "", [runs[name]]) for name in names])
        figure.draw_without_rendering()
        (axes,) = figure.axes
        low, high = axes.get_ylim()
        shown = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
        assert 4 <= len(shown) <= 12 and all(shown), shown
        assert "10,000" in [label.get_text() for label in axes.get_xticklabels()]
        assert len({line.get_linewidth() for line in axes.get_lines()}) == 1 and not figure.legends[0].get_title().get_text()
    main([])
    found = tables(Path("runs/report/report.md").read_text())
    ends = [found[f"runs/{name}"][4:6] for name in points]
    assert ends == [["20.00", "20.00"], ["30.00", "30.00"], ["3e+25", "900.00"], ["nan", "70.00"]]


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
    worse = Group("T0", "", [write_run(tmp_path / "worse", [(10, 1000, 65.0), (20, 2000, 40.0)], "full")])
    assert ratio(ours, [ours, worse, equal]) == ratio(ours, [ours, equal, worse]) == f"{30 / 24:.3f} at 0.002 M, T3"
    assert (
        ratio(ours, [ours, other]) == ratio(ours, [ours, narrow]) == ratio(ours, [ours]) == ratio(equal, [ours, equal]) == "–"
    )


def with_settings(folder, name, panel, attention, value, width=5, **settings):
    """A group of one run with these settings of its model."""
    run = write_run(folder / f"{name}-{attention}", [(10, 1000, value)], attention)
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    config["model"]["init_args"] |= settings
    config["model"]["init_args"]["encoder"]["local_width"] = width
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Group(name, panel, [Run(run.folder, name)])


def test_the_panel_and_the_convolution_come_before_other_settings(tmp_path):
    ours = with_settings(tmp_path, "ours", "A", "linformer", 12.0)
    near = with_settings(tmp_path, "near", "B", "full", 8.0)
    plain = with_settings(tmp_path, "plain", "A", "full", 6.0, width=0)
    unlike = with_settings(tmp_path, "unlike", "A", "full", 10.0, optimizer="muon", schedule="wsd", lr=0.5)
    assert ratio(ours, [ours, near, plain, unlike]) == "1.200 at 0.001 M, unlike"
    assert ratio(ours, [ours, near, plain]) == "2.000 at 0.001 M, plain"


def test_a_part_is_compared_with_the_transformer_that_has_it(tmp_path):
    from matplotlib.figure import Figure

    def group(name, attention, value, **settings):
        return with_settings(tmp_path, name, attention, attention, value, **settings)

    parts = {"a": {}, "b": {"optimizer": "muon"}, "c": {"optimizer": "muon", "schedule": "wsd"}}
    full = [group(name, "full", 10.0, **settings) for name, settings in parts.items()]
    ours = [group(name, "linformer", 12.0, **settings) for name, settings in parts.items()]
    figure = draw_curves(Figure, full + ours)  # the panels show the attention, so colours show the parts
    assert len({line.get_color() for axes in figure.axes for line in axes.get_lines()} - {"#000000"}) == len(parts)
    assert [ratio(one, full + ours) for one in ours] == [f"1.200 at 0.001 M, {name}" for name in parts]
    assert ratio(ours[2], full[:2]) == "1.200 at 0.001 M, b"  # the nearest, if there is no equal one


@pytest.mark.parametrize(
    ("settings", "comparable"),
    [
        ({"mask_rate": 0.3, "whole_word": True}, True),  # of training; validation has its own masks
        ({"document_start": "^ = "}, False),
        ({"column": "body"}, False),
        ({"max_length": 128}, False),
        ({"batch_size": 4}, True),
        ({"batch_size": 4, "limit": 20}, False),  # 20 batches are then other rows
        ({"limit": 20, "other_limit": 10}, False),
        ({"limit": 20, "processes": 1}, True),
        ({"limit": 20, "processes": 2}, False),  # twice as many rows
        ({"processes": 2}, True),
        ({"batch_size": 4, "limit": 1}, False),  # one batch; 1.0 is all of them
        ({"batch_size": 4, "limit": None, "other_limit": 1.0}, True),
        ({"source": "elsewhere"}, False),
        ({"source": "elsewhere", "validation_source": "held.txt"}, None),
    ],
)
def test_perplexities_of_other_validation_text_do_not_compare(settings, comparable, tmp_path):
    limit = settings.pop("limit", 1.0)
    limits, processes = (limit, settings.pop("other_limit", limit)), (1, settings.pop("processes", 1))
    runs = []
    both = {"validation_source": "held.txt"} if comparable is None else {}
    for name, changed, limit, count in zip(("one", "other"), (both, settings), limits, processes, strict=True):
        run = write_run(tmp_path / name, [(10, 1000, 60.0)])
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        config["data"]["init_args"] |= {"batch_size": 8, **changed}
        config["trainer"]["limit_val_batches"] = limit
        (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
        runs.append(Run(run.folder, name))
        runs[-1].result["environment"]["processes"] = count
    assert (runs[0].text == runs[1].text) == (comparable is not False)


def test_generated_rows_of_other_settings_do_not_compare(tmp_path):
    runs = []
    for name, pairs in (("one", 4), ("other", 32), ("again", 4)):
        run = write_run(tmp_path / name, [(10, 1000, 60.0)])
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        config["data"] = {"class_path": "lit_linformer.data.RecallData", "init_args": {"pairs": pairs, "batch_size": pairs}}
        (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
        runs.append(Run(run.folder, name))
    assert runs[0].text == runs[2].text != runs[1].text


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
    Path("runs/task/test.json").write_text('{"metrics": {"test/accuracy": 0.5, "test/score": null}}')
    main([])
    expected = ["runs/task", "7", "4", "accuracy 0.7500", "accuracy 0.5000, score nan"]
    assert tables(Path("runs/report/report.md").read_text())["runs/task"] == expected
    write_run(Path("runs/c"), [(10, 1000, 60.0)], source="another.txt")
    main([])
    assert "such perplexities do not compare" in Path("runs/report/report.md").read_text()


def test_a_run_that_began_from_a_model_has_that_ones_encoder(tmp_path):
    """Its config has only model.pretrained; the encoder is in hparams.yaml."""
    run = write_run(tmp_path / "run", [(10, 1000, 60.0)], attention="full", n=64)
    encoder = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["init_args"]["encoder"]
    config = {"model": {"init_args": {"pretrained": "runs/longer", "encoder": None}}}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    assert not Run(run.folder, "run").transformer and Run(run.folder, "run").encoder("max_length") is None
    (tmp_path / "run/hparams.yaml").write_text(yaml.safe_dump({"encoder": encoder, "lr": 1e-3}))
    assert Run(run.folder, "run").transformer and Run(run.folder, "run").encoder("max_length") == 64


def test_a_curve_goes_on_where_its_pretraining_ended(tmp_path, monkeypatch):
    """In a grid, with the tokens and time of the pretraining added; alone, a run counts only its own."""
    monkeypatch.chdir(tmp_path)
    axes = "axes: {model: {a: '', b: ''}, n: {8: ''}}\ntable: {rows: model, columns: n, value: val/perplexity}\n"
    Path("grid.yaml").write_text(f"name: short-first\n{axes}pretraining: {{model: {{a: ''}}}}\nconvert: --max_length 8\n")
    grid = read_grid(Path("grid.yaml"))
    for cell, begins in zip(grid.cells, (str(grid.cells[0].converted), None), strict=True):
        write_run(cell.run_dir, [(0, 0, 90.0), (10, 2_000_000, 60.0)], seconds=(0, 3), pretrained=begins)
        # b's pretraining is from an earlier grid file, and b started from other weights.
        before = cell.run_dir.with_name(f"{cell.run_dir.name}-pretraining")
        write_run(before, [(0, 0, 900.0), (20, 5_000_000, 95.0)], n=4, seconds=(0, 6))
    write_table(grid, "python run.py grid --config grid.yaml")
    (source,), _ = find(["runs/short-first"])
    a, b = source.runs
    assert a.points() == {5_000_000: 90.0, 7_000_000: 60.0} and b.points() == {0: 90.0, 2_000_000: 60.0}
    assert a.points("cpu_seconds") == {6: 90.0, 9: 60.0} and a.points("training_seconds") == {2 * 6 + 7 + 7: 90.0, 32: 60.0}
    assert [row["step"] for row in a.curve] == [0, 10]
    assert [run.last("tokens") for run in (a, b)] == [7_000_000, 2_000_000]  # result.json counts this part only
    assert [run.last("seconds") for run in (a, b)] == [1 + 2, 1] and a.last("step") == 10
    assert Run(a.folder, "a").points() == b.points()


@pytest.mark.parametrize("data", ["PretrainingData", "RecallData"])
def test_the_papers_words_on_perplexity_are_beside_texts_only(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axes = "axes: {model: {a: '', b: ''}, n: {8: ''}}\ntable: {rows: model, columns: n, value: val/perplexity}\n"
    Path("grid.yaml").write_text(f"name: some\n{axes}")
    grid = read_grid(Path("grid.yaml"))
    run = write_run(grid.cells[0].run_dir, [(10, 1000, 60.0)])  # the other has not started
    (run.folder / "config.yaml").write_text((run.folder / "config.yaml").read_text().replace("PretrainingData", data))
    (run.folder / "result.json").write_text('{"step": 10, "metrics": {"val/perplexity": 60.0}}')
    write_table(grid, "python run.py grid --config grid.yaml")
    main(["--source", "runs/some"])
    page = Path("runs/report/report.md").read_text()
    assert ("prints no perplexities" in page) == ("## Figure 3: perplexity" in page) == (data == "PretrainingData")
    assert ("## Perplexity while training, some" in page) == (data == "RecallData")


def test_a_conversion_is_compared_with_its_teacher(tmp_path):
    points = [(0, 0, 100.0), (4, 400_000, 60.0), (9, 900_000, 40.0), (20, 2_000_000, 25.0)]
    runs = [write_run(tmp_path / name, points) for name in ("distilled", "alone")]
    runs[0].result["metrics"]["val/teacher_perplexity"] = 20.0
    rows = tables(conversion_table(runs))
    assert rows["distilled"] == ["distilled", "20.00", "100.00", "40.00", "25.00", "1.250", "2.00"]
    assert rows["alone"][1:2] + rows["alone"][5:] == ["–", "–", "2.00"]
