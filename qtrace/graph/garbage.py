"""Pauses the garbage collector while a graph is built: one big cycle of objects that all stay alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]


@contextlib.contextmanager
def paused_collector(collect_first: bool = False) -> Iterator[None]:
    """Pauses collection within the block: it would walk a hundred thousand new objects again and again.

    Args:
        collect_first: whether to free graphs that were dropped before, which only the collector can.
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
