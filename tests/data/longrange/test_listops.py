"""ListOps: every generated expression has the value that Python's own evaluation gives."""

import statistics

import numpy as np
import pytest

from lit_linformer.data.longrange import listops

PYTHON = {"[MIN": "min([", "[MAX": "max([", "[MED": "med([", "[SM": "sm([", "]": "]),"}


def by_python(tokens: np.ndarray) -> int:
    """Translates the expression to Python, whose parser evaluates it."""
    words = [listops.SYMBOLS[token] for token in tokens]
    text = "".join(PYTHON.get(word, f"{word},") for word in words)
    names = {"min": min, "max": max, "med": lambda n: int(statistics.median(n)), "sm": lambda n: sum(n) % 10}
    (found,) = eval(f"({text})", {"__builtins__": {}} | names)
    return found


@pytest.fixture(scope="module")
def made():
    return [(tokens, label) for (tokens,), label in (listops.row("train", "hard", number) for number in range(150))]


def test_values_are_those_of_another_evaluation(made):
    assert [by_python(tokens) for tokens, _ in made] == [label for _, label in made]
    assert {label for _, label in made} == set(range(10))
    for level in ("3", "5"):
        rows = [listops.row("train", level, number) for number in range(50)]
        assert [by_python(tokens) for (tokens,), _ in rows] == [label for _, label in rows]


def levels_of(tokens: np.ndarray) -> int:
    """How deep an expression's brackets are nested, and one more: the digits."""
    depth = np.cumsum((tokens >= 10) & (tokens < 14)) - np.cumsum(tokens == 14)
    assert depth[-1] == 0 and (depth[:-1] > 0).all()
    return int(depth.max()) + 1


@pytest.mark.parametrize(("level", "nested", "fewest", "most"), [("3", 3, 6, 59), ("5", 5, 61, 249)])
def test_expressions_to_begin_with_are_shorter(level, nested, fewest, most):
    made = [listops.row("train", level, number)[0][0] for number in range(300)]
    assert max(map(levels_of, made)) == nested
    assert all(fewest <= len(tokens) <= most for tokens in made)


def test_expressions_are_of_the_benchmarks_size(made):
    for tokens, _ in made:
        assert 500 < len(tokens) < 2000 and tokens.dtype == np.uint8 and levels_of(tokens) <= 10
    digits = np.concatenate([tokens[tokens < 10] for tokens, _ in made])
    assert np.bincount(digits) / len(digits) == pytest.approx(np.full(10, 0.1), abs=0.01)
    operators = np.concatenate([tokens[(tokens >= 10) & (tokens < 14)] for tokens, _ in made])
    assert np.bincount(operators - 10) / len(operators) == pytest.approx(np.full(4, 0.25), abs=0.02)


def test_a_row_depends_on_its_number_the_split_and_the_level_alone(made):
    (again,), label = listops.row("train", "hard", 2)
    assert again.tolist() == made[2][0].tolist() and label == made[2][1]
    assert listops.row("validation", "hard", 0)[0][0].tolist() != made[0][0].tolist()
    # Python guarantees that random() does not change, so this row is the same everywhere.
    tokens, label = made[0]
    assert (len(tokens), label, tokens[:12].tolist()) == (622, 1, [10, 9, 12, 12, 4, 8, 5, 7, 10, 0, 11, 12])


def test_the_authors_files_are_read(made, tmp_path):
    """In Source, round brackets enclose each step of an operator's arguments, with no effect on the value."""
    words = [" ".join(listops.SYMBOLS[token] for token in tokens) for tokens, _ in made[:3]]
    lines = ["Source\tTarget", *(f"( ( {text} ) )\t{label}" for text, (_, label) in zip(words, made[:3], strict=True))]
    (tmp_path / "basic_train.tsv").write_text("\r\n".join(lines) + "\r\n")
    read = list(listops.read([tmp_path / "basic_train.tsv"]))
    assert [(tokens.tolist(), label) for (tokens,), label in read] == [(t.tolist(), label) for t, label in made[:3]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[MAX 1 2 ]\t1", "it comes to 2, not 1"),
        ("[MAX 1 2\t2", "it lacks a bracket"),
        ("1 ]\t1", "a bracket too many"),
        ("]\t1", "a bracket too many"),
        ("[MAX ]\t1", "without arguments"),
        ("1 2\t1", "not one expression"),
        ("[AVG 1 2 ]\t1", r"it has '\[AVG'"),
        ("[MAX 1 2 ]", "its target is ''"),
        ("[MAX 1 2 ]\t12", "its target is '12'"),
        ("", "its target is ''"),
    ],
)
def test_a_broken_line_is_named(line, words, tmp_path):
    (tmp_path / "basic_val.tsv").write_text(f"Source\tTarget\n[MIN 3 4 ]\t3\n{line}\n")
    with pytest.raises(ValueError, match=rf"basic_val.tsv:3 is no row of ListOps: .*{words}.*; allowed: an expression of"):
        list(listops.read([tmp_path / "basic_val.tsv"]))
