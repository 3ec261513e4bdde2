"""Post-training algorithms, one a file: the file name is the name in a recipe's ``ptq`` list.

The base classes for your own algorithms are names of this package, loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.ptq.base import (
        CalibratedAlgorithm,
        CalibratedTask,
        FloatAlgorithm,
        FloatTask,
        Left,
        Report,
    )

_HOMES = {"qtrace.ptq.base": "CalibratedAlgorithm CalibratedTask FloatAlgorithm FloatTask Left Report"}

load_when_used(__name__, _HOMES)
