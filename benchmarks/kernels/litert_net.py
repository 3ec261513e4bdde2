"""Small TFLite networks, in which single ops are timed as LiteRT runs them, by the writer of the exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.targets.tflite.writer import FileTensor, Grid, Inputs, TfliteWriter

__all__ = ["LiteNet"]

_SCALE, _WEIGHT_SCALE = 0.05, 0.001


class LiteNet:
    """A TFLite network under construction; images have their channels last."""

    def __init__(self) -> None:
        self._writer = TfliteWriter()
        self._inputs: list[FileTensor] = []
        self._random = np.random.default_rng(0)

    def input(self, shape: Sequence[int], integer: bool) -> FileTensor:
        """Adds an input of floats or of integers."""
        self._inputs.append(self.tensor(shape, integer))
        return self._inputs[-1]

    def tensor(self, shape: Sequence[int], integer: bool, scale: float = _SCALE, zero: int = 0) -> FileTensor:
        """Adds a tensor that an operator fills."""
        if not integer:
            return self._writer.tensor("t", shape)
        return self._writer.tensor("t", shape, np.int8, Grid((scale,), (zero,)))

    def stored(self, shape: Sequence[int], integer: bool) -> FileTensor:
        """Adds a stored operand of random values."""
        if not integer:
            values = self._random.normal(0, 0.1, shape).astype(np.float32)
            return self._writer.constant("stored", values)
        return self._writer.constant("stored", self._integers(shape), Grid((_SCALE,), (0,)))

    def weight(
        self, shape: Sequence[int], integer: bool, axis: int = 0, per_channel: bool = True
    ) -> FileTensor:
        """Adds a stored weight; on integers with one scale for each channel."""
        if not integer:
            return self.stored(shape, False)
        grid = _grid(_WEIGHT_SCALE, shape[axis] if per_channel else 1)
        return self._writer.constant("weight", self._integers(shape), grid, axis)

    def bias(self, count: int, integer: bool, per_channel: bool = True) -> FileTensor:
        """Adds a stored bias."""
        if not integer:
            return self._writer.constant("bias", np.zeros(count, np.float32))
        grid = _grid(_SCALE * _WEIGHT_SCALE, count if per_channel else 1)
        return self._writer.constant("bias", np.zeros(count, np.int32), grid)

    def op(
        self,
        code: str,
        inputs: Inputs,
        output: FileTensor,
        kind: str = "",
        **options: Any,
    ) -> FileTensor:
        """Adds an operator that fills ``output``, and returns that; see `TfliteWriter.op`."""
        self._writer.op(code, inputs, [output], kind=kind, **options)
        return output

    def serialize(self, outputs: Sequence[FileTensor]) -> bytes:
        """Returns the file."""
        inputs, results = ([(tensor.name, tensor) for tensor in side] for side in (self._inputs, outputs))
        return self._writer.finish(inputs, results, metadata={}, description="kernels", batch=None)

    def _integers(self, shape: Sequence[int]) -> np.ndarray:
        return self._random.integers(-127, 128, shape).astype(np.int8)


def _grid(scale: float, count: int) -> Grid:
    return Grid((scale,) * count, (0,) * count)
