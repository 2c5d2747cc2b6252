"""A grid: its cells and their order, what is left of them, the table, and each way to get the file wrong."""

import json
import shlex
from pathlib import Path

import pytest

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.run import run_cells
from lit_linformer.studies.grid.table import summary, write_table
from lit_linformer.studies.tune.space import read_space

ROOT = Path(__file__).parents[3]
GRID = """
name: study
arguments: --config base.yaml --trainer.max_steps 5
axes:
  model:
    Transformer: --model.encoder.attention full
    Linformer, 128, layerwise: --config small.yaml --model.lr 1e-3
  task:
    SST-2: --config "sst 2.yaml"
    IMDB: --config=imdb.yaml --data.batch_size 2
  seed: {1: --seed_everything 1, 2: --seed_everything 2, 3: --seed_everything 3}
table:
  rows: model
  columns: task
  value: {SST-2: val/accuracy, IMDB: test/accuracy}
  scale: 100
  decimals: 1
paper:
  Linformer, 128, layerwise: {SST-2: 93.2, IMDB: 94}
skip:
  - {model: Transformer, task: IMDB, seed: 3}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The grid above, with the files that it names, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "small", "sst 2", "imdb"):
        (tmp_path / f"{name}.yaml").write_text("{}")
    path = tmp_path / "study.yaml"
    path.write_text(GRID)
    return path


def finish(cell, **files):
    """Writes what the commands leave: result={…}, test={…}."""
    cell.run_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (cell.run_dir / f"{name}.json").write_text(json.dumps(content))


def finish_all(grid, values):
    """Cells in their order, with these values; None: unfinished."""
    for cell, value in zip(grid.cells, values, strict=True):
        if value is not None:
            split = cell.metric.split("/")[0]
            finish(cell, result={"metrics": {"val/accuracy": value if split == "val" else 0.1}})
            if split == "test":
                finish(cell, test={"metrics": {"test/accuracy": value}})


def test_cells_are_the_product_in_order(file):
    cells = read_grid(file).cells
    assert len(cells) == 11 and all(cell.values != {"model": "Transformer", "task": "IMDB", "seed": "3"} for cell in cells)
    assert [cell.name for cell in cells[2:6]] == [
        "study/transformer-sst-2-3",
        "study/transformer-imdb-1",
        "study/transformer-imdb-2",
        "study/linformer-128-layerwise-sst-2-1",
    ]
    assert str(cells[5]) == "Linformer, 128, layerwise · SST-2 · 1"


def test_configs_first_then_settings_each_in_the_order_of_the_axes(file):
    (file.parent / "fast.yaml").write_text("{}")
    cell = read_grid(file, arguments="--config fast.yaml --trainer.max_steps 1").cells[-1]
    assert shlex.join(cell.fit) == (
        "fit --config base.yaml --config small.yaml --config imdb.yaml --config fast.yaml --trainer.max_steps 5 "
        "--model.lr 1e-3 --data.batch_size 2 --seed_everything 3 --trainer.max_steps 1 "
        "--name study/linformer-128-layerwise-imdb-3"
    )


def test_what_is_left_of_a_cell(file):
    grid = read_grid(file)
    first, tested = grid.cells[0], grid.cells[-1]
    assert first.left() == [first.fit]
    checkpoints = first.run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "best-00000007-0.5.ckpt").touch()
    assert first.left() == [[*first.fit, "--ckpt_path", "auto"]]
    (first.run_dir / "result.json").write_text('{"metr')  # a copy that was cut off
    assert first.left() and first.value() is None
    finish(first, result={"metrics": {"val/accuracy": 0.5}})
    assert first.left() == [] and first.value() == 0.5
    test = ["test", "--config", f"runs/{tested.name}/config.yaml", "--name", tested.name]
    assert tested.left() == [tested.fit, test]
    finish(tested, result={"metrics": {"val/accuracy": 0.5}})
    assert tested.left() == [test] and tested.value() is None
    finish(tested, test={"metrics": {"test/accuracy": 0.25}})
    assert tested.left() == [] and tested.value() == 0.25


def test_a_cell_is_pretrained_first(file, capsys):
    (file.parent / "masked.yaml").write_text("{}")
    before = "pretraining:\n  model: {Transformer: --config masked.yaml --model.lr 2}\n  task: {SST-2: --data.source a}\n"
    file.write_text(GRID + before)
    first, *others = read_grid(file, arguments="--trainer.precision 32-true").cells
    pretraining = "fit --config masked.yaml --model.lr 2 --data.source a --trainer.precision 32-true".split()
    pretraining = [*pretraining[:1], "--config", "base.yaml", *pretraining[1:3], "--trainer.max_steps", "5", *pretraining[3:]]
    pretraining += ["--name", "study/transformer-sst-2-1-pretraining"]
    assert first.left() == [pretraining, first.fit]
    assert shlex.join(first.fit).endswith("--name study/transformer-sst-2-1 --model.pretrained runs/" + pretraining[-1])
    assert [cell.pretraining is not None for cell in others] == [True, True] + [False] * 8  # the other two seeds
    finish(first.pretraining, result={"metrics": {}})
    assert first.left() == [first.fit]
    finish(first, result={"metrics": {"val/accuracy": 0.5}})
    assert first.left() == [] and first.value() == 0.5
    main(["--config", "study.yaml", "--print_commands", "true", "--only", "seed=2", "--only", "task=SST-2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("run.py fit") for line in lines] == [2, 1]


def test_a_pretraining_is_converted_before_it_is_trained_on(file, capsys):
    file.write_text(GRID + "pretraining:\n  model: {Transformer: --model.lr 2}\nconvert: --max_length 2048\n")
    first, *_, last = read_grid(file).cells
    convert = "convert --max_length 2048 --from runs/study/transformer-sst-2-1-pretraining "
    convert += "--name study/transformer-sst-2-1-converted --overwrite true"
    assert first.left() == [first.pretraining.fit, convert.split(), first.fit]
    assert first.fit[-2:] == ["--model.pretrained", "runs/study/transformer-sst-2-1-converted"]
    assert last.left()[0] == last.fit and not last.conversion
    finish(first.pretraining, result={"metrics": {}})
    assert first.left() == [convert.split(), first.fit]
    first.converted.mkdir()
    (first.converted / "conversion.json").write_text("{}")
    assert first.left() == [first.fit]
    (first.pretraining.run_dir / "result.json").unlink()  # trained again: converted again
    assert first.left() == [first.pretraining.fit, convert.split(), first.fit]
    finish(first, result={"metrics": {"val/accuracy": 0.5}})
    lines = [f"$ python -m lit_linformer {shlex.join(words)}" for _, words, _ in first.parts()]
    first.log.write_text("\n".join(lines).replace("2048", "1024") + "\n")
    run_cells([first])
    shown = capsys.readouterr().out
    assert shown.count("warning") == 1
    assert "warning: its conversion ran with other settings than the grid's; to run it again delete" in shown
    assert f"delete {first.run_dir} and {first.converted}\n" in shown


@pytest.mark.parametrize("part", ["pretraining", "converted"])
def test_a_cell_is_not_what_comes_before_another(part, file):
    axes = f"axes: {{a: {{x: '', x {part}: ''}}, b: {{1: ''}}}}\ntable: {{rows: a, columns: b, value: val/loss}}\n"
    file.write_text(axes + "pretraining: {a: {x: ''}}\nconvert: --max_length 9\n")
    assert len(read_grid(file).cells) == 2  # x-1 and x-pretraining-1
    file.write_text(axes.replace("{1: ''}", "{'': ''}") + "pretraining: {a: {x: ''}}\nconvert: --max_length 9\n")
    with pytest.raises(ValueError, match="axes: a cell and what comes before 'x' would be one run; allowed: other values"):
        read_grid(file)


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
    assert "| Transformer               | 12.3  | 56.8 | 34.6    |" in shown


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


def test_warns_of_a_cell_that_ran_with_other_settings(file, capsys):
    grid = read_grid(file)
    finish_all(grid, [0.5] * 11)
    other = [f"$ python run.py fit --config other.yaml --name {cell.name}" for cell in grid.cells]
    grid.cells[0].log.write_text(f"$ python run.py {shlex.join(grid.cells[0].fit)} --ckpt_path last\nfine\n")
    grid.cells[1].log.write_text(f"{other[1]}\nfine\n")
    fit = f"$ python run.py {shlex.join(grid.cells[2].fit)}"
    grid.cells[2].log.write_text(f"{other[2]}\nkilled\n{fit} --ckpt_path auto\nfine\n")
    grid.cells[3].log.write_text(f"{other[3]}\n$ python run.py {shlex.join(grid.cells[3].fit)}\n")
    assert run_cells(grid.cells) == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and "delete runs/study/transformer-sst-2-2" in lines[2]
    assert "warning: it ran with other settings" in lines[2] and "warning: a part of it ran with other settings" in lines[4]


def test_warns_of_a_pretraining_that_ran_with_other_settings(file, capsys):
    file.write_text(file.read_text() + "pretraining:\n  model:\n    Transformer: --config base.yaml --model.lr 5e-2\n")
    grid = read_grid(file)
    finish_all(grid, [0.5] * 11)
    cell = grid.cells[0]
    finish(cell.pretraining, result={"step": 1, "metrics": {"val/perplexity": 1.0}})
    before = shlex.join(cell.pretraining.fit).replace("5e-2", "1e-3")
    assert before != shlex.join(cell.pretraining.fit)
    cell.log.write_text(f"$ python -m lit_linformer {before}\n$ python -m lit_linformer {shlex.join(cell.fit)}\n")
    run_cells([cell])
    shown = capsys.readouterr().out
    assert "warning: its pretraining ran with other settings than the grid's" in shown
    assert f"delete {cell.run_dir} and {cell.pretraining.run_dir}" in shown


def test_documented_grid_is_one(tmp_path, monkeypatch):
    """The example in the help."""
    from lit_linformer.studies.grid import command

    monkeypatch.chdir(ROOT)
    (tmp_path / "example.yaml").write_text(command.__doc__.partition("The grid file:\n")[2])
    assert len(read_grid(tmp_path / "example.yaml").cells) == 6


def test_a_file_of_another_command_is_known():
    for name, command in (("quickstart", "fit"), ("tune/lr", "tune --space")):
        with pytest.raises(ValueError, match=rf"{name}.yaml is a file for `{command}`; allowed: a grid file, as conf/paper/"):
            read_grid(ROOT / f"conf/{name}.yaml")
    with pytest.raises(ValueError, match=r"table2.yaml is a file for `grid`; allowed: a space file, as conf/tune/lr.yaml"):
        read_space(ROOT / "conf/paper/table2.yaml", None, None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: study", "nam: study", "names no key by 'nam'; did you mean 'name'?; allowed: name, arguments, axes"),
        ("  scale: 100", "  scael: 100", "table names no key by 'scael'; did you mean 'scale'?; allowed: rows"),
        ("name: study", "name: ../study", "name is '../study'; allowed: letters"),
        ("axes:", "# axes\nskipp:", "by 'skipp'; did you mean 'skip'?"),
        ("  rows: model", "  rows: modle", "table.rows is 'modle'; did you mean 'model'?; allowed: model, task, seed"),
        ("  columns: task", "", "table.columns is null; allowed: model, task, seed"),
        ("  columns: task", "  columns: model", "table.columns is 'model', which are the rows too; allowed: another of"),
        (
            "IMDB: test/acc",
            "IMBD: test/acc",
            "table.value names no column by 'IMBD'; did you mean 'IMDB'?; allowed: SST-2, IMDB",
        ),
        (", IMDB: test/accuracy", "", "table.value names nothing for column 'IMDB'; allowed: one name, or one for each column"),
        ("{SST-2: val/accuracy, IMDB: test/accuracy}", "[a]", "table.value is ['a']; allowed: a metric's name"),
        ("  scale: 100", "  scale: percent", "table.scale is 'percent'; allowed: a number"),
        ("decimals: 1", "decimals: 1.5", "table.decimals is '1.5'; allowed: a whole number, 0 to 10"),
        (
            "layerwise: {SST",
            "headwise: {SST",
            "paper names no row by 'Linformer, 128, headwise'; did you mean 'Linformer, 128, la",
        ),
        ("{SST-2: 93.2", "{SST-3: 93.2", "layerwise names no column by 'SST-3'; did you mean 'SST-2'?; allowed: SST-2, IMDB"),
        ("{SST-2: 93.2", "{SST-2: ninety", "paper.Linformer, 128, layerwise.SST-2 is 'ninety'; allowed: a number"),
        (
            "task: IMDB, seed",
            "tusk: IMDB, seed",
            "skip names no axis by 'tusk'; did you mean 'task'?; allowed: model, task, seed",
        ),
        ("IMDB, seed: 3", "IMDB, seed: 4", "skip.seed is '4'; allowed: 1, 2, 3"),
        (
            "skip:",
            "pretraining: {modle: {}}\nskip:",
            "pretraining names no axis by 'modle'; did you mean 'model'?; allowed: mo",
        ),
        ("skip:", "pretraining: {seed: {4: ''}}\nskip:", "pretraining.seed names no value by '4'; allowed: 1, 2, 3"),
        ("skip:", "convert: --max_length 9\nskip:", "convert is '--max_length 9' without it; allowed: with pretraining, whose"),
        (
            "skip:",
            "pretraining: {seed: {3: ''}}\nconvert: --from x\nskip:",
            "convert holds --from, which the grid sets itself",
        ),
        ("skip:", "pretraining: {seed: {3: --name x}}\nskip:", "pretraining.seed.3 holds --name, which the grid sets itself"),
        (
            "- {model: Transformer, task: IMDB, seed: 3}",
            "model: Transformer",
            "skip is {'model': 'Transformer'}; allowed: a list",
        ),
        ("IMDB: --config=imdb", "SST 2: --config=imdb", "table.value names no column"),
        ("  seed: {1:", "  seed: {' 2':", "would be run 'transformer-sst-2-2', as Transformer · SST-2 ·  2 is; allowed"),
        ("  seed: {1:", "  seed: {2:", "names '2' twice, at lines"),
        (
            "attention full",
            "attention 'full",
            'axes.model.Transformer is "--model.encoder.attention \'full" (No closing quotation)',
        ),
        (
            "Transformer: --model.encoder.attention full",
            "Transformer: [a]",
            "axes.model.Transformer is ['a'] (no text); allowed",
        ),
        ("small.yaml", "smal.yaml", "axes.model.Linformer, 128, layerwise holds --config smal.yaml, which is no file; allowed"),
        ("--config base.yaml", "--config", "arguments holds --config --trainer.max_steps, which is no file"),
        ("--trainer.max_steps 5", "--name x", "arguments holds --name, which the grid sets itself; allowed: all settings but"),
        ("axes:", "axes: {", "is no valid YAML at line"),
        (GRID, "", "study.yaml is empty; allowed: a grid file"),
        (GRID, "a grid", "study.yaml is the text 'a grid'; allowed: a grid file"),
        (GRID[GRID.index("axes:") : GRID.index("table:")], "", "axes is null; allowed: a mapping"),
        (GRID[GRID.index("  seed:") : GRID.index("table:")], "  seed:\n", "axes.seed is ''; allowed: a mapping"),
    ],
)
def test_bad_file(old, new, expected, file):
    assert old in GRID
    file.write_text(GRID.replace(old, new))
    with pytest.raises(ValueError) as caught:
        main(["--config", str(file)])
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "--config is not given; allowed: FILE, the grid file, as conf/paper/table2.yaml"),
        (["--config", "nowhere.yaml"], "config is 'nowhere.yaml', which is no file"),
        (["--job", "2"], "unknown setting '--job' of grid; did you mean '--jobs'?; allowed: --config, --jobs"),
        (["--config", "study.yaml", "--jobs", "0"], "jobs is '0'; allowed: a whole number, 1 or more"),
        (["--config", "study.yaml", "--jobs"], "--jobs has no value; allowed: N"),
        (["--config", "study.yaml", "--print_commands", "yes"], "print_commands is 'yes'; allowed: true, false"),
        (["--config", "study.yaml", "--only", "tusk=1"], "only is 'tusk'; did you mean 'task'?; allowed: model"),
        (["--config", "study.yaml", "--only", "seed=9"], "only seed is '9'; allowed: 1, 2, 3"),
        (["--config", "study.yaml", "--only", "model=BERT"], "allowed: Transformer, 'Linformer, 128, layerwise'"),
        (["--config", "study.yaml", "--arguments", "'"], '--arguments is "\'" (No closing quotation)'),
    ],
)
def test_bad_command_line(argv, expected, file):
    with pytest.raises(ValueError) as caught:
        main(argv)
    assert expected in str(caught.value) and not Path("runs").exists()


def test_only_some_cells(file, capsys):
    main(["--config", "study.yaml", "--print_commands", "true", "--only", "seed=1", "--only", "seed=3", "--only", "task=IMDB"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("study/")[-1] for line in lines] == [
        "transformer-imdb-1",
        "linformer-128-layerwise-imdb-1",
        "linformer-128-layerwise-imdb-3",
    ]
    assert not Path("runs").exists()
