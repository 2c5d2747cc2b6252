"""What a space file may say. Bad ones: tests/bad_input.yaml."""

from pathlib import Path

import pytest

from lit_linformer.studies.tune.space import read_space

TEXT = """
space:
  model.lr: {log: [1e-4, 1e-2]}
  model.encoder.dropout: {range: [0, 0.3]}
  model.encoder.projection_dim: {log: [16, 256]}
  model.encoder.projection: [linear, null, on, 1e-3, "[64, 128]", [64, 128]]
first: [{model.lr: 1e-3, model.encoder.projection: on}]
"""


def test_a_space_as_it_is_typed(tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text(TEXT.replace(', "[64, 128]"', ""))
    space = read_space(path, None, None)
    lr, dropout, k, projection = space.axes
    assert (space.name, space.trials, space.pruner) == ("wide", 20, "median")
    assert (lr.ends, lr.log, lr.whole, lr.word(0.00123456)) == ((1e-4, 1e-2), True, False, "0.001235")
    assert (dropout.ends, dropout.log, dropout.whole) == ((0.0, 0.3), False, False)
    assert (k.ends, k.log, k.whole, k.word(64)) == ((16, 256), True, True, "64")
    assert projection.choices == ("linear", "null", "on", "1e-3", "[64, 128]")
    assert space.first == ({"model.lr": 1e-3, "model.encoder.projection": "on"},)
    assert [axis.told() for axis in space.axes][:3] == ["{log: [0.0001, 0.01]}", "{range: [0, 0.3]}", "{log: [16, 256]}"]
    assert read_space(path, "other", 3).name == "other" and read_space(path, None, 3).trials == 3


def test_a_value_to_try_first_keeps_its_digits(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("space: {model.lr: {log: [1e-4, 1e-2]}}\nfirst: [{model.lr: 0.00123456}, {model.lr: 2e-3}]\n")
    (lr,) = read_space(path, None, None).axes
    assert [lr.word(value) for value in (0.00123456, 2e-3, 0.00234567)] == ["0.00123456", "0.002", "0.002346"]


def test_ends_may_be_negative(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("space: {model.a: {range: [-5, 5]}}\nfirst: [{model.a: -3}]\n")
    space = read_space(path, None, None)
    assert (space.axes[0].ends, space.axes[0].whole, space.first) == ((-5, 5), True, ({"model.a": -3},))
    path.write_text("space: {model.a: {range: ['--5', '5']}}\n")
    with pytest.raises(ValueError, match=r"^space model.a is '--5'; allowed: a number$"):
        read_space(path, None, None)


def test_equal_choices_are_refused(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(TEXT)
    with pytest.raises(ValueError, match=r"space model.encoder.projection is .*; allowed: each value once"):
        read_space(path, None, None)


def test_conf_has_the_form():
    for path in (Path(__file__).parents[3] / "conf/tune").glob("*.yaml"):
        assert read_space(path, None, None).axes
