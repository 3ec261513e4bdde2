"""Pausing the garbage collector while a graph is made: one big cycle of objects that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]


@contextlib.contextmanager
def paused_collector(collect_first: bool = False) -> Iterator[None]:
    """Collecting amid a hundred thousand new objects walks all of them again and again.

    Args:
        collect_first: free a graph that was dropped before, which only the collector can.
    """
    enabled = gc.isenabled()
    if enabled and collect_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
