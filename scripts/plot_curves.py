"""Draws validation perplexity against tokens, one line a run directory.

    python scripts/plot_curves.py runs/quickstart runs/transformer --output curves.png

Needs matplotlib (extra `[dev]`). Reads each run's perplexity.csv; the run's name is its label.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette, which colour-blind readers can tell apart, and a line style each for those who print.
STYLES = list(
    zip(["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"], ["-", "--", "-.", ":"] * 2, strict=False)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--output", type=Path, default=Path("curves.png"))
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    for index, run in enumerate(args.runs):
        path = run / "perplexity.csv"
        if not path.is_file():
            parser.error(f"{run} is no run directory: it has no perplexity.csv")
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        colour, style = STYLES[index % len(STYLES)]
        tokens, perplexity = ([float(row[key]) for row in rows] for key in ("tokens", "perplexity"))
        label = f"{run.name}: {perplexity[-1]:.1f}"
        axes.plot([t / 1e6 for t in tokens], perplexity, style, color=colour, marker="o", markersize=3, label=label)
    axes.set(xlabel="tokens seen (millions)", ylabel="validation perplexity", yscale="log", title=args.title)
    axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(title="run: last value")
    figure.savefig(args.output)
    print(args.output)


if __name__ == "__main__":
    main()
