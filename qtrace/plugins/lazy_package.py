"""Lets a package load its public names when they are first used."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["load_when_used"]


def load_when_used(package: str, homes: Mapping[str, str]) -> None:
    """Makes names available as ``package.name``, each of which imports its module at its first use.

    A name stays what it is when a module of the same name is imported: Python would bind it to the module.

    Args:
        package: the full name of the package, which is being imported.
        homes: the full name of a module -> its names, between spaces.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    class _Package(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in home_of:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(importlib.import_module(home_of[name]), name)
            setattr(self, name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            is_home = isinstance(value, types.ModuleType) and home_of.get(name) == value.__name__
            super().__setattr__(name, getattr(value, name) if is_home else value)

        def __reduce__(self) -> tuple[Any, ...]:
            return importlib.import_module, (package,)  # cloudpickle knows modules only by their exact type

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home_of})

    sys.modules[package].__class__ = _Package
