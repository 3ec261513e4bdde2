"""Backends: one target a file, each with a constant ``BACKEND``; the file name is the name configs use."""

from __future__ import annotations

import importlib
import pkgutil

from qtrace.config.backends.base import Backend
from qtrace.errors import ConfigError

__all__ = ["Backend", "get", "known"]


def known() -> tuple[str, ...]:
    """Lists the names of all backends, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def get(name: str) -> Backend:
    """Returns the backend ``name``.

    Raises:
        ConfigError: when there is none; the message lists the backends.
    """
    if name not in known():
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(known())}.")
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend
