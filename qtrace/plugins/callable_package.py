"""Lets a package be called as the function that it is named after."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["make_callable"]


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
