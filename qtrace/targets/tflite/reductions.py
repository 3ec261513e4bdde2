"""TFLite for reductions, softmax and norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, Emitter
from qtrace.targets.tflite.layout import Order, file_shape, natural
from qtrace.targets.tflite.plan import FusedOp
from qtrace.targets.tflite.store import OrderedTensor
from qtrace.targets.tflite.writer import FileTensor

__all__ = ["FLOAT_REDUCTIONS", "INTEGER_REDUCTIONS", "MOVING_REDUCTIONS"]


def _left(order: Order, axes: tuple[int, ...], keeps: bool) -> Order:
    """Returns the order of the result when ``axes`` are reduced."""
    if keeps:
        return order
    left = [axis for axis in range(len(order)) if axis not in axes]
    return tuple(left.index(axis) for axis in order if axis not in axes)


def _axes(b: Builder, call: OpCall) -> tuple[OrderedTensor, tuple[int, ...], FileTensor, bool]:
    """Returns the input, the reduced axes of the graph and of the file, and whether they stay with size 1."""
    source = b.get(call.inputs[0])
    rank, named_axes = len(source.order), call.attrs["axis"]
    axes = tuple(range(rank)) if named_axes is None else tuple(a % rank for a in named_axes)
    places = b.writer.ints(sorted(source.order.index(a) for a in axes))
    return source, axes, places, b.rank(call.out) == rank


def _reduced(code: str) -> Emitter:
    """Emits MEAN, SUM or REDUCE_PROD, on integers where the result has a site."""

    def emit(b: Builder, op: FusedOp) -> None:
        source, axes, places, keeps = _axes(b, op.call)
        target = b.target(op, _left(source.order, axes, keeps), fuses=False)
        x = source.tensor if op.site is not None else b.as_floats(source.tensor)
        b.writer.op(code, [x, places], [target.tensor], "ReducerOptions", keepDims=keeps)
        b.finish(op, target)

    return emit


def _extreme(code: str) -> Emitter:
    """Emits a maximum or minimum; on integers it keeps the grid of the input."""

    def emit(b: Builder, op: FusedOp) -> None:
        source, axes, places, keeps = _axes(b, op.call)
        order, x = _left(source.order, axes, keeps), source.tensor
        b.emit(op.call.out, order, code, [x, places], "ReducerOptions", x, keepDims=keeps)

    return emit


def _argument(code: str, kind: str) -> Emitter:
    def emit(b: Builder, op: FusedOp) -> None:
        call = op.call
        source, axes, _, keeps = _axes(b, call)
        if len(axes) != 1:
            raise ExportError(
                f"{call.out.name}: the place of an extreme has a TFLite form along one axis only: "
                "flatten the axes before"
            )
        if source.tensor.dtype == np.int16:  # the operator reads 8 bits or floats
            source = b.floats(source)
        order = _left(source.order, axes, False)
        shape = [n for i, n in enumerate(source.tensor.shape) if source.order[i] != axes[0]]
        positions = b.writer.tensor(call.out.name, shape, np.int32)
        axis = b.writer.constant("axis", np.array(source.order.index(axes[0]), np.int32))
        b.writer.op(code, [source.tensor, axis], [positions], kind, outputType=2)
        if keeps:
            order = source.order
            positions = b.reshaped(positions, file_shape(b.shape(call.out), order), order.index(0))
        b.put(call.out, positions, order)

    return emit


def _ranked(b: Builder, op: FusedOp) -> None:
    """Writes TOPK_V2 for ``topk``, ``sort`` and ``argsort``: the largest first, or of the negative."""
    call, a = op.call, op.call.attrs
    source = b.floats(b.get(call.inputs[0]))
    order = natural(len(source.order))
    x, base = b.arrange(source, order), call.out.name
    size = x.shape[-1]
    count = min(b.number(a["k"], f"{base}: its k"), size) if "k" in a else size
    if a["descending"] not in (True, False):
        raise ExportError(f"{base}: an order that is computed cannot become TFLite: use True or False")
    if not a["descending"]:
        x = b.add("NEG", [x], f"{base}_negative", x.shape, kind="NegOptions")
    shape = (*x.shape[:-1], count)
    best, places = b.like(x, f"{base}_best", shape), b.writer.tensor(f"{base}_places", shape, np.int32)
    number = b.writer.constant("k", np.array([count], np.int32))
    b.writer.op("TOPK_V2", [x, number], [best, places], "TopKV2Options")
    if not a["descending"]:
        best = b.add("NEG", [best], f"{base}_ranked", shape, kind="NegOptions")
    results = [places] if len(call.outputs) == 1 else [best, places]
    for node, result in zip(call.outputs, results, strict=True):
        if a.get("kth_only"):
            last = b.like(result, f"{node.name}_last", (*shape[:-1], 1))
            b.cut(result, last, {len(shape) - 1: (count - 1, count, 1)})
            result = b.reshaped(last, b.shape(node), 0)
        b.put(node, result, natural(b.rank(node)))


def _along_last_axis(code: str, kind: str = "", **options: Any) -> Emitter:
    """Emits an operator that works along the last axis of the file."""

    def emit(b: Builder, op: FusedOp) -> None:
        call, source = op.call, b.floats(b.get(op.call.inputs[0]))
        axes = np.atleast_1d(call.attrs["axis"])
        if len(axes) != 1:
            raise ExportError(f"{call.out.name}: softmax over many axes cannot become TFLite: use one axis")
        axis = int(axes[0]) % len(source.order)
        order = (*(a for a in source.order if a != axis), axis)
        out = b.result(call.out, order)
        b.writer.op(code, [b.arrange(source, order)], [out], kind, **options)
        b.put(call.out, out, order)

    return emit


def _batch_norm(b: Builder, op: FusedOp) -> None:
    """Writes a BatchNorm that is not folded, as a factor and a summand for each channel."""
    call = op.call
    source = b.floats(b.get(call.inputs[0]))
    module: Any = owner(call.expr)
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, weight, bias = (
        _parameter(b, getattr(module, n) if module is not None else call.attrs[n]) for n in names
    )
    assert mean is not None
    assert var is not None
    factor = 1.0 / np.sqrt(var.reshape(-1).astype(np.float64) + call.attrs["eps"])
    factor = factor if weight is None else factor * weight.reshape(-1)
    summand = (0.0 if bias is None else bias.reshape(-1)) - mean.reshape(-1) * factor
    rank = len(source.order)
    wide = [v.astype(np.float32).reshape(1, -1, *[1] * (rank - 2)) for v in (factor, summand)]
    laid = [
        b.writer.constant(f"{call.out.name}_{n}", v.transpose(source.order))
        for n, v in zip(("factor", "summand"), wide, strict=True)
    ]
    x, order = source.parts
    scaled = b.writer.add("MUL", [x, laid[0]], f"{call.out.name}_scaled", x.shape, kind="MulOptions")
    b.emit(call.out, order, "ADD", [scaled, laid[1]], "AddOptions")


def _parameter(b: Builder, value: Any) -> np.ndarray | None:
    """Returns the value of a norm's parameter; None if there is none.

    Raises:
        ExportError: when it is computed from an input of the graph.
    """
    if isinstance(value, TensorNode):
        known = b.value(value)
        if known is None:
            raise ExportError(
                f"{value.name}: a norm with parameters computed from an input cannot become TFLite: write "
                "it as a product and a sum"
            )
        return known
    return None if value is None else np.asarray(value.numpy())


def _normalized(b: Builder, call: OpCall, x: FileTensor, places: list[int]) -> FileTensor:
    """Normalizes to zero mean and unit variance over file axes ``places``."""
    axes, small = b.writer.ints(places), [1 if i in places else n for i, n in enumerate(x.shape)]

    def add(code: str, inputs: list[FileTensor], shape: Any, kind: str = "", **options: Any) -> FileTensor:
        return b.writer.add(code, inputs, f"{call.out.name}_{code.lower()}", shape, kind=kind, **options)

    mean = add("MEAN", [x, axes], small, "ReducerOptions", keepDims=True)
    centered = add("SUB", [x, mean], x.shape, "SubOptions")
    squares = add("SQUARED_DIFFERENCE", [x, mean], x.shape)
    spread = add("MEAN", [squares, axes], small, "ReducerOptions", keepDims=True)
    epsilon = b.writer.constant("epsilon", np.array(call.attrs["eps"], np.float32))
    inverse = add("RSQRT", [add("ADD", [spread, epsilon], small, "AddOptions")], small)
    return add("MUL", [centered, inverse], x.shape, "MulOptions")


def _put_affine(b: Builder, call: OpCall, x: FileTensor, order: Order, column: tuple[int, ...] = ()) -> None:
    """Makes weight * ``x`` + bias the result; weight and bias broadcast in the graph's order.

    Args:
        b: the file.
        call: the op, with its weight and bias.
        x: the values.
        order: the order of the axes of ``x``.
        column: the shape in which weight and bias broadcast; () for the shape that they have.
    """
    for code, name, kind in (("MUL", "weight", "MulOptions"), ("ADD", "bias", "AddOptions")):
        value = _parameter(b, call.attrs[name])
        if value is not None:
            value = value.reshape(column or value.shape)
            wide = value.reshape((1,) * (len(order) - value.ndim) + value.shape).transpose(order)
            result = b.writer.tensor(call.out.name, x.shape)
            factor = b.writer.constant(f"{call.out.name}_{code.lower()}_by", wide.astype(np.float32))
            b.writer.op(code, [x, factor], [result], kind)
            x = result
    b.put(call.out, x, order)


def _layer_norm(b: Builder, op: FusedOp) -> None:
    """Normalizes over the last axes of the graph."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    shape = call.attrs.get("normalized_shape")
    count = int(call.attrs["normalized_dim"]) if shape is None else np.size(shape)
    places = sorted(order.index(len(order) - 1 - i) for i in range(count))
    _put_affine(b, call, _normalized(b, call, x, places), order)


def _group_norm(b: Builder, op: FusedOp) -> None:
    """Normalizes over the channels of a group and the whole map; groups become an axis of their own."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    place, batch = order.index(1), order.index(0)
    channels = x.shape[place]
    count = channels
    if call.kind != "instance_norm":
        count = int(call.attrs.get("num_groups") or call.attrs["group"])
    apart = (*x.shape[:place], count, channels // count, *x.shape[place + 1 :])
    places = [i for i in range(len(apart)) if i not in (batch + (batch > place), place)]
    normal = b.reshaped(_normalized(b, call, b.reshaped(x, apart, batch), places), x.shape, batch)
    _put_affine(b, call, normal, order, (-1, *[1] * (len(order) - 2)))


def _by_length(b: Builder, op: FusedOp) -> None:
    """Divides by the root of the sum or the mean of squares along one axis."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    norm, axis = call.attrs.get("ord"), call.attrs["axis"]
    if norm not in (None, 2) or not isinstance(axis, int):
        raise ExportError(
            f"{call.out.name}: a normalization by a norm of order {norm} over the axis {axis} cannot "
            "become TFLite: use order 2 and one axis"
        )
    place = order.index(axis % len(order))
    small = [1 if i == place else n for i, n in enumerate(x.shape)]

    def add(code: str, inputs: list[FileTensor], shape: Any, kind: str = "", **options: Any) -> FileTensor:
        return b.writer.add(code, inputs, f"{call.out.name}_{code.lower()}", shape, kind=kind, **options)

    eps = float(call.attrs["eps"])
    squares, axes = add("SQUARE", [x], x.shape), b.writer.ints([place])
    if call.kind == "rms_norm":
        mean = add("MEAN", [squares, axes], small, "ReducerOptions", keepDims=True)
        number = b.writer.constant("epsilon", np.array(eps, np.float32))
        total = add("ADD", [mean, number], small, "AddOptions")
    else:
        length = add("SUM", [squares, axes], small, "ReducerOptions", keepDims=True)
        number = b.writer.constant("epsilon", np.array(eps * eps, np.float32))
        total = add("MAXIMUM", [length, number], small)
    result = add("MUL", [x, add("RSQRT", [total], small)], x.shape, "MulOptions")
    weight = None if call.attrs.get("weight") is None else _parameter(b, call.attrs["weight"])
    if weight is not None:
        wide = weight.reshape((1,) * (len(order) - weight.ndim) + weight.shape).transpose(order)
        factor = b.writer.constant(f"{call.out.name}_weight", wide.astype(np.float32))
        result = add("MUL", [result, factor], x.shape, "MulOptions")
    b.put(call.out, result, order)


def _norm(b: Builder, op: FusedOp) -> None:
    """Writes a vector norm: the root of a sum of squares, or a sum of absolute values."""
    call = op.call
    power, axis = call.attrs.get("ord"), call.attrs["axis"]
    if power not in (None, 1, 2) or axis is None:
        raise ExportError(
            f"{call.out.name}: a norm of order {power} over the axis {axis} cannot become TFLite: use 1 or "
            "2 over named axes"
        )
    source = b.floats(b.get(call.inputs[0]))
    x, rank = source.tensor, len(source.order)
    axes = tuple(int(a) % rank for a in np.atleast_1d(axis))
    keeps = b.rank(call.out) == rank
    places = b.writer.ints(sorted(source.order.index(a) for a in axes))
    name = f"{call.out.name}_terms"
    terms = (
        b.add("ABS", [x], name, x.shape)
        if power == 1
        else b.add("MUL", [x, x], name, x.shape, kind="MulOptions")
    )
    out = b.result(call.out, order := _left(source.order, axes, keeps))
    total = out if power == 1 else b.like(out, f"{call.out.name}_sum", out.shape)
    b.writer.op("SUM", [terms, places], [total], "ReducerOptions", keepDims=keeps)
    if power != 1:
        b.writer.op("SQRT", [total], [out])
    b.put(call.out, out, order)


INTEGER_REDUCTIONS: dict[str, Emitter] = {"mean": _reduced("MEAN"), "sum": _reduced("SUM")}
MOVING_REDUCTIONS: dict[str, Emitter] = {"max": _extreme("REDUCE_MAX"), "min": _extreme("REDUCE_MIN")}
FLOAT_REDUCTIONS: dict[str, Emitter] = {
    **INTEGER_REDUCTIONS,
    "prod": _reduced("REDUCE_PROD"),
    "argmax": _argument("ARG_MAX", "ArgMaxOptions"),
    **dict.fromkeys(("topk", "sort", "argsort"), _ranked),
    "argmin": _argument("ARG_MIN", "ArgMinOptions"),
    "softmax": _along_last_axis("SOFTMAX", "SoftmaxOptions", beta=1.0),
    "logsoftmax": _along_last_axis("LOG_SOFTMAX"),
    "batch_norm": _batch_norm,
    "norm": _norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
    **dict.fromkeys(("normalize", "rms_norm"), _by_length),
}
