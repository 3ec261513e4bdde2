"""ONNX for shapes and for tensors that are filled from numbers and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.types import Emitter, cast, emit_as, operand, scalar_int64, shape_vector
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import Node, TensorNode
from qtrace.ops import OpCall

__all__ = ["SHAPES"]


def _fixed(emit: Emitter) -> Emitter:
    """Emits a result without inputs as a constant, computed by MegEngine; ``emit`` writes the others."""

    def guarded(w: OnnxWriter, call: OpCall) -> None:
        if call.expr.inputs:
            emit(w, call)
            return
        for node, value in zip(call.outputs, call.expr.interpret(), strict=True):
            w.values[node] = value.numpy()

    return guarded


def _shape(w: OnnxWriter, call: OpCall) -> None:
    if len(call.inputs) != 1:
        raise ExportError(
            f"{call.out.name}: the common shape of several tensors cannot become ONNX: "
            "read the shape of their sum"
        )
    emit_as(w, "Shape", [w.name(call.inputs[0])], call.out)


def _scalar(w: OnnxWriter, value: Any) -> str:
    """Returns a constant or computed number as a float32 tensor without axes."""
    if isinstance(value, TensorNode) and value.shape != ():
        return w.node("Reshape", [operand(w, value, np.float32), w.ints([])], w.fresh(value.name))
    return operand(w, value, np.float32)


def _arange(w: OnnxWriter, call: OpCall) -> None:
    a = call.attrs
    start, stop = (0, a["start"]) if a["stop"] is None else (a["start"], a["stop"])
    names = [_scalar(w, v) for v in (start, stop, a["step"])]
    _emit_float(w, call, w.node("Range", names, w.fresh(call.out.name)))


def _emit_float(w: OnnxWriter, call: OpCall, name: str) -> None:
    """Makes the float32 tensor ``name`` the result, converted to the type of the node."""
    if np.dtype(call.out.dtype) != np.float32:
        name = cast(w, name, call.out.dtype, call.out.name)
    w.names[call.out] = name


def _linspace(w: OnnxWriter, call: OpCall) -> None:
    base, a = call.out.name, call.attrs
    start, stop, count = (_scalar(w, a[n]) for n in ("start", "stop", "num"))
    places = w.node("Range", [w.scalar(0.0), count, w.scalar(1.0)], w.fresh(base))
    span = w.node("Sub", [stop, start], w.fresh(base))
    parts = w.node(
        "Max", [w.node("Sub", [count, w.scalar(1.0)], w.fresh(base)), w.scalar(1.0)], w.fresh(base)
    )
    moved = w.node("Mul", [places, w.node("Div", [span, parts], w.fresh(base))], w.fresh(base))
    _emit_float(w, call, w.node("Add", [moved, start], w.fresh(base)))


def _eye(w: OnnxWriter, call: OpCall) -> None:
    from onnx import helper

    rows, columns = call.attrs["N"], call.attrs["M"]
    sizes = [scalar_int64(w, v) for v in (rows, rows if columns is None else columns)]
    shape = w.node("Concat", sizes, w.fresh(call.out.name), axis=0)
    blank = w.node("ConstantOfShape", [shape], w.fresh(call.out.name))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(call.out.dtype))
    w.emit("EyeLike", [blank], call.out, dtype=kind)


def _full(w: OnnxWriter, call: OpCall) -> None:
    value = operand(w, call.attrs["value"], call.out.dtype)
    w.emit("Expand", [value, shape_vector(w, call.attrs["shape"])], call.out)


def _full_like(w: OnnxWriter, call: OpCall) -> None:
    shape = w.node("Shape", [w.name(call.inputs[0])], w.fresh(call.out.name))
    w.emit("Expand", [operand(w, call.attrs["value"], call.out.dtype), shape], call.out)


def _meshgrid(w: OnnxWriter, call: OpCall) -> None:
    """Lays each input along an axis of its own, and expands it over the others."""
    rank = len(call.inputs)
    axes = list(range(rank))
    if call.attrs["indexing"] == "xy" and rank > 1:
        axes[0], axes[1] = 1, 0
    lengths: dict[Node, str] = {}
    lines: list[str] = []
    for node, axis in zip(call.inputs, axes, strict=True):
        lengths[axis] = w.node("Shape", [w.name(node)], w.fresh(call.out.name))
        form = w.ints([-1 if i == axis else 1 for i in range(rank)])
        lines.append(w.node("Reshape", [w.name(node), form], w.fresh(call.out.name)))
    shape = w.node("Concat", [lengths[i] for i in range(rank)], w.fresh(call.out.name), axis=0)
    for line, out in zip(lines, call.outputs, strict=True):
        w.emit("Expand", [line, shape], out)


SHAPES: dict[str, Emitter] = {
    "shape": _shape,
    "arange": _fixed(_arange),
    "linspace": _fixed(_linspace),
    "eye": _fixed(_eye),
    "full": _fixed(_full),
    "full_like": _full_like,
    "meshgrid": _meshgrid,
}
