"""ONNX for arithmetic, comparisons, logic, conversions, reductions, running sums, sorting and searching."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.writer import (
    Emitter,
    OnnxWriter,
    axes_of,
    cast,
    emit_as,
    int64,
    is_float,
    number,
    operand,
    rank,
    scalar_int64,
    unary,
)
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall


def _elementwise(op: str) -> Emitter:
    """Emits a function whose operands are converted to the type of its result."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        operands = call.attrs.get("operands", call.inputs)
        w.emit(op, [operand(w, v, call.out.dtype) for v in operands], call.out)

    return emit


def _with_number(op: str) -> Emitter:
    """Emits arithmetic on two values; a stored number becomes an integer where integers come out.

    Runtimes have integer kernels for two tensors of integers only. The number is the integer 1, or -1, times
    a scale, so that nothing is rounded.
    """

    def emit(w: OnnxWriter, call: OpCall) -> None:
        operands = call.attrs["operands"]
        names = [operand(w, v, call.out.dtype) for v in operands]
        if call.out in w.rounded and "scalar" in call.attrs and call.kind in w.number_kinds:
            (place,) = (i for i, v in enumerate(operands) if not isinstance(v, TensorNode))
            names[place] = w.integer_number(float(call.attrs["scalar"]), names[1 - place]) or names[place]
        # onnxruntime folds a factor into the convolution before it only as the second operand.
        stored = not isinstance(operands[0], TensorNode) or w.value(operands[0]) is not None
        if stored and op in ("Add", "Mul"):
            names.reverse()
        w.emit(op, names, call.out)

    return emit


def _floor_div(w: OnnxWriter, call: OpCall) -> None:
    """Writes a division rounded to minus infinity: ONNX rounds a division of integers towards zero."""
    left, right = (operand(w, v, call.out.dtype) for v in call.attrs["operands"])
    if is_float(call.out):
        w.emit("Floor", [w.node("Div", [left, right], w.fresh(call.out.name))], call.out)
        return
    rest = w.node("Mod", [left, right], w.fresh(call.out.name))
    w.emit("Div", [w.node("Sub", [left, rest], w.fresh(call.out.name)), right], call.out)


def _mod(w: OnnxWriter, call: OpCall) -> None:
    names = [operand(w, v, call.out.dtype) for v in call.attrs["operands"]]
    # MegEngine's remainder has the sign of the divisor for integers, of the dividend for floats.
    w.emit("Mod", names, call.out, fmod=int(is_float(call.out)))


def _square(w: OnnxWriter, call: OpCall) -> None:
    x = w.name(call.inputs[0])
    w.emit("Mul", [x, x], call.out)


def _common(operands: tuple[Any, ...]) -> np.dtype:
    """Returns the type in which two operands are compared: the nodes' type, float32 if one is a float."""
    kinds = [np.dtype(v.dtype) for v in operands if isinstance(v, TensorNode)]
    fractions = any(np.asarray(v).dtype.kind == "f" for v in operands if not isinstance(v, TensorNode))
    if fractions or any(k.kind == "f" for k in kinds):
        return np.dtype(np.float32)
    return next((k for k in kinds if k.kind != "b"), kinds[0])


def _comparison(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        operands = call.attrs["operands"]
        kind = _common(operands)
        if kind == np.bool_ and op != "Equal":
            kind = np.dtype(np.int32)
        _emit_compared(w, op, [operand(w, v, kind) for v in operands], call)

    return emit


def _emit_compared(w: OnnxWriter, op: str, names: list[str], call: OpCall) -> None:
    """Adds a comparison; MegEngine makes a vector of one value of it where ONNX has a scalar."""
    if tuple(call.out.shape or ()) == (1,) and not any(rank(v) for v in call.attrs["operands"]):
        names = [w.node(op, names, w.fresh(call.out.name)), w.ints([1])]
        op = "Reshape"
    w.emit(op, names, call.out)


def _not_equal(w: OnnxWriter, call: OpCall) -> None:
    operands = call.attrs["operands"]
    names = [operand(w, v, _common(operands)) for v in operands]
    _emit_compared(w, "Not", [w.node("Equal", names, w.fresh(call.out.name))], call)


def _logic(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        operands = call.attrs.get("operands", call.inputs)
        if np.dtype(call.out.dtype) != np.bool_:
            raise ExportError(
                f"{call.out.name}: logic on integers cannot become ONNX before opset 18: use booleans"
            )
        w.emit(op, [operand(w, v, np.bool_) for v in operands], call.out)

    return emit


def _astype(w: OnnxWriter, call: OpCall) -> None:
    source, out = call.inputs[0], call.out
    name = w.name(source)
    if np.dtype(source.dtype) == np.dtype(out.dtype):
        w.names[out] = name
        return
    w.names[out] = cast(w, name, out.dtype, out.name)


def _choose(w: OnnxWriter, call: OpCall) -> None:
    mask = operand(w, call.attrs["mask"], np.bool_)
    names = [operand(w, v, call.out.dtype) for v in call.attrs["operands"]]
    w.emit("Where", [mask, *names], call.out)


def _same_if_integer(emit: Emitter) -> Emitter:
    """Emits a rounding function, which leaves integers as they are."""

    def guarded(w: OnnxWriter, call: OpCall) -> None:
        if is_float(call.inputs[0]):
            emit(w, call)
        else:
            _astype(w, call)

    return guarded


def _round(w: OnnxWriter, call: OpCall) -> None:
    """Rounds half away from zero, as MegEngine does; ONNX's Round rounds half to even."""
    x, base = w.name(call.inputs[0]), call.out.name
    size = w.node("Abs", [x], w.fresh(base))
    whole = w.node("Floor", [size], w.fresh(base))
    rest = w.node("Sub", [size, whole], w.fresh(base))
    up = w.node("GreaterOrEqual", [rest, w.scalar(0.5)], w.fresh(base))
    rounded = w.node("Add", [whole, cast(w, up, np.float32)], w.fresh(base))
    w.emit("Mul", [rounded, w.node("Sign", [x], w.fresh(base))], call.out)


def _elemwise(w: OnnxWriter, call: OpCall) -> None:
    """Writes the fused modes of MegEngine's Elemwise that are not expanded."""
    op = {"FUSE_ADD_SIGMOID": "Sigmoid", "FUSE_ADD_TANH": "Tanh"}[call.attrs["mode"]]
    total = w.node("Add", [w.name(n) for n in call.inputs], w.fresh(call.out.name))
    w.emit(op, [total], call.out)


def _left_shift(w: OnnxWriter, call: OpCall) -> None:
    w.emit("Mul", _shifted(w, call), call.out)


def _right_shift(w: OnnxWriter, call: OpCall) -> None:
    names = _shifted(w, call)
    rest = w.node("Mod", names, w.fresh(call.out.name))
    w.emit("Div", [w.node("Sub", [names[0], rest], w.fresh(call.out.name)), names[1]], call.out)


def _shifted(w: OnnxWriter, call: OpCall) -> list[str]:
    """Returns the shifted number, and the power of two that multiplies or divides it."""
    left, right = call.attrs["operands"]
    if isinstance(right, TensorNode):
        raise ExportError(
            f"{call.out.name}: a shift by a computed number cannot become ONNX: shift by a fixed one"
        )
    return [operand(w, left, call.out.dtype), number(w, 2 ** int(right), call.out.dtype)]


def _expm1(w: OnnxWriter, call: OpCall) -> None:
    power = w.node("Exp", [w.name(call.inputs[0])], w.fresh(call.out.name))
    w.emit("Sub", [power, w.scalar(1.0)], call.out)


def _log1p(w: OnnxWriter, call: OpCall) -> None:
    w.emit("Log", [w.node("Add", [w.name(call.inputs[0]), w.scalar(1.0)], w.fresh(call.out.name))], call.out)


def _logaddexp(w: OnnxWriter, call: OpCall) -> None:
    """Writes max(a, b) + softplus(-|a - b|)."""
    base = call.out.name
    names = [operand(w, v, np.float32) for v in call.attrs["operands"]]
    apart = w.node("Abs", [w.node("Sub", names, w.fresh(base))], w.fresh(base))
    tail = w.node("Softplus", [w.node("Neg", [apart], w.fresh(base))], w.fresh(base))
    w.emit("Add", [w.node("Max", names, w.fresh(base)), tail], call.out)


ARITHMETIC: dict[str, Emitter] = {
    "add": _with_number("Add"),
    "sub": _with_number("Sub"),
    "mul": _with_number("Mul"),
    "div": _with_number("Div"),
    "maximum": _elementwise("Max"),
    "minimum": _elementwise("Min"),
    "pow": _elementwise("Pow"),
    "floor_div": _floor_div,
    "mod": _mod,
    "neg": _elementwise("Neg"),
    "abs": _elementwise("Abs"),
    "square": _square,
    "elemwise": _elemwise,
    "exp": _elementwise("Exp"),
    "expm1": _expm1,
    "log": _elementwise("Log"),
    "log1p": _log1p,
    "logaddexp": _logaddexp,
    "sqrt": _elementwise("Sqrt"),
    "floor": _same_if_integer(_elementwise("Floor")),
    "ceil": _same_if_integer(_elementwise("Ceil")),
    "round": _same_if_integer(_round),
    "sign": _elementwise("Sign"),
    **{n: _elementwise(n.capitalize()) for n in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{n: _elementwise(n.capitalize()) for n in ("sinh", "cosh", "asinh", "acosh", "atanh")},
    "less": _comparison("Less"),
    "less_equal": _comparison("LessOrEqual"),
    "greater": _comparison("Greater"),
    "greater_equal": _comparison("GreaterOrEqual"),
    "equal": _comparison("Equal"),
    "not_equal": _not_equal,
    "isnan": unary("IsNaN"),
    "isinf": unary("IsInf"),
    "logical_and": _logic("And"),
    "logical_or": _logic("Or"),
    "logical_xor": _logic("Xor"),
    "logical_not": _logic("Not"),
    "left_shift": _left_shift,
    "right_shift": _right_shift,
    "astype": _astype,
    "where": _choose,
}


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
    outputs = w.add("TopK", [source, count], outputs, **options)
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
    outputs = w.add("TopK", inputs, outputs, **options)
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
