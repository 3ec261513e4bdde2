"""The time of block reconstruction, and the share of losses and gradients in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.accuracy.four_bits import low_bits
from benchmarks.accuracy.judging import quantize
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject
from qtrace.ptq.rounding.block_run import BlockGradients

__all__ = ["run"]

ITERATIONS = 1000


def run(subject: Subject, iterations: int | None) -> Iterator[Row]:
    """Block reconstruction with QDrop at W4A4; seconds of this process, whatever else ran on the machine."""
    iterations = iterations or ITERATIONS
    spent: list[float] = []
    started, wall = time.process_time(), time.monotonic()
    with _timed_steps(spent):
        quantize(subject, low_bits(4, {"reconstruct": {"iterations": iterations}}))
    processor, wall = time.process_time() - started, time.monotonic() - wall
    share = 100 * sum(spent) / processor
    spoken = f"{processor:.0f} s of processor ({wall:.0f} s on the clock)"
    note = f"{spoken}, {share:.0f} % of it in losses and gradients"
    yield Row("reconstruction time", subject.name, f"reconstruct, {iterations} iterations a block", note=note)


@contextmanager
def _timed_steps(spent: list[float]) -> Iterator[None]:
    """Notes the processor time of loss and gradients, which are compiled as one, of every step."""
    original = BlockGradients.__call__

    def timed(self: BlockGradients, rng: np.random.Generator, drop: float) -> tuple[float, list[np.ndarray]]:
        started = time.process_time()
        try:
            return original(self, rng, drop)
        finally:
            spent.append(time.process_time() - started)

    BlockGradients.__call__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockGradients.__call__ = original  # type: ignore[method-assign]
