"""Python's garbage collector, which goes through objects again and again that stay: modules and graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["older_objects_spared", "paused_collector"]


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


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Collects within the block only what it makes; what was there before is looked at afterwards.

    The modules of MegEngine, onnx and qtrace have some 140,000 objects, which take a tenth of a second each
    time. Graphs that were dropped before are freed first: a block that is entered again and again would spare
    them for good. It does nothing where objects are spared already, by the caller or by a block around this
    one.
    """
    if gc.get_freeze_count():
        yield
        return
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
