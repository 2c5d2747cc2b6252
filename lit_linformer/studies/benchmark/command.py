"""`python run.py benchmark --what SUBJECT`: runs the subject's module, which reads its own settings."""

import importlib
import itertools

from lit_linformer.studies.benchmark.subject import SUBJECTS
from lit_linformer.utils.arguments import check_choice


def main(argv: list[str]) -> None:
    """Measures and prints; ValueError, in one line, for a bad setting."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--what=") else [word])]
    what = [value for setting, value in itertools.pairwise(words) if setting == "--what"] or ["layers"]
    check_choice("what", what[-1], list(SUBJECTS))
    importlib.import_module(f"lit_linformer.studies.benchmark.{what[-1]}").main(argv)
