"""ONNX for reductions, running sums, sorting and searching."""

from __future__ import annotations

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.types import (
    Emitter,
    axes_of,
    cast,
    emit_as,
    emit_several,
    int64,
    operand,
    scalar_int64,
)
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["REDUCTIONS"]


def _reduce(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        axes, keep = axes_of(call), int(call.attrs["keepdims"])
        x = operand(w, call.inputs[0], call.out.dtype)
        if op == "ReduceSum":  # its axes became an input at opset 13
            w.emit(op, [x, w.ints(axes)], call.out, keepdims=keep)
        else:
            w.emit(op, [x], call.out, axes=axes, keepdims=keep)

    return emit


def _spread(w: OnnxWriter, call: OpCall) -> None:
    """Writes variance or standard deviation of the population."""
    axes, keep, base = axes_of(call), int(call.attrs["keepdims"]), call.out.name
    x = operand(w, call.inputs[0], np.float32)
    mean = w.node("ReduceMean", [x], w.fresh(base), axes=axes, keepdims=1)
    apart = w.node("Sub", [x, mean], w.fresh(base))
    square = w.node("Mul", [apart, apart], w.fresh(base))
    if call.kind == "var":
        w.emit("ReduceMean", [square], call.out, axes=axes, keepdims=keep)
        return
    variance = w.node("ReduceMean", [square], w.fresh(base), axes=axes, keepdims=keep)
    w.emit("Sqrt", [variance], call.out)


def _argument(op: str) -> Emitter:
    """Emits the position of the largest or smallest value, the first one among equals."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        axis, x, keep = call.attrs["axis"], w.name(call.inputs[0]), int(bool(call.attrs["keepdims"]))
        if axis is not None and len(axis) != 1:
            raise ExportError(
                f"{call.out.name}: a search over several axes cannot become ONNX: flatten these axes before"
            )
        if axis is None:
            if keep:
                raise ExportError(
                    f"{call.out.name}: a search over all axes that keeps them cannot become ONNX: flatten it"
                )
            x = w.node("Reshape", [x, w.ints([-1])], w.fresh(call.out.name))
        emit_as(w, op, [x], call.out, axis=0 if axis is None else int(axis[0]), keepdims=keep)

    return emit


def _cumsum(w: OnnxWriter, call: OpCall) -> None:
    (axis,) = call.attrs["axis"]
    axis_tensor = w.constant(f"const_axis_{axis}", np.array(axis, np.int64))
    w.emit("CumSum", [operand(w, call.inputs[0], call.out.dtype), axis_tensor], call.out)


def _top(w: OnnxWriter, call: OpCall, count: str, largest: bool, ordered: bool = True) -> None:
    """Writes TopK along the last axis; values to the first output, positions to the second."""
    values, positions = call.outputs if len(call.outputs) == 2 else (None, call.out)
    base = call.out.name
    outputs = [w.fresh(base) if values is None else values.name, w.fresh(base)]
    options = {"axis": -1, "largest": int(largest), "sorted": int(ordered)}
    source = w.name(call.inputs[0])
    outputs = emit_several(w, "TopK", [source, count], outputs, **options)
    if values is not None:
        w.names[values] = outputs[0]
    w.names[positions] = cast(w, outputs[1], positions.dtype, positions.name)


def _topk(w: OnnxWriter, call: OpCall) -> None:
    a = call.attrs
    if a["kth_only"]:
        _kth(w, call)
        return
    base = call.out.name
    # MegEngine returns all values if there are fewer than k; their number may depend on the input.
    count = w.node("Min", [scalar_int64(w, a["k"]), _size(w, call.inputs[0], -1, base)], w.fresh(base))
    _top(w, call, count, bool(a["descending"]), not a["no_sort"])


def _size(w: OnnxWriter, x: TensorNode, axis: int, base: str) -> str:
    """Returns the size of an axis of ``x``, as a vector of one number."""
    axis %= len(x.shape)
    shape = w.node("Shape", [w.name(x)], w.fresh(base))
    return w.node("Slice", [shape, w.ints([axis]), w.ints([axis + 1])], w.fresh(base))


def _kth(w: OnnxWriter, call: OpCall) -> None:
    """Writes the k-th value and its position, as the last of the first k."""
    value, position = call.outputs
    outputs = [w.fresh(value.name), w.fresh(value.name)]
    options = {"axis": -1, "largest": int(bool(call.attrs["descending"])), "sorted": 1}
    inputs = [w.name(call.inputs[0]), scalar_int64(w, call.attrs["k"])]
    outputs = emit_several(w, "TopK", inputs, outputs, **options)
    last = w.constant("const_axis_-1", np.array(-1, np.int64))
    w.emit("Gather", [outputs[0], last], value, axis=-1)
    place = w.node("Gather", [outputs[1], last], w.fresh(position.name), axis=-1)
    w.names[position] = cast(w, place, position.dtype, position.name)


def _sort(w: OnnxWriter, call: OpCall) -> None:
    _top(w, call, _size(w, call.inputs[0], -1, call.out.name), bool(call.attrs["descending"]))


def _one_hot(w: OnnxWriter, call: OpCall) -> None:
    depth = w.constant(
        f"const_int64_{call.attrs['num_classes']}", np.array(call.attrs["num_classes"], np.int64)
    )
    values = w.constant("const_off_on", np.array([0, 1], np.int64))
    emit_as(w, "OneHot", [int64(w, call.inputs[0]), depth, values], call.out, axis=-1)


def _nms(w: OnnxWriter, call: OpCall) -> None:
    """Writes the suppression of boxes of one class, which MegEngine orders by score."""
    boxes, scores = call.inputs
    base, limit = call.out.name, call.attrs["max_output"]
    count = _size(w, boxes, 0, base) if limit is None else w.ints([int(limit)])
    stacked = w.node("Unsqueeze", [w.name(boxes), w.ints([0])], w.fresh(base))
    ranked = w.node("Unsqueeze", [w.name(scores), w.ints([0, 1])], w.fresh(base))
    threshold = call.attrs["iou_thresh"]
    if isinstance(threshold, TensorNode):
        raise ExportError(f"{base}: a threshold that is computed cannot become ONNX: fix it")
    limits = w.constant(w.fresh("const_iou"), np.array([float(threshold)], np.float32))
    selected = w.node("NonMaxSuppression", [stacked, ranked, count, limits], w.fresh(base))
    column = w.constant("const_axis_2", np.array(2, np.int64))
    emit_as(w, "Gather", [selected, column], call.out, axis=1)


REDUCTIONS: dict[str, Emitter] = {
    "mean": _reduce("ReduceMean"),
    "sum": _reduce("ReduceSum"),
    "max": _reduce("ReduceMax"),
    "min": _reduce("ReduceMin"),
    "prod": _reduce("ReduceProd"),
    "var": _spread,
    "std": _spread,
    "argmax": _argument("ArgMax"),
    "argmin": _argument("ArgMin"),
    "cumsum": _cumsum,
    "topk": _topk,
    "sort": _sort,
    "argsort": _sort,
    "one_hot": _one_hot,
    "nms": _nms,
}
