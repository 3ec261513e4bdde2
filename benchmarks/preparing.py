"""prepare on long chains: its time beyond tracing, and how it grows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import qtrace
from benchmarks.nets import chain
from benchmarks.rows import Row, Size
from benchmarks.timing import run_interleaved

__all__ = ["run"]


def run(size: Size) -> Iterator[Row]:
    """Prepares a chain and one of twice its length, default config."""
    short, long = size.chain, 2 * size.chain
    image = np.zeros((1, 4, 8, 8), np.float32)
    # Tracing is not what is measured, and its comparison on other inputs costs five forwards.
    traced = {n: qtrace.trace(chain(n), image, check=False) for n in (short, long)}
    samples = run_interleaved(
        {str(n): lambda t=t: qtrace.prepare(t) for n, t in traced.items()}, size.slow_repeats
    )
    yield Row(f"prepare, {short} conv+bn+relu", samples.seconds(str(short)), "s", 3.0, "beyond tracing")
    growth = samples.ratio(str(long), str(short))
    yield Row(f"prepare, {long} / {short} conv+bn+relu", growth, "x", 2.3)
