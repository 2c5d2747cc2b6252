"""Figures, without pyplot's global state; matplotlib is optional (extra `plots`) and imported when the first one is drawn."""

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

from lit_linformer.utils.amounts import percent

# Okabe and Ito's palette, which colour-blind readers can tell apart, and line styles for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MOST_CURVES = 6  # in one panel; of more, some are drawn, evenly spread
EQUAL = "equal curves: thin on thick"
SEPARATED = "{x:,.6g}"  # of an axis: 0.5, 30,000
QUIET = {"color": "0.55", "linewidth": 0.8}


def figure_class() -> Any:
    """matplotlib's Figure, or None where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    return Figure


def literal(text: str) -> str:
    """A user's name, to be shown as it is: matplotlib takes what is between two dollars for mathematics."""
    return text.replace("$", r"\$")


def rendered(figure: Any, **form: Any) -> bytes:
    """What savefig would write into a file."""
    content = io.BytesIO()
    figure.savefig(content, **form)
    return content.getvalue()


def draw_spectra(
    figure_class: Any,
    named: Sequence[tuple[str, Any]],
    indices: Sequence[int],
    threshold: float,
    heads: Sequence[int] | None = None,
) -> Any:
    """The paper's figure 1, one row per model: cumulative singular values on the left, layer × head at an index on the right.

    Args:
        figure_class: matplotlib's Figure.
        named: (name, model.lowrank.Measured) of each model.
        indices: the index of each model's heat map, from 1.
        threshold: drawn as a line through the curves, 0 to 1.
        heads: a curve for each of these heads (up to four can be told apart); None: a layer's mean over its heads, and their
            range as a band.
    """
    values = [measured.at(index).numpy() for (_, measured), index in zip(named, indices, strict=True)]
    # One scale for all models, so that their colours can be compared.
    low, high = (float(bound) for bound in (min(v.min() for v in values), max(v.max() for v in values)))
    figure = figure_class(figsize=(10.5, 4.1 * len(named)), layout="constrained")
    panels = figure.subplots(len(named), 2, squeeze=False, width_ratios=(1.15, 1))
    for (curves, heat), (name, measured), index, value in zip(panels, named, indices, values, strict=True):
        _curves(curves, measured, index, threshold, heads)
        curves.set_title(literal(name), loc="left", fontsize=10)
        image = heat.imshow(value, cmap="cividis", vmin=low, vmax=max(high, low + 1e-6), aspect="auto")
        figure.colorbar(image, ax=heat, label=f"share at index {index}")
        if value.size <= 150:
            for layer, head in itertools.product(*map(range, value.shape)):
                shade = "white" if value[layer, head] < (low + high) / 2 else "black"
                text = f"{value[layer, head]:{'.2f' if high - low > 0.02 else '.3f'}}"
                heat.text(head, layer, text, ha="center", va="center", color=shade, fontsize=9 if value.size < 40 else 7)
        heat.set(xlabel="head", ylabel="layer")
        heat.set_xticks(range(value.shape[1]))
        heat.set_yticks(range(value.shape[0]), measured.layers)
    return figure


def _curves(axes: Any, measured: Any, index: int, threshold: float, heads: Sequence[int] | None) -> None:
    x = range(1, measured.curves.shape[-1] + 1)
    axes.axhline(threshold, **QUIET)
    axes.text(len(x), threshold - 0.01, percent(threshold), ha="right", va="top", fontsize=8, color=QUIET["color"])
    axes.axvline(index, linestyle=":", **QUIET)
    layers = thinned(list(range(len(measured.layers))), MOST_CURVES)
    drawn = list(itertools.product(enumerate(layers), enumerate(heads or [None])))
    found = [measured.curves[place].numpy() for (_, place), _ in drawn]
    lines = [of.mean(0) if head is None else of[head] for of, (_, (_, head)) in zip(found, drawn, strict=True)]
    thickness, note = widths([(x, line.tolist()) for line in lines], 0.01)
    for ((number, place), (style, head)), of_heads, line, width in zip(drawn, found, lines, thickness, strict=True):
        style = number if heads is None else style
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[style % len(STYLES)], "linewidth": width}
        layer = measured.layers[place]
        if head is None:
            axes.fill_between(x, of_heads.min(0), of_heads.max(0), color=look["color"], alpha=0.12, linewidth=0)
        axes.plot(x, line, label=f"layer {layer}" if head is None else f"layer {layer}, head {head}", **look)
    axes.set(
        xlabel="index of the singular value, the largest first",
        ylabel="cumulative share of the singular values",
        xlim=(1, len(x)),
        ylim=(0, 1.02),
    )
    axes.set_xticks(sorted({1, index, len(x), *(len(x) * quarter // 4 for quarter in (1, 2, 3))}))
    axes.grid(True, alpha=0.2)
    axes.legend(frameon=False, loc="lower right", fontsize=9, ncols=len(heads or [0]), title=note)
    open_frame(axes)


def thinned(items: list, most: int) -> list:
    """At most ``most`` of the items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def widths(curves: Sequence[tuple[Sequence[float], Sequence[float]]], share: float) -> tuple[list[float], str | None]:
    """Line widths for curves (x, y), and a title for their legend, with which equal curves can be told apart.

    Two are equal if y differs by at most ``share`` of the range of all wherever both have a point, and if they share more
    than half of the points of one: the common start of two curves against time is not enough.
    """
    values = [y for _, ys in curves for y in ys if math.isfinite(y)]
    near = share * (max(values, default=0.0) - min(values, default=0.0))
    for one, other in itertools.combinations([dict(zip(*curve, strict=True)) for curve in curves], 2):
        both = one.keys() & other.keys()
        if 2 * len(both) > min(len(one), len(other)) and all(abs(one[x] - other[x]) <= near for x in both):
            # Later curves lie on top and are thinner, so that those below show at their edges.
            return [1.4 + 3 * (len(curves) - 1 - place) / (len(curves) - 1) for place in range(len(curves))], EQUAL
    return [1.8] * len(curves), None


def open_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def plain_numbers(axis: Any, marks: Sequence[float] | None = None) -> None:
    """Numbers instead of powers of ten on a logarithmic axis, which often spans less than a decade.

    marks: the numbers in each decade; None: as many as there is room for, given what has been drawn.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    # The values of a model that has diverged span so many decades that matplotlib would show no number.
    marks = marks or ((1, 1.5, 2, 3, 5, 7) if decades < 2 else (1, 2, 5) if decades < 5 else (1,))
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(SEPARATED)
    axis.set_minor_formatter(NullFormatter())
