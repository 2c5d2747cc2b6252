"""A grid: its cells and their order, what is left to do, and each way to get the file wrong."""

import shlex
from pathlib import Path

import pytest

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.run import run_cells
from lit_linformer.studies.tune.space import read_space
from tests.studies.grid.study import GRID, finish, finish_all

ROOT = Path(__file__).parents[3]


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
    (first.run_dir / "result.json").write_text('{"metr')  # a truncated copy
    assert first.left() and first.value() is None
    finish(first, result={"metrics": {"val/accuracy": 0.5}})
    assert first.left() == [] and first.value() == 0.5
    test = ["test", "--config", f"runs/{tested.name}/config.yaml", "--name", tested.name]
    assert tested.left() == [tested.fit, test]
    finish(tested, result={"metrics": {"val/accuracy": 0.5}})
    assert tested.left() == [test] and tested.value() is None
    finish(tested, test={"metrics": {"test/accuracy": 0.25}})
    assert tested.left() == [] and tested.value() == 0.25


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
        ([], "--config is not given; allowed: FILE, the grid file, such as conf/paper/table2.yaml"),
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
    assert all(" --ckpt_path auto" in line for line in lines)  # since a cluster may restart a job
    assert [line.split("study/")[-1].split()[0] for line in lines] == [
        "transformer-imdb-1",
        "linformer-128-layerwise-imdb-1",
        "linformer-128-layerwise-imdb-3",
    ]
    assert not Path("runs").exists()
