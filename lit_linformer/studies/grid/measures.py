"""What a grid shows of its runs besides the table's value: numbers from the files in their folders."""

import contextlib
import csv
import math
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_linformer.utils.errors import SettingError
from lit_linformer.utils.files import read_json, value_at


@dataclass
class Measure:
    """A number of a run: in a JSON file by its keys, or in a CSV file by its column, from the last matching row.

    Args:
        file: in the run's folder.
        value: keys, as throughput.tokens_per_second; or the column.
        where: {column: value} that the row must have.
    """

    file: str
    value: str
    where: dict[str, str]

    @classmethod
    def parse(cls, name: str, text: Any) -> "Measure":
        """Parses a line of the grid file: FILE VALUE [COLUMN=VALUE …]."""
        words: list[str] = []
        with contextlib.suppress(ValueError):  # a quote that is not closed
            words = shlex.split(text) if isinstance(text, str) else []
        rows = [word.partition("=") for word in words[2:]]
        known = len(words) >= 2 and Path(words[0]).name == words[0] and Path(words[0]).suffix in (".csv", ".json")
        if not known or not all(equals and column for column, equals, _ in rows) or (rows and words[0].endswith(".json")):
            raise SettingError(
                f"measures.{name}",
                text,
                "a file of the run's folder and a number in it, as 'result.json throughput.tokens_per_second' or "
                "'perplexity.csv perplexity tokens=4096'",
            )
        return cls(words[0], words[1], {column: value for column, _, value in rows})

    def read(self, run_dir: Path) -> float | None:
        """The number, or None if there is none."""
        path = run_dir / self.file
        found = value_at(read_json(path), self.value.split(".")) if path.suffix == ".json" else self._in_csv(path)
        return float(found) if isinstance(found, int | float) else None

    def _in_csv(self, path: Path) -> float | None:
        with contextlib.suppress(OSError, csv.Error, ValueError), open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if all(_same(row.get(key), to) for key, to in self.where.items())]
            return float(rows[-1][self.value]) if rows and rows[-1].get(self.value) else None
        return None


def medians(measures: dict[str, Measure], run_dirs: list[Path]) -> dict[str, float | None]:
    """The median of each measure over the runs that have it; None if none has."""
    found = {}
    for name, measure in measures.items():
        values = [value for run_dir in run_dirs if (value := measure.read(run_dir)) is not None]
        found[name] = median(values) if values else None
    return found


def median(values: Iterable[float]) -> float:
    """The median; NaN if any value is NaN, which cannot be ordered."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def shown(value: float | None) -> str:
    """A number with four digits; larger ones as whole numbers."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _same(text: str | None, wanted: str) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return float(text) == float(wanted)  # type: ignore[arg-type]
    return text == wanted
