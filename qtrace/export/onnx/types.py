"""Types in an ONNX file: every tensor has the type that it has in the graph.

ONNX requires int64 for shapes and indices, which are int32 in MegEngine: they are converted where an op reads
them (`int64`, `shape_vector`) and where one computes them (`emit_as`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from qtrace.errors import ExportError
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import CallMethod, GetAttr, TensorNode
from qtrace.graph.walk import reads_shape
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
    "parameter_source",
    "rank",
    "scalar_int64",
    "shape_vector",
    "unary",
]

_ALL_AXES = 7  # the axis of a GetVarShape that reads the whole shape
_OPERATORS = {"__mul__": "Mul", "__add__": "Add", "__sub__": "Sub"}
_MAX_DEPTH = 16

Emitter = Callable[[OnnxWriter, OpCall], None]


def array(value: Any) -> np.ndarray:
    """Converts a MegEngine tensor, or anything that numpy accepts, to an array."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def axes_of(call: OpCall, name: str = "axis") -> list[int]:
    """Returns the axes that an attribute names, counted from the front; all axes for None."""
    named_axes, count = call.attrs[name], len(call.inputs[0].shape)
    if named_axes is None:
        return list(range(count))
    return [
        int(axis) % count for axis in (named_axes if isinstance(named_axes, (tuple, list)) else [named_axes])
    ]


def rank(value: Any) -> int:
    """Returns the number of axes of a node or an array."""
    return len(value.shape) if isinstance(value, TensorNode) else array(value).ndim


def is_float(node: TensorNode) -> bool:
    """Whether the node holds floats."""
    return np.dtype(node.dtype).kind == "f"


def number(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """Adds a constant number or array of type ``dtype``."""
    numbers, kind = array(value), np.dtype(dtype)
    if numbers.ndim:
        return w.constant(w.fresh("const_array"), numbers.astype(kind))
    name = f"const_{numbers.item()!r}" if kind == np.float32 else f"const_{kind.name}_{numbers.item()!r}"
    if kind == np.float32:
        return w.scalar(float(numbers))
    return w.constant(name, numbers.astype(kind))


def cast(w: OnnxWriter, name: str, dtype: Any, output: str | None = None) -> str:
    """Converts the tensor ``name``."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return w.node("Cast", [name], output or w.fresh(name), to=kind)


def operand(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """Returns a node, number or array as a tensor of type ``dtype``."""
    if not isinstance(value, TensorNode):
        return number(w, value, dtype)
    same = np.dtype(value.dtype) == np.dtype(dtype)
    return w.name(value) if same else cast(w, w.name(value), dtype)


def parameter_source(call: OpCall, name: str) -> TensorNode | str:
    """Returns the node of the parameter ``name`` of an op, or its path where the op is a module."""
    value = call.attrs.get(name)
    if isinstance(value, TensorNode):
        return value
    attribute = call.expr.inputs[0].expr
    return f"{attribute.name}.{name}" if isinstance(attribute, GetAttr) else call.out


def emit_as(w: OnnxWriter, op: str, inputs: Sequence[str], node: TensorNode, **attributes: Any) -> None:
    """Adds a node whose result has another type in ONNX than ``node``, and converts the result."""
    result = w.node(op, inputs, w.fresh(node.name), **attributes)
    w.names[node] = cast(w, result, node.dtype, node.name)


def unary(op: str, **fixed: Any) -> Emitter:
    """Emits an op that is one ONNX node with one input."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        w.emit(op, [w.name(call.inputs[0])], call.out, **fixed)

    return emit


def emit_several(
    w: OnnxWriter, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> list[str]:
    """Adds a node with several outputs and returns their names."""
    names = w.outputs(outputs)
    w.nodes.append(helper.make_node(op, list(inputs), names, name=w.naming.node(op, names[0]), **attributes))
    return names


def int64(w: OnnxWriter, value: Any) -> str:
    """Returns a node of integers, or constant integers, as an int64 tensor."""
    return operand(w, value, np.int64)


def scalar_int64(w: OnnxWriter, value: Any) -> str:
    """Returns one constant or computed integer as an int64 vector of length 1."""
    if not isinstance(value, TensorNode):
        return w.ints([int(value)])
    if value.shape is not None and tuple(value.shape) == (1,):
        return int64(w, value)
    vector = _size_vector(w, value)
    if vector is not None:
        return vector
    return w.node("Reshape", [int64(w, value), w.ints([1])], w.fresh(value.name))


def shape_vector(w: OnnxWriter, shape: Any) -> str:
    """Returns a shape as an int64 vector; it may be a node, or a sequence of ints and scalar nodes."""
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


def _size_vector(w: OnnxWriter, value: TensorNode) -> str | None:
    """Writes an integer that a graph computes from shapes as an int64 vector of length 1.

    Args:
        w: the writer.
        value: a node without axes.

    Returns:
        The vector; None if the node is no axis of a shape, nor a product, sum or difference of such.
    """
    return _vector(w, value, _MAX_DEPTH) if tuple(value.shape or ()) == () else None


def _vector(w: OnnxWriter, value: Any, depth: int) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return w.ints([value])
    expr = getattr(value, "expr", None)
    if not isinstance(expr, CallMethod) or expr.kwargs or not depth:
        return None
    known = w.size_vectors.get(value)
    if known is not None:
        return known
    vector = None
    if expr.method == "__getitem__":
        vector = _axis(w, *expr.args)
    elif expr.method in _OPERATORS and len(expr.args) == 2:
        parts = [_vector(w, part, depth - 1) for part in expr.args]
        if all(part is not None for part in parts):
            inputs = [part for part in parts if part is not None]
            vector = w.node(_OPERATORS[expr.method], inputs, w.fresh(value.name))
    if vector is not None:
        w.size_vectors[value] = vector
    return vector


def _axis(w: OnnxWriter, shape: Any, axis: Any) -> str | None:
    """Writes the size of an axis of a tensor whose whole shape is read."""
    expr: Any = getattr(shape, "expr", None)
    if type(axis) is not int or expr is None or not reads_shape(expr) or int(expr.opdef.axis) != _ALL_AXES:
        return None
    node = expr.inputs[0]
    if node not in w.names and w.value(node) is None:  # the tensor is not part of what is written
        return None
    source = w.rounded_to.get(node) or w.name(node)  # a second reader of floats would keep kernels apart
    if source not in w.shape_vectors:
        w.shape_vectors[source] = w.node("Shape", [source], w.fresh(shape.name))
    return w.node("Gather", [w.shape_vectors[source], w.ints([axis])], w.fresh(shape.name), axis=0)
