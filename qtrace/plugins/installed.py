"""Plugins that other packages declare: an entry point in the group of its kind, such as ``qtrace.backends``.

A package's ``pyproject.toml`` names them: with ``mynpu = "mynpu.target:BACKEND"`` in the table
``[project.entry-points."qtrace.backends"]``, ``mynpu`` is a name like that of a target of qtrace, which
its own ``pyproject.toml`` declares in the same way. Nothing is imported before a name is used.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from importlib import metadata
from types import MappingProxyType

from qtrace.errors import ConfigError

__all__ = ["BACKENDS", "COMPOSITES", "FORMATS", "OP_RULES", "all_names", "installed"]

BACKENDS = "qtrace.backends"
COMPOSITES = "qtrace.composites"
FORMATS = "qtrace.formats"
OP_RULES = "qtrace.op_rules"


@functools.cache
def installed(group: str) -> Mapping[str, str]:
    """Lists the plugins of one kind that installed packages declare: name -> ``pkg.mod:NAME``, by name.

    Args:
        group: the group of entry points, such as ``qtrace.backends``.

    Raises:
        ConfigError: when two packages declare one name, or qtrace itself is not installed.
    """
    declared = metadata.entry_points()
    if not declared.select(group=BACKENDS, name="generic"):
        raise ConfigError("the installed package qtrace is missing, or older than this one: run pip install.")
    plugins: dict[str, metadata.EntryPoint] = {}
    for entry in sorted(declared.select(group=group), key=lambda e: (e.name, e.value)):
        other = plugins.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages declare {entry.name!r} in {group}, as {_origin(other)} and as "
                f"{_origin(entry)}: uninstall one, rename its entry point, or name the plugin as "
                "'pkg.mod:NAME'."
            )
    return MappingProxyType({name: entry.value for name, entry in plugins.items()})


def all_names(group: str, own: Collection[str]) -> tuple[str, ...]:
    """Lists the names of all plugins of one kind, sorted: qtrace's own and other installed packages'.

    Args:
        group: the group of entry points.
        own: the names of qtrace's own plugins of the kind.

    Raises:
        ConfigError: when an installed package takes the name of one of qtrace's own.
    """
    for name, value in installed(group).items():
        if name in own:
            raise ConfigError(
                f"an installed package declares {name!r} in {group}, as {value}: qtrace itself has one of "
                "that name. Name yours as 'pkg.mod:NAME', or rename its entry point."
            )
    return tuple(sorted((*own, *installed(group))))


def _origin(entry: metadata.EntryPoint) -> str:
    return entry.value + (f" of {entry.dist.name}" if entry.dist is not None else "")
