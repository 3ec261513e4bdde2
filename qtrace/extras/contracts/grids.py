"""Grids: the integers of a QuantizeLinear with what they stand for, and those that a target wants instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import TensorProto, helper

__all__ = ["IntegerGrid", "bias_grid", "symmetric", "type_name"]


def type_name(kind: int) -> str:
    """Returns the name of a type of ONNX, such as ``uint8``."""
    return str(TensorProto.DataType.Name(kind)).lower()


@dataclass(frozen=True, eq=False)
class IntegerGrid:
    """The integers ``q`` that stand for ``(q - zero_point) * scale``.

    Attributes:
        scale: float64, of shape ``()`` per tensor or ``(C,)`` per channel.
        zero_point: int64, of the same shape.
        type: the type of the integers, a number of `onnx.TensorProto`.
        axis: the axis of the channels; without effect per tensor.
    """

    scale: np.ndarray
    zero_point: np.ndarray
    type: int
    axis: int = 0

    BOUNDS: ClassVar[dict[int, tuple[int, int]]] = {
        TensorProto.INT4: (-8, 7),
        TensorProto.UINT4: (0, 15),
        TensorProto.INT8: (-128, 127),
        TensorProto.UINT8: (0, 255),
        TensorProto.INT16: (-32768, 32767),
        TensorProto.UINT16: (0, 65535),
        TensorProto.INT32: (-(2**31), 2**31 - 1),
    }

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The real values of the lowest and the highest integer."""
        low, high = self.BOUNDS[self.type]
        return (low - self.zero_point) * self.scale, (high - self.zero_point) * self.scale

    def fits(self, values: np.ndarray) -> bool:
        """Whether there is a scale for each channel of ``values``, or one for all."""
        if self.scale.size == 1:
            return True
        return -values.ndim <= self.axis < values.ndim and values.shape[self.axis] == self.scale.size

    def quantize(self, values: np.ndarray) -> np.ndarray:
        """Rounds values half to even, as ONNX does; returns int64."""
        scale, zero_point = self._spread(values)
        return np.clip(np.rint(values / scale) + zero_point, *self.BOUNDS[self.type]).astype(np.int64)

    def dequantize(self, integers: np.ndarray) -> np.ndarray:
        """Returns the values of integers in float32."""
        scale, zero_point = self._spread(integers)
        return ((integers.astype(np.int64) - zero_point) * scale).astype(np.float32)

    def stored(self, integers: np.ndarray) -> np.ndarray:
        """Returns integers in the type of the grid."""
        return integers.astype(helper.tensor_dtype_to_np_dtype(self.type))

    def _spread(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns scale and zero point in shapes that fit ``values``."""
        if self.scale.size == 1:
            return self.scale.reshape(()), self.zero_point.reshape(())
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero_point.reshape(shape)


def symmetric(values: np.ndarray, kind: int, axis: int | None) -> IntegerGrid:
    """Returns the symmetric grid that covers constant values, as weights have it.

    Args:
        values: the values.
        kind: the type of the integers, a signed one.
        axis: the axis of the channels, each of which gets a scale; None for one scale.
    """
    high = IntegerGrid.BOUNDS[kind][1]
    magnitude = np.abs(values.astype(np.float64))
    if axis is None:
        largest = magnitude.max(initial=0.0)
    else:
        largest = np.moveaxis(magnitude, axis, 0).reshape(values.shape[axis], -1).max(axis=1, initial=0.0)
    scale = np.asarray(np.where(largest > 0, largest / high, 1.0)).astype(np.float32).astype(np.float64)
    zero_point = np.zeros(scale.shape, np.int64)
    return IntegerGrid(scale, zero_point, kind, 0 if axis is None else axis % values.ndim)


def bias_grid(data: IntegerGrid, weight: IntegerGrid) -> IntegerGrid:
    """Returns the int32 grid of a bias: at the product of the scales of a layer's input and its weight."""
    scale = np.float32(data.scale.reshape(())) * weight.scale.astype(np.float32)
    scale = np.asarray(scale, np.float64)
    return IntegerGrid(scale, np.zeros(scale.shape, np.int64), TensorProto.INT32, 0)
