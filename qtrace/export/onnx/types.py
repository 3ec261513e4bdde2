"""Types in an exported file: every tensor has the type that it has in the graph.

ONNX wants shapes and indices as int64, where MegEngine's are int32: they are converted where they are read
(`int64`, `shape_vector`) and where they are made (`emit_as`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from qtrace.errors import ExportError
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = [
    "Emitter",
    "array",
    "axes_of",
    "cast",
    "emit_as",
    "emit_several",
    "int64",
    "is_float",
    "number",
    "operand",
    "rank",
    "scalar_int64",
    "shape_vector",
    "unary",
]

Emitter = Callable[[OnnxWriter, OpCall], None]


def array(value: Any) -> np.ndarray:
    """A MegEngine tensor or anything that numpy takes, as an array."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def axes_of(call: OpCall, name: str = "axis") -> list[int]:
    """The axes that an attribute names, counted from the front; all where it is None."""
    given, count = call.attrs[name], len(call.inputs[0].shape)
    if given is None:
        return list(range(count))
    return [int(axis) % count for axis in (given if isinstance(given, (tuple, list)) else [given])]


def rank(value: Any) -> int:
    """How many axes a node or an array has."""
    return len(value.shape) if isinstance(value, TensorNode) else array(value).ndim


def is_float(node: TensorNode) -> bool:
    """Whether the node holds floats."""
    return np.dtype(node.dtype).kind == "f"


def number(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """A constant number or array of numbers of a type."""
    found, kind = array(value), np.dtype(dtype)
    if found.ndim:
        return w.constant(w.fresh("const_array"), found.astype(kind))
    name = f"const_{found.item()!r}" if kind == np.float32 else f"const_{kind.name}_{found.item()!r}"
    if kind == np.float32:
        return w.scalar(float(found))
    return w.constant(name, found.astype(kind))


def cast(w: OnnxWriter, name: str, dtype: Any, output: str | None = None) -> str:
    """Converts the tensor ``name``."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return w.node("Cast", [name], output or w.fresh(name), to=kind)


def operand(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """A node, number or array as a tensor of type ``dtype``."""
    if not isinstance(value, TensorNode):
        return number(w, value, dtype)
    same = np.dtype(value.dtype) == np.dtype(dtype)
    return w.name(value) if same else cast(w, w.name(value), dtype)


def emit_as(w: OnnxWriter, op: str, inputs: Sequence[str], node: TensorNode, **attributes: Any) -> None:
    """Adds a node whose result has another type in ONNX than ``node`` has, and converts it."""
    made = w.node(op, inputs, w.fresh(node.name), **attributes)
    w.names[node] = cast(w, made, node.dtype, node.name)


def unary(op: str, **fixed: Any) -> Emitter:
    """The emitter of an op that is one node with one input."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        w.emit(op, [w.name(call.inputs[0])], call.out, **fixed)

    return emit


def emit_several(
    w: OnnxWriter, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> None:
    """Adds a node with several outputs."""
    name = f"{outputs[0]}_{op}"
    w.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=name, **attributes))


def int64(w: OnnxWriter, value: Any) -> str:
    """A node of integers, or fixed ones, as an int64 tensor."""
    return operand(w, value, np.int64)


def scalar_int64(w: OnnxWriter, value: Any) -> str:
    """One integer, fixed or computed, as an int64 vector of length 1."""
    if not isinstance(value, TensorNode):
        return w.ints([int(value)])
    if value.shape is not None and tuple(value.shape) == (1,):
        return int64(w, value)
    return w.node("Reshape", [int64(w, value), w.ints([1])], w.fresh(value.name))


def shape_vector(w: OnnxWriter, shape: Any) -> str:
    """A shape of ints and scalar nodes, or one node that holds it, as an int64 vector."""
    if isinstance(shape, TensorNode):
        return int64(w, shape) if len(shape.shape) == 1 else scalar_int64(w, shape)
    if isinstance(shape, int):
        return w.ints([shape])
    if not any(isinstance(v, TensorNode) for v in shape):
        return w.ints([int(v) for v in shape])
    parts = []
    for value in shape:
        if isinstance(value, TensorNode) and len(value.shape) > 1:
            raise ExportError(f"{value.name} is no shape: it has {len(value.shape)} axes")
        parts.append(scalar_int64(w, value))
    return parts[0] if len(parts) == 1 else w.node("Concat", parts, w.fresh("shape"), axis=0)
