"""Private names of dependencies: they exist, and are used only in utils/compat.py."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import lit_linformer
from lit_linformer.utils import compat

PACKAGE = Path(lit_linformer.__file__).parent
DOCUMENTED = {"_replace"}  # a method of namedtuple


def resolve(name):
    """An attribute of a module, of its class, and so on; AttributeError if a part is missing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("name", [*compat.OVERRIDDEN, *compat.USED])
def test_the_installed_versions_have_it(name):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    assert resolve(name) is not None


def test_a_name_that_has_gone_is_told():
    with pytest.raises(AttributeError, match="_should_check"):
        resolve("lightning.pytorch.Trainer._should_check")


@pytest.mark.parametrize("name", compat.SET_IN)
def test_the_installed_versions_set_it(name):
    attribute, _ = compat.SET_IN[name]
    assert any(re.search(rf"\b{attribute}\b", inspect.getsource(part)) for part in resolve(name).__mro__[:-1])


def test_every_use_has_a_function_that_says_why():
    for function in [*compat.USED.values(), *(function for _, function in compat.SET_IN.values())]:
        assert getattr(compat, function).__doc__


def private_names(tree):
    """(line, name) of each private name of other code: of an object other than self, cls and super()."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            called = node.value.func if isinstance(node.value, ast.Call) else node.value
            own = isinstance(called, ast.Name) and called.id in ("self", "cls", "super", "os")  # os._exit is documented
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        names = [name for name in names if name not in DOCUMENTED]
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__"))


def test_private_names_of_others_are_nowhere_else():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name != "compat.py":
            names = private_names(ast.parse(file.read_text(encoding="utf-8")))
            found += [f"{file.relative_to(PACKAGE)}:{line}: {name}" for line, name in names]
    assert not found, "private names of a dependency belong on the page of lit_linformer/utils/compat.py:\n" + "\n".join(found)
