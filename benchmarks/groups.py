"""Runs one group of benchmarks, in this process or in one of its own."""

from __future__ import annotations

import importlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.rows import Row, Size
from qtrace import process

__all__ = ["measure", "measure_apart"]


def measure(group: str, size: Size) -> list[Row]:
    """Runs ``benchmarks.<group>`` and returns its rows."""
    # As the command line does: else a thread of MegEngine's takes a quarter of a core from all sides.
    process.quiet()
    return list(importlib.import_module(f"benchmarks.{group}").run(size))


def measure_apart(group: str, size: Size) -> list[Row]:
    """Runs a group in a process of its own, since the memory that a group leaves slows the next one down."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, group, size).result()
