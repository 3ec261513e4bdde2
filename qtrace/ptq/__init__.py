"""Post-training algorithms, one a file: the file name is the name in a recipe's ``ptq`` list.

The base classes for your own algorithms are names of this package, loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtrace.ptq.base import (
        CalibratedAlgorithm,
        CalibratedTask,
        FloatAlgorithm,
        FloatTask,
        Left,
        Report,
    )

__all__ = ["CalibratedAlgorithm", "CalibratedTask", "FloatAlgorithm", "FloatTask", "Left", "Report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qtrace.ptq' has no attribute {name!r}")
    return getattr(importlib.import_module("qtrace.ptq.base"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
