"""ONNX for ops that only move values, and for the shape arithmetic that they read."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export._onnx_ops import Emitter
from qtrace.export._onnx_writer import OnnxWriter
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, TensorNode
from qtrace.graph.walk import op_label
from qtrace.ops import OpCall

__all__ = ["MOVES", "emit_shape_op"]


def _reshape(w: OnnxWriter, call: OpCall) -> None:
    w.emit("Reshape", [w.name(call.inputs[0]), shape_vector(w, call.attrs["target_shape"])], call.out)


def shape_vector(w: OnnxWriter, shape: Any) -> str:
    """A target shape of ints and scalar nodes, or one vector node, as an int64 vector."""
    if isinstance(shape, TensorNode):
        return w.name(shape)
    if not any(isinstance(v, TensorNode) for v in shape):
        return w.ints([int(v) for v in shape])
    if len(shape) == 1 and len(shape[0].shape) == 1:
        return w.name(shape[0])
    parts = []
    for value in shape:
        if isinstance(value, TensorNode):
            name = w.name(value)
            flat = w.node("Reshape", [name, w.ints([1])], w.fresh(value.name))
            parts.append(flat)
        else:
            parts.append(w.ints([int(value)]))
    return w.node("Concat", parts, w.fresh("shape"), axis=0)


def _flatten(w: OnnxWriter, call: OpCall) -> None:
    shape = [int(n) for n in call.inputs[0].shape]
    rank = len(shape)
    start, end = call.attrs["start"] % rank, call.attrs["end"] % rank
    # 0 copies the input's dimension, so that the batch stays free.
    target = [0] * start + [-1] + shape[end + 1 :]
    w.emit("Reshape", [w.name(call.inputs[0]), w.ints(target)], call.out)


def _transpose(w: OnnxWriter, call: OpCall) -> None:
    pattern = call.attrs["pattern"]
    if not pattern:
        pattern = tuple(reversed(range(len(call.inputs[0].shape))))
    if not all(isinstance(p, int) for p in pattern):
        raise ExportError(f"{call.out.name}: transpose by {pattern!r} has no ONNX form: use integers")
    w.emit("Transpose", [w.name(call.inputs[0])], call.out, perm=[p % len(pattern) for p in pattern])


def _axes(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        axis = call.attrs["axis"]
        if axis is None:
            axis = [i for i, n in enumerate(call.inputs[0].shape) if int(n) == 1]
        axes = [int(a) for a in (axis if isinstance(axis, (tuple, list)) else [axis])]
        w.emit(op, [w.name(call.inputs[0]), w.ints(axes)], call.out)

    return emit


def _identity(w: OnnxWriter, call: OpCall) -> None:
    w.names[id(call.out)] = w.name(call.inputs[0])


def _pad(w: OnnxWriter, call: OpCall) -> None:
    width = call.attrs["width"]
    rank = len(call.inputs[0].shape)
    width = (*width, *[(0, 0)] * (rank - len(width)))
    pads = w.ints([int(b) for b, _ in width] + [int(a) for _, a in width])
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}[call.attrs["mode"]]
    inputs = [w.name(call.inputs[0]), pads]
    w.emit("Pad", [*inputs, w.scalar(0.0)] if mode == "constant" else inputs, call.out, mode=mode)


def _split(w: OnnxWriter, call: OpCall) -> None:
    axis = int(call.attrs["axis"])
    sizes = [int(n.shape[axis]) for n in call.outputs]
    outputs = [n.name for n in call.outputs]
    from onnx import helper

    inputs = [w.name(call.inputs[0]), w.ints(sizes)]
    w.nodes.append(helper.make_node("Split", inputs, outputs, name=f"{outputs[0]}_Split", axis=axis))
    w.names.update((id(n), n.name) for n in call.outputs)


def _getitem(w: OnnxWriter, call: OpCall) -> None:
    name = _index(w, w.name(call.inputs[0]), call.attrs["index"], len(call.inputs[0].shape), call.out.name)
    w.names[id(call.out)] = name


_END = 2**31 - 1


def _index(w: OnnxWriter, source: str, index: Any, rank: int, out: str) -> str:
    """Basic indexing: ints, slices, an ellipsis and None, as Slice, Squeeze and Unsqueeze."""
    items = list(index) if isinstance(index, tuple) else [index]
    bounds = [b for i in items if isinstance(i, slice) for b in (i.start, i.stop, i.step)]
    if any(isinstance(b, TensorNode) for b in bounds):
        raise ExportError(f"{out}: a slice bound that is computed has no ONNX form here: use fixed ones")
    if any(isinstance(i, (TensorNode, list, np.ndarray)) for i in items):
        raise ExportError(f"{out}: indexing by a tensor or a list has no ONNX form here: use slices")
    kept = [i for i in items if i is not None and i is not Ellipsis]
    if Ellipsis in [i for i in items if not isinstance(i, (int, slice))]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(kept))
    slices, squeeze, unsqueeze, axis, position = [], [], [], 0, 0
    for item in items:
        if item is None:
            unsqueeze.append(position)
            position += 1
            continue
        if isinstance(item, slice):
            if (item.start, item.stop, item.step) != (None, None, None):
                step = 1 if item.step is None else int(item.step)
                begin = int(item.start) if item.start is not None else (0 if step > 0 else _END)
                stop = int(item.stop) if item.stop is not None else (_END if step > 0 else -_END)
                slices.append((axis, begin, stop, step))
            position += 1
        else:
            begin = int(item)
            slices.append((axis, begin, _END if begin == -1 else begin + 1, 1))
            squeeze.append(axis)
        axis += 1
    steps: list[tuple[str, list[str]]] = []
    if slices:
        axes, starts, ends, strides = zip(*slices, strict=True)
        steps.append(("Slice", [w.ints(starts), w.ints(ends), w.ints(axes), w.ints(strides)]))
    if squeeze:
        steps.append(("Squeeze", [w.ints(squeeze)]))
    if unsqueeze:
        steps.append(("Unsqueeze", [w.ints(unsqueeze)]))
    for number, (op, extra) in enumerate(steps):
        last = number == len(steps) - 1
        source = w.node(op, [source, *extra], out if last else w.fresh(out))
    return source


MOVES: dict[str, Emitter] = {
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "expand_dims": _axes("Unsqueeze"),
    "squeeze": _axes("Squeeze"),
    "identity": _identity,
    "dropout": _identity,
    "pad": _pad,
    "split": _split,
    "getitem": _getitem,
}

_ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul", "floordiv": "Div", "truediv": "Div"}


def emit_shape_op(w: OnnxWriter, expr: Expr) -> bool:
    """Writes an expr of shape arithmetic (int64 in ONNX); False when it is none of the known ones."""
    out = expr.outputs[0]
    if isinstance(expr, Apply) and type(expr.opdef).__name__ == "GetVarShape":
        w.emit("Shape", [w.name(expr.inputs[0])], out)
        return True
    if isinstance(expr, CallMethod) and expr.method == "__getitem__":
        index = expr.args[1]
        w.names[id(out)] = _index(w, w.name(expr.args[0]), index, 1, out.name)
        return True
    if isinstance(expr, CallMethod) and (word := expr.method.strip("_").lstrip("ir")) in _ARITHMETIC:
        operands = list(expr.args[:2])
        if expr.method.startswith("__r"):
            operands.reverse()
        names = [
            w.name(v)
            if isinstance(v, TensorNode)
            else w.constant(f"const_int_{int(v)}", np.array(int(v), np.int64))
            for v in operands
        ]
        w.emit(_ARITHMETIC[word], names, out)
        return True
    if (
        isinstance(expr, CallFunction)
        and expr.func.__name__ in ("concat", "stack")
        and "F." in op_label(expr)
    ):
        w.names[id(out)] = shape_vector(w, tuple(expr.args[0]))
        return True
    return False
