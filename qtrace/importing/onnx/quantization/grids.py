"""Reads the scale and the zero point of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx

from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.values import Stored
from qtrace.preparation.passes.quantized_file import StoredGrid

__all__ = ["PACKED", "bits_of", "dequantize", "quantize", "read_grid", "stored_name"]

PACKED = ("int4", "uint4", "int2", "uint2")  # several in a byte: only weights
_KINDS = ("int8", "uint8", "int16", "uint16", "int32")
_SUFFIXES = ("_quantized", "_int", "_q", "_QuantizeLinear_Output")


def read_grid(call: Call, kind: np.dtype[Any] | None) -> StoredGrid:
    """Reads scale and zero point.

    Args:
        call: the node.
        kind: the type of the integers; None for the type of the zero point.

    Raises:
        Refusal: when they are computed, or of a type or form that no site has.
    """
    call.attribute("saturate", 1)
    if call.attribute("block_size", 0):
        raise Refusal("has a scale per block, which qtrace lacks")
    for name in ("output_dtype", "precision"):
        value = call.attribute(name, 0)
        if value and name == "output_dtype" and call.node.op == "QuantizeLinear":
            kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value))
    scale = call.array(1)
    zero = call.array(2, None)
    kind = kind or (np.dtype(np.uint8) if zero is None else zero.dtype)
    stored = isinstance(call.values[0], Stored)
    if kind.name not in (*_KINDS, *(PACKED if stored else ())) or (
        kind == np.int32 and call.node.op == "QuantizeLinear"
    ):
        raise Refusal(f"rounds to {kind.name}; qtrace has sites of 8 and 16 bits")
    zero = np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)
    zero = np.broadcast_to(zero, scale.shape) if zero.size == 1 else zero
    if scale.dtype != np.float32 or scale.ndim > 1 or zero.shape != scale.shape:
        raise Refusal(f"has scales of {scale.dtype.name} and shape {list(scale.shape)}, which no site has")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise Refusal("has a scale that is not finite and positive")
    return StoredGrid(call.node.inputs[0], kind.name, scale, zero)


def dequantize(integers: np.ndarray, grid: StoredGrid, axis: int) -> np.ndarray:
    """Returns the floats that integers stand for, as DequantizeLinear computes them."""
    scale, zero = _broadcast(integers, grid, axis)
    return np.asarray((integers.astype(np.int64) - zero).astype(np.float32) * scale, np.float32)


def quantize(values: np.ndarray, grid: StoredGrid, axis: int) -> np.ndarray:
    """Returns the integers that QuantizeLinear computes."""
    scale, zero = _broadcast(values, grid, axis)
    steps, signed = 2 ** bits_of(grid.kind), grid.kind.startswith("i")
    lowest = -steps // 2 if signed else 0
    rounded = np.rint(values.astype(np.float32) / scale).astype(np.float64) + zero
    return np.asarray(np.clip(rounded, lowest, lowest + steps - 1).astype(np.int64).astype(grid.kind))


def bits_of(kind: str) -> int:
    """Returns the bits of an integer type such as ``uint4``; 0 for another type."""
    found = re.fullmatch(r"u?int(\d+)", kind)
    return int(found[1]) if found else 0


def _broadcast(array: np.ndarray, grid: StoredGrid, axis: int) -> tuple[np.ndarray, np.ndarray]:
    if grid.scale.size == 1:
        return grid.scale.reshape(()), grid.zero_point.reshape(())
    if axis >= array.ndim or array.shape[axis] != grid.scale.size:
        raise Refusal(f"has {grid.scale.size} scales for a tensor of the shape {list(array.shape)}")
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    return grid.scale.reshape(shape), grid.zero_point.reshape(shape)


def stored_name(node: OnnxNode, source: Stored, layers: Layers, grid: StoredGrid) -> str:
    """Returns the name of the floats of a stored tensor: the name of its integers without their suffix."""
    name = source.name
    for suffix in () if name in layers.paths.values() else _SUFFIXES:
        name = name.removesuffix(suffix)
    known = layers.grids.get(name)
    same = known is None or (known.integers is source.array and known.equals(grid))
    return name if name and same else node.outputs[0]
