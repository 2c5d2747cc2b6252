"""Pathfinder (Linsley et al., 2018; Long Range Arena, Tay et al., 2021): do the two dots end one dashed line, or two?

Drawn with the parameters of Long Range Arena's images of 32 × 32 pixels. Where its authors give none, they are ours: two lines
never come closer than CLEARANCE, so that following a line from one dot always leads to the right end. One dot is always at the
beginning of a line and the other at the end of a line, as in the authors' images: two beginnings, which are always APART, could
be recognised by their distance.

Coordinates are pixels, (row, column), the image's corner at (0, 0).
"""

import numpy as np

from lit_linformer.data.pretraining.token_files import SPLITS

SIDE, PADDING = 32, 1
DASH, GAP, THICKNESS, DOT = 2.0, 1.0, 0.5, 1.5  # lengths; DOT is a radius
TURN = 1.0  # most radians that a line turns from one dash to the next
APART = 7  # distance between the beginnings of the two lines
CLEARANCE = 1.75  # between the axes of dashes of two lines, or of dashes of one line that are not consecutive
# Dashes in each of the two lines; other lines have a third of that. The first two levels are not the benchmark's.
LEVELS = {"2": 2, "3": 3, "easy": 6, "intermediate": 9, "hard": 14}
OTHER_DASHES = 20  # in all other lines together
TRIALS, STARTS = 12, 60  # attempts to place a dash, and a line
POINTS = np.linspace(0, 1, 5)[:, None]  # points on a dash, from which distances are measured
DASH_LIGHT = 0.75

_PIXELS = np.stack(np.meshgrid(*[np.arange(SIDE) + 0.5] * 2, indexing="ij"), -1).reshape(-1, 1, 2)


def drawing(draw: np.random.Generator, level: str) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, int]:
    """An image.

    Args:
        draw: Source of randomness.
        level: One of LEVELS.

    Returns:
        The image (SIDE, SIDE) uint8; its lines, each (dashes, 2, 2), from end to end, the first two being the long ones; the
        two dots (2, 2); the label, 1 if they are the ends of one line.
    """
    length = LEVELS[level]
    short = max(1, length // 3)
    label = int(draw.integers(2))
    while True:
        lines: list[np.ndarray] = []
        start = draw.uniform(APART, SIDE - APART, 2)
        angle = draw.uniform(0, 2 * np.pi)
        for begin in (start, start + APART * np.array([np.sin(angle), np.cos(angle)])):
            if (line := _line(draw, length, lines, begin)) is not None:
                lines.append(line)
        if len(lines) < 2:
            continue
        for _ in range(OTHER_DASHES // short):
            if (line := _line(draw, short, lines)) is not None:
                lines.append(line)
        one = int(draw.integers(2))
        other = one if label else 1 - one
        dots = np.stack([lines[one][0, 0], lines[other][-1, 1]])  # where one begins, and where it or the other ends
        if np.linalg.norm(dots[0] - dots[1]) > 2 * DOT + 1:  # else they would merge
            return _image(lines, dots), lines, dots, label


def _line(draw: np.random.Generator, length: int, others: list[np.ndarray], begin: np.ndarray | None = None):
    """(length, 2, 2), the beginning and the end of each dash; None if no room was found."""
    taken = np.concatenate([_points(line) for line in others]) if others else np.zeros((0, 2))
    for _ in range(STARTS):
        dashes: list[np.ndarray] = []
        place = draw.uniform(PADDING, SIDE - PADDING, 2) if begin is None else begin
        angle = draw.uniform(0, 2 * np.pi)
        while len(dashes) < length:
            own = _points(np.array(dashes[:-1])) if len(dashes) > 1 else np.zeros((0, 2))
            for _ in range(TRIALS):
                turned = angle + draw.uniform(-TURN, TURN)
                step = np.array([np.sin(turned), np.cos(turned)])
                first = place + (GAP * step if dashes else 0)
                dash = np.stack([first, first + DASH * step])
                if _fits(dash, taken, own):
                    break
            else:
                break
            dashes.append(dash)
            place, angle = dash[1], turned
        if len(dashes) == length:
            return np.array(dashes)
    return None


def _fits(dash: np.ndarray, *taken: np.ndarray) -> bool:
    if (dash < PADDING).any() or (dash > SIDE - PADDING).any():
        return False
    mine = _points(dash[None])[:, None]
    return all(((mine - points) ** 2).sum(-1).min(initial=np.inf) >= CLEARANCE**2 for points in taken)


def _points(dashes: np.ndarray) -> np.ndarray:
    """(D, 2, 2) → (5 D, 2)."""
    return (dashes[:, None, 0] * (1 - POINTS) + dashes[:, None, 1] * POINTS).reshape(-1, 2)


def _image(lines: list[np.ndarray], dots: np.ndarray) -> np.ndarray:
    """Brightness is the covered share of a pixel, estimated from its centre's distance to a dash or a dot."""
    dashes = np.concatenate(lines)
    begin, along = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
    share = (((_PIXELS - begin) * along).sum(-1) / DASH**2).clip(0, 1)  # (pixels, dashes)
    far = np.linalg.norm(_PIXELS - begin - share[..., None] * along, axis=-1).min(1)
    light = DASH_LIGHT * (0.5 + THICKNESS / 2 - far).clip(0, 1)
    far = np.linalg.norm(_PIXELS - dots, axis=-1).min(1)
    light = np.maximum(light, (0.5 + DOT - far).clip(0, 1))
    return (255 * light).round().astype(np.uint8).reshape(SIDE, SIDE)


def row(split: str, level: str, number: int) -> tuple[list[np.ndarray], int]:
    """([pixels (SIDE²,) uint8, row by row], label), a function of the row's number, the split and the level alone."""
    image, _, _, label = drawing(np.random.default_rng([0, SPLITS.index(split), number]), level)
    return [image.reshape(-1)], label
