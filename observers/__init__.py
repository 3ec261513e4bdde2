"""Observers, one a file: each keeps statistics of a site that merge exactly, and chooses its range.

The classes of all files are names of this package, loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtrace import plugins

if TYPE_CHECKING:
    from qtrace.observers.base import Observer as Observer
    from qtrace.observers.base import from_dict as from_dict
    from qtrace.observers.base import to_dict as to_dict

_OTHERS = dict.fromkeys(("Observer", "from_dict", "to_dict"), "qtrace.observers.base")


def __getattr__(name: str) -> Any:
    return plugins.attribute("qtrace.observers", name, _OTHERS)


def __dir__() -> list[str]:
    return sorted({*globals(), *plugins.exported("qtrace.observers", _OTHERS), "__all__"})
