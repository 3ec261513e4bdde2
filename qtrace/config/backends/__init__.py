"""Backends: what a target computes on integers, each an entry point in the group ``qtrace.backends``.

The name of the entry point is the name that configs use. A backend of your own may also be ``pkg.mod:NAME``.
"""

from __future__ import annotations

import dataclasses

from qtrace.config.backends.base import Backend
from qtrace.plugins import BACKENDS, ObjectPlugins

__all__ = ["Backend", "get", "known", "packaged"]

_BACKENDS = ObjectPlugins(BACKENDS, Backend)
packaged, known = _BACKENDS.packaged, _BACKENDS.known


def get(name: str) -> Backend:
    """Returns the backend ``name``: a known one, or one of your own, ``pkg.mod:NAME``.

    The `Backend.name` of the result is the name by which it was asked for, which is what configs, models and
    messages have.

    Raises:
        ConfigError: when there is none (the message lists the backends), its module cannot be imported, or
            it is no `Backend`.
    """
    return dataclasses.replace(_BACKENDS.get(name), name=name)
