"""Packages that can be called as a function, and packages that load their public names when first used."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["load_when_used", "make_callable"]


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Makes ``qtrace.NAME(...)`` work whether NAME is bound to the function or to the package.

    Python binds the name to the package as soon as a module of it is imported.

    Args:
        package: the full name of the package, which is being imported.
        function: what a call of it calls.
    """

    class _Package(types.ModuleType):
        __doc__ = function.__doc__

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module = sys.modules[package]
    module.__class__ = _Package
    module.__wrapped__ = function  # type: ignore[attr-defined]  # where tools find the signature


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
