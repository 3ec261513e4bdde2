"""What the tests of convolutional networks know while they follow one of them on its road."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import megengine as mge
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph.types import TracedModule
from tests.zoo.catalog import Entry
from tests.zoo.parts import pictures

__all__ = ["Case", "leaves", "run", "sqnr"]


class Case:
    """A network and what becomes of it; each step is done once, by the first test that needs it."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.module = entry.build()
        self.batches = [pictures(8, *entry.input_shape, seed=seed) for seed in (2, 3)]
        # Two of the images of the calibration: of so few, the ranges of others would be another matter.
        self.batch = self.batches[0][:2]

    @cached_property
    def traced(self) -> TracedModule:
        return qtrace.trace(self.module, self.batch)

    @cached_property
    def calibrated(self) -> TracedModule:
        prepared = qtrace.prepare(self.traced, self.entry.recipe)
        return qtrace.calibrate(prepared, self.batches, progress=False)

    def in_phase(self, phase: str) -> TracedModule:
        """The calibrated module, in eval mode."""
        qtrace.set_phase(self.calibrated, phase)
        self.calibrated.eval()
        return self.calibrated

    @cached_property
    def expected(self) -> list[np.ndarray]:
        return run(self.module, self.batch)

    def ratios(self) -> list[float]:
        """Of every output after calibration, in dB."""
        got = run(self.in_phase("quantize"), self.batch)
        return [sqnr([g], [w]) for g, w in zip(got, self.expected, strict=True)]

    def other_inputs(self) -> Iterator[np.ndarray]:
        """Another batch size, and other image sizes."""
        yield pictures(3, *self.entry.input_shape, seed=4)
        for size in self.entry.other_sizes:
            yield pictures(1, self.entry.input_shape[0], *size, seed=5)


def leaves(value: Any) -> list[Any]:
    """The tensors of a result, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def run(module: M.Module, batch: np.ndarray) -> list[np.ndarray]:
    return [x.numpy() for x in leaves(module(mge.Tensor(batch)))]


def sqnr(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Signal to quantization noise of the worst output, in dB."""
    pairs = list(zip(got, want, strict=True))
    return min(float(10 * np.log10(np.sum(w**2) / np.sum((g - w) ** 2))) for g, w in pairs)
