"""Fake quantizers: one a file; the file name is the name that configs use.

The classes of all files are names of this package, loaded when they are first used, and so are `scales` and
what a fake quant of one's own is written with: `FakeQuant`, `builtin` and `Learn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtrace import plugins

if TYPE_CHECKING:
    from qtrace.fakequant.base import FakeQuant as FakeQuant
    from qtrace.fakequant.base import builtin as builtin
    from qtrace.fakequant.base import scales as scales
    from qtrace.fakequant.kernels import Learn as Learn

_OTHERS = {
    **dict.fromkeys(("FakeQuant", "builtin", "scales"), "qtrace.fakequant.base"),
    "Learn": "qtrace.fakequant.kernels",
}


def __getattr__(name: str) -> Any:
    return plugins.attribute("qtrace.fakequant", name, _OTHERS)


def __dir__() -> list[str]:
    return sorted({*globals(), *plugins.exported("qtrace.fakequant", _OTHERS), "__all__"})
