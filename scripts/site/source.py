"""The package's own source: every file as a syntax tree, and its parts by name, wherever they stand."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_DEFINITION = re.compile(r"^(?:(?:def|class) |(?=\w+(?:: .*)? = ))(\w+)", re.MULTILINE)

__all__ = ["find", "modules", "room", "text", "tree"]


def modules(package: str = "qtrace") -> Iterator[str]:
    """The dotted names of all modules of a package, sorted."""
    yield package
    for module in sorted(pkgutil.iter_modules(_search_path(package)), key=lambda m: m.name):
        name = f"{package}.{module.name}"
        yield from modules(name) if module.ispkg else [name]


@functools.cache
def _search_path(package: str) -> list[str]:
    """The folder or file of a package or module, without importing it."""
    top = importlib.util.find_spec(package.partition(".")[0])
    assert top is not None
    assert top.submodule_search_locations
    return [str(Path(top.submodule_search_locations[0], *package.split(".")[1:]))]


def tree(module: str) -> ast.Module:
    """The syntax tree of a module; all of them would take hundreds of megabytes, so none is kept."""
    return ast.parse(text(module))


def text(module: str) -> str:
    """The text of a module."""
    path = Path(_search_path(module)[0])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


def find(name: str) -> Any:
    """Returns the object that a module of the package defines as ``name`` at its top.

    Raises:
        LookupError: when no module defines it, or several do.
    """
    definers = [module for module in modules() if name in _defined(module)]
    if len(definers) != 1:
        raise LookupError(f"{name} is defined in {', '.join(definers) or 'no module'}, not in one.")
    return getattr(importlib.import_module(definers[0]), name)


def room(name: str) -> ModuleType:
    """The package whose last name is ``name``; a room of this name goes before packages inside of rooms.

    Raises:
        LookupError: when there is none, or several.
    """
    packages = [m for m in modules() if m.rpartition(".")[2] == name and Path(_search_path(m)[0]).is_dir()]
    packages = [m for m in packages if m.count(".") == 1] or packages
    if len(packages) != 1:
        raise LookupError(f"packages called {name}: {', '.join(packages) or 'none'}; one was expected.")
    return importlib.import_module(packages[0])


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The names that a module defines at its top."""
    return frozenset(_DEFINITION.findall(text(module)))
