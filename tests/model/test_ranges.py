"""Ranges that settings allow for numbers."""

import pytest

from lit_linformer.model.ranges import MANY, Count, Range, Seed, Share, check_ranges


def test_a_bound_that_is_told_is_the_one_that_counts():
    check_ranges("", {"seed": Seed}, {"seed": 2**32 - 1})  # more than MANY
    with pytest.raises(ValueError, match=r"^seed is 4294967296; allowed: 0 to 4294967295$"):
        check_ranges("", {"seed": Seed}, {"seed": 2**32})
    with pytest.raises(ValueError, match=rf"^rows is {MANY + 1}; allowed: 1 to {MANY}$"):
        check_ranges("", {"rows": Count}, {"rows": MANY + 1})
    assert 1e10 in Range(above=0, most=1e11) and 1.0 not in Range(least=0, below=1)


@pytest.mark.parametrize("value", [4.0, 2.5])  # in Python 8 / 2 is 4.0
@pytest.mark.parametrize("hint", [Count, int, Count | None, int | str])
def test_a_setting_of_whole_numbers_takes_no_other(hint, value):
    with pytest.raises(ValueError, match=rf"^rows is {value}; allowed: a whole number$"):
        check_ranges("", {"rows": hint}, {"rows": value})
    with pytest.raises(ValueError, match=rf"^rows is {value}; allowed: a whole number$"):
        check_ranges("", {"rows": list[hint]}, {"rows": [4, value]})


@pytest.mark.parametrize("hint", [Count | Share, Share | Count | None, float, Share | None])
def test_where_both_are_allowed_each_is(hint):
    check_ranges("", {"rows": hint}, {"rows": 0.5})
    check_ranges("", {"rows": hint}, {"rows": 1})
