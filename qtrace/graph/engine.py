"""MegEngine's engine while a graph is run for its shapes: errors come at once, and no statistics change.

Whoever runs graphs loads this file, and with it the refusals of calls at which a kernel ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import megengine as mge
from megengine.module import Module

from qtrace.graph.kernels import refuse_divisions_by_zero
from qtrace.graph.walk import modules_of

__all__ = ["quiet_engine"]

refuse_divisions_by_zero()


@contextmanager
def quiet_engine(root: Module) -> Iterator[None]:
    """Makes kernels raise their errors at once, and keeps modules from updating their statistics."""
    training = [m for m in modules_of(root) if m.training]
    level, mge.config.async_level = mge.config.async_level, 0
    for module in training:
        module.training = False
    try:
        yield
    finally:
        mge.config.async_level = level
        for module in training:
            module.training = True
