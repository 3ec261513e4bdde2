"""The package's own source: every file, as a syntax tree."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["modules", "tree"]


def modules(package: str = "qtrace") -> Iterator[str]:
    """The dotted names of all modules of a package, sorted."""
    yield package
    for module in sorted(pkgutil.iter_modules(_search_path(package)), key=lambda m: m.name):
        name = f"{package}.{module.name}"
        yield from modules(name) if module.ispkg else [name]


@functools.cache
def _search_path(package: str) -> list[str]:
    """Where the modules of a package lie, without importing it."""
    top = importlib.util.find_spec(package.partition(".")[0])
    assert top is not None
    assert top.submodule_search_locations
    return [str(Path(top.submodule_search_locations[0], *package.split(".")[1:]))]


@functools.cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    path = Path(_search_path(module)[0])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"), str(file))
