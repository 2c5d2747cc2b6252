"""Pathfinder: labels are what one finds by following the line from one dot, dash by dash."""

import numpy as np
import pytest

from lit_linformer.data.longrange import pathfinder
from lit_linformer.data.longrange.pathfinder import DASH, GAP, SIDE, TURN


def follow(lines: list[np.ndarray], dots: np.ndarray) -> int:
    """Does not know which dashes belong together: continues with the one that begins a gap away, roughly straight ahead."""
    dashes = np.concatenate(lines)[np.random.default_rng(0).permutation(sum(map(len, lines)))]
    ends = np.concatenate([dashes, dashes[:, ::-1]])  # each in both directions
    (here,) = np.flatnonzero(np.linalg.norm(ends[:, 0] - dots[0], axis=1) < 1e-9)  # the dash that begins at the first dot
    used = set()
    while True:
        used.add(here % len(dashes))
        place, along = ends[here, 1], ends[here, 1] - ends[here, 0]
        if np.linalg.norm(place - dots[1]) < 1e-9:
            return 1
        gaps = np.linalg.norm(ends[:, 0] - place, axis=1)
        turns = (ends[:, 1] - ends[:, 0]) @ along / DASH**2
        near = np.flatnonzero((np.abs(gaps - GAP) < 1e-6) & (turns > np.cos(TURN) - 1e-6))
        near = [end for end in near.tolist() if end % len(dashes) not in used]
        if not near:
            return 0
        (here,) = near  # never two: lines stay apart


@pytest.mark.parametrize("level", pathfinder.LEVELS)
def test_labels_are_found_by_following_the_line(level):
    labels = []
    for number in range(40):
        image, lines, dots, label = pathfinder.drawing(np.random.default_rng([7, number]), level)
        assert follow(lines, dots) == label
        begins, ends = ([tuple(line[at]) for line in lines[:2]] for at in ((0, 0), (-1, 1)))
        one, other = begins.index(tuple(dots[0])), ends.index(tuple(dots[1]))  # two beginnings would be APART
        assert (one == other) == label
        assert [len(line) for line in lines[:2]] == [pathfinder.LEVELS[level]] * 2
        assert image.shape == (SIDE, SIDE) and image.max() == 255  # the dots
        labels.append(label)
    assert 8 <= sum(labels) <= 32


def test_what_is_drawn_is_where_the_dashes_and_dots_are():
    image, lines, dots, _ = pathfinder.drawing(np.random.default_rng(3), "intermediate")
    points = np.concatenate([dash[0] + np.linspace(0, 1, 21)[:, None] * (dash[1] - dash[0]) for dash in np.concatenate(lines)])
    middles = np.stack(np.meshgrid(*[np.arange(SIDE) + 0.5] * 2, indexing="ij"), -1)
    far = np.linalg.norm(middles[:, :, None] - points, axis=-1).min(-1)
    dot = np.linalg.norm(middles[:, :, None] - dots, axis=-1).min(-1)
    assert (image[dot < 1] == 255).all()
    assert (image[(far > 0.8) & (dot > 2.05)] == 0).all()
    assert (image[(far < 0.2)] > 90).all()


def test_a_row_depends_on_its_number_the_split_and_the_level_alone():
    pixels, label = pathfinder.row("train", "easy", 1)
    again, same = pathfinder.row("train", "easy", 1)
    assert (pixels[0] == again[0]).all() and label == same
    others = [pathfinder.row("train", "easy", 0), pathfinder.row("test", "easy", 1), pathfinder.row("train", "hard", 1)]
    assert not any((pixels[0] == other[0]).all() for other, _ in others)
