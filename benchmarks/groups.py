"""Running one group of benchmarks, here or in a process of its own."""

from __future__ import annotations

import importlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.rows import Row, Size
from qtrace.process import engine

__all__ = ["measured", "measured_apart"]


def measured(group: str, size: Size) -> list[Row]:
    """The rows of the group ``benchmarks.<group>``."""
    # As the command line does: else a thread of MegEngine's takes a quarter of a core from all sides.
    engine.quiet()
    return list(importlib.import_module(f"benchmarks.{group}").run(size))


def measured_apart(group: str, size: Size) -> list[Row]:
    """In a process of its own: what one group leaves in memory slows the next one down."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, group, size).result()
