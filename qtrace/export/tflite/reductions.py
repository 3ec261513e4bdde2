"""TFLite for reductions, softmax and norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Emitter, Held
from qtrace.export.tflite.layout import Order, file_shape
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Stored
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall

__all__ = ["FLOAT_REDUCTIONS", "INTEGER_REDUCTIONS", "MOVING_REDUCTIONS"]


def _left(order: Order, axes: tuple[int, ...], keeps: bool) -> Order:
    """The order of what is left of a tensor when ``axes`` are reduced."""
    if keeps:
        return order
    left = [axis for axis in range(len(order)) if axis not in axes]
    return tuple(left.index(axis) for axis in order if axis not in axes)


def _axes(b: Build, call: OpCall) -> tuple[Held, tuple[int, ...], Stored, bool]:
    """The input, the graph's axes that are reduced, those of the file, and whether they stay with size 1."""
    held = b.get(call.inputs[0])
    rank, given = len(held.order), call.attrs["axis"]
    axes = tuple(range(rank)) if given is None else tuple(a % rank for a in given)
    places = b.writer.ints(sorted(held.order.index(a) for a in axes))
    return held, axes, places, b.rank(call.out) == rank


def _reduced(code: str) -> Emitter:
    """MEAN, SUM or REDUCE_PROD, on integers where the result has a site."""

    def emit(b: Build, job: Job) -> None:
        held, axes, places, keeps = _axes(b, job.call)
        target = b.target(job, _left(held.order, axes, keeps), fuses=False)
        x = held.stored if job.site is not None else b.as_floats(held.stored)
        b.writer.op(code, [x, places], [target.stored], "ReducerOptions", keepDims=keeps)
        b.done(job, target)

    return emit


def _extreme(code: str) -> Emitter:
    """The largest or smallest value: one of the input's, integers too."""

    def emit(b: Build, job: Job) -> None:
        held, axes, places, keeps = _axes(b, job.call)
        order, x = _left(held.order, axes, keeps), held.stored
        b.emit(job.call.out, order, code, [x, places], "ReducerOptions", x, keepDims=keeps)

    return emit


def _argument(code: str, kind: str) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        call = job.call
        held, axes, _, keeps = _axes(b, call)
        if len(axes) != 1:
            raise ExportError(
                f"{call.out.name}: the place of an extreme has a TFLite form along one axis only: "
                "flatten the axes before"
            )
        if held.stored.dtype == np.int16:  # the operator reads 8 bits or floats
            held = b.floats(held)
        order = _left(held.order, axes, False)
        shape = [n for i, n in enumerate(held.stored.shape) if held.order[i] != axes[0]]
        made = b.writer.tensor(call.out.name, shape, np.int32)
        where = b.writer.constant("axis", np.array(held.order.index(axes[0]), np.int32))
        b.writer.op(code, [held.stored, where], [made], kind, outputType=2)
        if keeps:
            order = held.order
            made = b.reshaped(made, file_shape(b.shape(call.out), order), order.index(0))
        b.put(call.out, made, order)

    return emit


def _along_last_axis(code: str, kind: str = "", **options: Any) -> Emitter:
    """An operator that works along the last axis of the file."""

    def emit(b: Build, job: Job) -> None:
        call, held = job.call, b.floats(b.get(job.call.inputs[0]))
        axes = np.atleast_1d(call.attrs["axis"])
        if len(axes) != 1:
            raise ExportError(f"{call.out.name}: softmax over several axes has no TFLite form: use one axis")
        axis = int(axes[0]) % len(held.order)
        order = (*(a for a in held.order if a != axis), axis)
        out = b.result(call.out, order)
        b.writer.op(code, [b.arrange(held, order)], [out], kind, **options)
        b.put(call.out, out, order)

    return emit


def _batch_norm(b: Build, job: Job) -> None:
    """A BatchNorm that nothing could take in: a factor and a summand for each channel."""
    call = job.call
    held = b.floats(b.get(call.inputs[0]))
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
    rank = len(held.order)
    wide = [v.astype(np.float32).reshape(1, -1, *[1] * (rank - 2)) for v in (factor, summand)]
    laid = [
        b.writer.constant(f"{call.out.name}_{n}", v.transpose(held.order))
        for n, v in zip(("factor", "summand"), wide, strict=True)
    ]
    x, order = held.parts
    scaled = b.writer.add("MUL", [x, laid[0]], f"{call.out.name}_scaled", x.shape, kind="MulOptions")
    b.emit(call.out, order, "ADD", [scaled, laid[1]], "AddOptions")


def _parameter(b: Build, value: Any) -> np.ndarray | None:
    if isinstance(value, TensorNode):
        return b.value(value)
    return None if value is None else np.asarray(value.numpy())


def _normalized(b: Build, call: OpCall, x: Stored, places: list[int]) -> Stored:
    """Values of zero mean and unit variance over some axes of the file."""
    axes, small = b.writer.ints(places), [1 if i in places else n for i, n in enumerate(x.shape)]

    def add(code: str, inputs: list[Stored], shape: Any, kind: str = "", **options: Any) -> Stored:
        return b.writer.add(code, inputs, f"{call.out.name}_{code.lower()}", shape, kind=kind, **options)

    mean = add("MEAN", [x, axes], small, "ReducerOptions", keepDims=True)
    centered = add("SUB", [x, mean], x.shape, "SubOptions")
    squares = add("SQUARED_DIFFERENCE", [x, mean], x.shape)
    spread = add("MEAN", [squares, axes], small, "ReducerOptions", keepDims=True)
    epsilon = b.writer.constant("epsilon", np.array(call.attrs["eps"], np.float32))
    inverse = add("RSQRT", [add("ADD", [spread, epsilon], small, "AddOptions")], small)
    return add("MUL", [centered, inverse], x.shape, "MulOptions")


def _put_affine(b: Build, call: OpCall, x: Stored, order: Order, column: tuple[int, ...] = ()) -> None:
    """Takes weight times ``x`` plus bias as the result; both broadcast in the graph's order.

    Args:
        b: the file.
        call: the op, with its weight and bias.
        x: the values.
        order: the order of their axes.
        column: the shape in which weight and bias broadcast; () for their own.
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


def _layer_norm(b: Build, job: Job) -> None:
    """Over the last axes, wherever they stand in the file."""
    call, (x, order) = job.call, b.floats(b.get(job.call.inputs[0])).parts
    shape = call.attrs.get("normalized_shape")
    count = int(call.attrs["normalized_dim"]) if shape is None else np.size(shape)
    places = sorted(order.index(len(order) - 1 - i) for i in range(count))
    _put_affine(b, call, _normalized(b, call, x, places), order)


def _group_norm(b: Build, job: Job) -> None:
    """Over the channels of a group and the whole map: groups become an axis of their own."""
    call, (x, order) = job.call, b.floats(b.get(job.call.inputs[0])).parts
    place, batch = order.index(1), order.index(0)
    channels = x.shape[place]
    count = channels
    if call.kind != "instance_norm":
        count = int(call.attrs.get("num_groups") or call.attrs["group"])
    apart = (*x.shape[:place], count, channels // count, *x.shape[place + 1 :])
    places = [i for i in range(len(apart)) if i not in (batch + (batch > place), place)]
    normal = b.reshaped(_normalized(b, call, b.reshaped(x, apart, batch), places), x.shape, batch)
    _put_affine(b, call, normal, order, (-1, *[1] * (len(order) - 2)))


INTEGER_REDUCTIONS: dict[str, Emitter] = {"mean": _reduced("MEAN"), "sum": _reduced("SUM")}
MOVING_REDUCTIONS: dict[str, Emitter] = {"max": _extreme("REDUCE_MAX"), "min": _extreme("REDUCE_MIN")}
FLOAT_REDUCTIONS: dict[str, Emitter] = {
    **INTEGER_REDUCTIONS,
    "prod": _reduced("REDUCE_PROD"),
    "argmax": _argument("ARG_MAX", "ArgMaxOptions"),
    "argmin": _argument("ARG_MIN", "ArgMinOptions"),
    "softmax": _along_last_axis("SOFTMAX", "SoftmaxOptions", beta=1.0),
    "logsoftmax": _along_last_axis("LOG_SOFTMAX"),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
}
