"""docs/tour.md names what exists: each file, each class and function in the file it is said to be in, each excerpt."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`(lit_linformer/[\w/]+\.py)`", TOUR)))
# `Name` of a class, `name()` or `Class.name()` of a function
NAMES = sorted(set(re.findall(r"`((?:[A-Z]\w+\.)?[a-z]\w*)\(\)`|`([A-Z]\w+)`", TOUR)))


def defined(file):
    """Names of its classes, functions and methods, methods both with and without their class."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            names |= {node.name} | methods | {f"{node.name}.{method}" for method in methods}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_every_name_is_in_a_file_of_the_page():
    assert len(FILES) >= 20 and len(NAMES) >= 40
    known = set().union(*map(defined, FILES))
    assert [function or name for function, name in NAMES if (function or name) not in known] == []


def test_a_name_beside_a_file_is_in_it():
    beside = re.findall(r"`([\w.]+)(?:\(\))?` (?:in |\()`(lit_linformer/[\w/]+\.py)`", " ".join(TOUR.split()))
    assert len(beside) >= 20
    assert [(name, file) for name, file in beside if name not in defined(file)] == []


@pytest.mark.parametrize("file,code", re.findall(r"```python\n# (\S+)\n(.*?)```", TOUR, re.DOTALL))
def test_an_excerpt_is_the_code(file, code):
    lines = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    assert "\n".join(line.strip() for line in code.splitlines()) in "\n".join(lines)
