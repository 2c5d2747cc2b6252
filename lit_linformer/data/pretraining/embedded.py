"""The embedded corpus: real English text that comes with every Python, so that a first run needs neither data nor network.

Python's language reference as `help()` shows it (pydoc_data.topics, one document per topic) and the docstrings of the
standard library (one document per module), 2.2 MB on Python 3.11. Sources are read with `ast`: nothing is imported or
run.
"""

import ast
import inspect
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# pydoc_data has the topics themselves.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled", "pydoc_data"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@lru_cache(maxsize=1)  # parsing takes about 2 s, and both the tokenizer and the blocks read it
def embedded_documents() -> tuple[str, ...]:
    """All documents, in an order that depends on the Python version only."""
    from pydoc_data.topics import topics

    # some topics are the same text under two names
    documents = list(dict.fromkeys(inspect.cleandoc(topics[name]) for name in sorted(topics)))
    seen: set[str] = set()
    for path in sorted(_library_files(Path(os.__file__).parent)):
        docstrings = []
        for docstring in _docstrings(path):
            if docstring not in seen:
                seen.add(docstring)
                docstrings.append(docstring)
        if docstrings:
            documents.append("\n\n".join(docstrings))
    return tuple(documents)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(path: Path) -> list[str]:
    """Docstrings of a file, in the order of its lines; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code do not matter here
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    docstrings = (ast.get_docstring(node) for node in nodes)
    return [docstring for docstring in docstrings if docstring]
