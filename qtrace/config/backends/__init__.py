"""Backends: one target a file, each with a constant ``BACKEND``; the file name is the name configs use.

A backend of your own is ``pkg.mod:NAME``, or an entry point in the group ``qtrace.backends``.
"""

from __future__ import annotations

import dataclasses
import importlib

from qtrace import plugins
from qtrace.config.backends.base import Backend
from qtrace.plugins.installed import BACKENDS, installed, refuse_clashes

__all__ = ["Backend", "get", "known", "packaged"]


def packaged() -> tuple[str, ...]:
    """Lists the names of qtrace's own backends, sorted."""
    return plugins.packaged(__name__)


def known() -> tuple[str, ...]:
    """Lists the names of all backends, sorted: qtrace's own and the backends of installed packages.

    Raises:
        ConfigError: when an installed package takes the name of another backend.
    """
    refuse_clashes(BACKENDS, packaged())
    return tuple(sorted((*packaged(), *installed(BACKENDS))))


def get(name: str) -> Backend:
    """Returns the backend ``name``: a known one, or one of your own, ``pkg.mod:NAME``.

    The `Backend.name` of the result is the name by which it was asked for, which is what configs, models and
    messages have.

    Raises:
        ConfigError: when there is none (the message lists the backends), its module cannot be imported, or
            it is no `Backend`.
    """
    if name in packaged():
        refuse_clashes(BACKENDS, [name])
        own: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
        return own
    return dataclasses.replace(plugins.load_object(BACKENDS, name, Backend, packaged()), name=name)
