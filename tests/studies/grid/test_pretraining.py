"""A grid whose cells are pretrained first, and possibly converted."""

import os
import shlex

import pytest

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.run import run_cells
from tests.studies.grid.study import GRID, finish, finish_all


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
    finish(first.pretraining, result={"metrics": {}})
    os.utime(first.converted / "conversion.json", (1e9, 1e9))  # older than the weights now
    assert first.left() == [convert.split(), first.fit]
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
