"""Classes' settings, read from their source files: importing them takes seconds, because of torch and Lightning.

    declared = find("lit_linformer.tasks.MLM")
    declared.summary                    # the docstring's first sentence
    declared.settings()["lr"]           # name "lr", default 0.001, words "peak learning rate …", allowed "more than 0, …"

Only what the source states literally is known: class and function definitions, imports by name, literals. Anything else is left
out; the command line's parser decides on it, and tests compare the two.
"""

import ast
import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_linformer.utils.errors import without_torch

PACKAGE = Path(__file__).parents[1]
Node = ast.ClassDef | ast.FunctionDef | ast.expr


class NotGiven:
    """The default of a setting that must be given, or whose default is not a literal."""


@dataclass(frozen=True)
class DeclaredSetting:
    """A setting as its class declares it; ``allowed``: its values in words, if its type says which."""

    name: str
    default: Any
    words: str
    allowed: str


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def find(self, name: str) -> "tuple[Module, Node] | None":
        """The module that defines a name used in this one, found by following imports, and the definition."""
        if name in self._defined:
            return self, self._defined[name]
        for statement, original in self._imported.get(name, ()):
            if (source := module(self._absolute(statement))) is not None:
                return source.find(original)
        return None

    @functools.cached_property
    def _defined(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                for to in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(to, ast.Name):
                        found.setdefault(to.id, node.value)
        return found

    @functools.cached_property
    def _imported(self) -> dict[str, list[tuple[ast.ImportFrom, str]]]:
        """Imports inside functions count, too: a package may import lazily."""
        found: dict[str, list[tuple[ast.ImportFrom, str]]] = {}
        for statement in ast.walk(self.tree):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    found.setdefault(alias.asname or alias.name, []).append((statement, alias.name))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        parts = self.name.split(".")
        up = node.level - (self.path.name == "__init__.py")
        base = parts[: len(parts) - up] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Declared:
    """A class or a function, as its source file defines it."""

    module: Module
    node: ast.ClassDef | ast.FunctionDef

    @property
    def path(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    @property
    def ours(self) -> bool:
        """Whether it is this package's own."""
        return self.module.name.startswith("lit_linformer.")

    @property
    def summary(self) -> str:
        """Its docstring's first sentence; nothing without one."""
        return first_sentence((ast.get_docstring(self.node) or "").partition("\n\n")[0]).rstrip(":")

    def settings(self) -> dict[str, DeclaredSetting]:
        """All settings by name, in order of definition; those of its base classes, too, if it takes **settings."""
        found = {setting.name: setting for setting in self.own()}
        for base in self._bases():
            found = {**base.settings(), **found}
        return found

    def own(self) -> Iterator[DeclaredSetting]:
        """The settings that it declares itself."""
        words = _arguments(ast.get_docstring(self.node) or "")
        function = self._function()
        if function is None:
            dataclass = any("dataclass" in ast.unparse(mark) for mark in self.node.decorator_list)
            for field in self.node.body if dataclass else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield self._setting(field.target.id, field.annotation, field.value, words)
            return
        given = function.args
        defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        pairs = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        for argument, default in pairs:
            if argument.arg not in ("self", "cls"):
                yield self._setting(argument.arg, argument.annotation, default, words)

    def _setting(self, name: str, kind: ast.expr | None, default: ast.expr | None, words: dict[str, str]) -> DeclaredSetting:
        return DeclaredSetting(name, self._literal(default), words.get(name, ""), _allowed(self.module, kind))

    def _literal(self, node: ast.expr | None) -> Any:
        if node is None:
            return NotGiven
        with contextlib.suppress(ValueError):
            return ast.literal_eval(node)
        found = self.module.find(node.id) if isinstance(node, ast.Name) else None
        with contextlib.suppress(ValueError, TypeError):
            return ast.literal_eval(found[1]) if found else NotGiven  # type: ignore[arg-type]
        return NotGiven

    def _function(self) -> ast.FunctionDef | None:
        if isinstance(self.node, ast.FunctionDef):
            return self.node
        return next((n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)

    def _bases(self) -> "Iterator[Declared]":
        """The classes whose settings it takes, too: none for a function, or for an __init__ without **settings."""
        function = self._function()
        others = function.args.kwarg if function is not None else None
        if not isinstance(self.node, ast.ClassDef) or (function is not None and others is None):
            return
        names = [base.id for base in self.node.bases if isinstance(base, ast.Name)]
        names += [others.arg.title()] if others is not None else []  # **optimization: fields of Optimization
        for name in reversed(names):
            found = self.module.find(name)
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not self.node:
                yield Declared(found[0], found[1])


def find(path: str) -> Declared | None:
    """The class or function of a class path; None if no file defines it."""
    found = _definition(path)
    if found is None or not isinstance(found[1], ast.ClassDef | ast.FunctionDef):
        return None
    return Declared(found[0], found[1])


def _definition(path: str) -> tuple[Module, Node] | None:
    module_name, _, name = path.rpartition(".")
    place = module(module_name)
    return place.find(name) if place is not None else None


@functools.cache
def module(name: str) -> Module | None:
    """The module of that name, parsed; None if no Python file of it is found."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None  # for a top-level name nothing is imported
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    paths = [path for place in places for path in (place / "__init__.py", place.with_suffix(".py"))]
    if not rest:
        paths = [Path(spec.origin or "")]
    with contextlib.suppress(OSError, SyntaxError, ValueError, StopIteration):
        path = next(path for path in paths if path.is_file())
        return Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return None


@functools.cache
def registered(registry: str) -> dict[str, Declared]:
    """The classes that a registry of the model knows, by name: those with `@REGISTRY.add("NAME")` above them."""
    found = {}
    for path in sorted((PACKAGE / "model").rglob("*.py")):
        if f"@{registry}.add(" not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        place = module(name)
        for node in place.tree.body if place is not None else ():
            for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"{registry}.add":
                    found[ast.literal_eval(mark.args[0])] = Declared(place, node)  # type: ignore[arg-type]
    return found


def keys(path: str) -> list[str]:
    """The keys of a dictionary, or the values of a tuple, at the top level of a module."""
    found = _definition(path)
    return _literals(*found) if found else []


def exported(package: str) -> dict[str, Declared]:
    """The classes in a package's __all__, by name."""
    found = ((name, find(f"{package}.{name}")) for name in keys(f"{package}.__all__"))
    return {name: one for name, one in found if one is not None and isinstance(one.node, ast.ClassDef)}


def first_sentence(text: str) -> str:
    """The text up to a full stop before a capital or the end, on one line, without the stop."""
    text = " ".join(text.split())
    return re.split(r"(?<!e\.g)(?<!i\.e)\.(?= [\"'`(]?[A-Z]|$)", text, maxsplit=1)[0]


def _arguments(doc: str) -> dict[str, str]:
    """{name: description} of a docstring's Args."""
    found, name = {}, None
    for line in doc.partition("Args:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if start := re.match(r"    (\*{0,2}\w+): *(.*)", line):
            name = start[1]
            found[name] = start[2]
        elif name is not None:
            found[name] += f" {line.strip()}" if line.strip() else ""
    return found


def _literals(place: Module, node: Any) -> list[str]:
    """The strings in a tuple, a list or a dictionary's keys, including those of other collections that it names."""
    if isinstance(node, ast.Name):
        named = place.find(node.id)
        return _literals(*named) if named else []
    if isinstance(node, ast.Dict):  # {**one, **another} has no key there
        parts = [value if key is None else key for key, value in zip(node.keys, node.values, strict=True)]
    else:
        parts = getattr(node, "elts", [])
    found = ([part.value] if isinstance(part, ast.Constant) else _literals(place, part) for part in parts)
    return [name for names in found for name in names if isinstance(name, str)]


def _allowed(place: Module, kind: Any) -> str:
    """What a type allows, in the command line's words; "" if it does not say."""
    if isinstance(kind, ast.BinOp):
        return _allowed(place, kind.left) or _allowed(place, kind.right)
    if isinstance(kind, ast.Name):
        if kind.id == "bool":
            return "true or false"
        found = place.find(kind.id)
        return _allowed(*found) if found and isinstance(found[1], ast.Subscript) else ""
    if not isinstance(kind, ast.Subscript):
        return ""
    name, parts = ast.unparse(kind.value), getattr(kind.slice, "elts", [kind.slice])
    if name == "Literal":
        return ", ".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
    if name != "Annotated" or not isinstance(parts[1], ast.Call):
        return ""
    if ast.unparse(parts[1].func) == "OneOf":
        return ", ".join(_literals(place, parts[1].args[0]))
    if ast.unparse(parts[1].func) != "Range":
        return ""
    with contextlib.suppress(ValueError):
        bounds = {
            str(part.arg): ast.literal_eval(part.value) for part in parts[1].keywords if part.arg not in (None, "largest")
        }
        return without_torch("ranges").Range(**bounds).words()
    return ""
