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
    """MEAN or SUM on integers."""

    def emit(b: Build, job: Job) -> None:
        held, axes, places, keeps = _axes(b, job.call)
        target = b.target(job, _left(held.order, axes, keeps), fuses=False)
        b.writer.op(code, [held.stored, places], [target.stored], "ReducerOptions", keepDims=keeps)
        b.done(job, target)

    return emit


def _reduced_float(code: str) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        held, axes, places, keeps = _axes(b, job.call)
        order = _left(held.order, axes, keeps)
        out = b.result(job.call.out, order)
        b.writer.op(code, [b.floats(held).stored, places], [out], "ReducerOptions", keepDims=keeps)
        b.put(job.call.out, out, order)

    return emit


def _extreme(code: str) -> Emitter:
    """The largest or smallest value: one of the input's, integers too."""

    def emit(b: Build, job: Job) -> None:
        held, axes, places, keeps = _axes(b, job.call)
        order = _left(held.order, axes, keeps)
        out = b.result(job.call.out, order, held.stored)
        b.writer.op(code, [held.stored, places], [out], "ReducerOptions", keepDims=keeps)
        b.put(job.call.out, out, order)

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


def _last_axis(b: Build, call: OpCall, code: str, kind: str = "", **options: Any) -> None:
    """An operator that works along the last axis of the file."""
    held = b.floats(b.get(call.inputs[0]))
    axes = call.attrs["axis"]
    axis = axes[0] if isinstance(axes, (tuple, list)) else axes
    if isinstance(axes, (tuple, list)) and len(axes) != 1:
        raise ExportError(f"{call.out.name}: softmax over several axes has no TFLite form: use one axis")
    axis %= len(held.order)
    order = (*(a for a in held.order if a != axis), axis)
    out = b.result(call.out, order)
    b.writer.op(code, [b.arrange(held, order)], [out], kind, **options)
    b.put(call.out, out, order)


def _softmax(b: Build, job: Job) -> None:
    _last_axis(b, job.call, "SOFTMAX", "SoftmaxOptions", beta=1.0)


def _logsoftmax(b: Build, job: Job) -> None:
    _last_axis(b, job.call, "LOG_SOFTMAX")


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
    scaled = b.writer.tensor(f"{call.out.name}_scaled", held.stored.shape)
    out = b.result(call.out, held.order)
    b.writer.op("MUL", [held.stored, laid[0]], [scaled], "MulOptions")
    b.writer.op("ADD", [scaled, laid[1]], [out], "AddOptions")
    b.put(call.out, out, held.order)


def _parameter(b: Build, value: Any) -> np.ndarray | None:
    if isinstance(value, TensorNode):
        return b.value(value)
    return None if value is None else np.asarray(value.numpy())


class _Norm:
    """Zero mean and unit variance over some axes of the file, then a factor and a summand."""

    def __init__(self, b: Build, call: OpCall) -> None:
        self.b, self.call = b, call

    def run(self, x: Stored, places: list[int], eps: float) -> Stored:
        """The normalized values."""
        b, name = self.b, self.call.out.name
        axes, small = b.writer.ints(places), [1 if i in places else n for i, n in enumerate(x.shape)]

        def add(code: str, inputs: list[Stored], shape: Any, kind: str = "", **options: Any) -> Stored:
            made = b.writer.tensor(f"{name}_{code.lower()}", shape)
            b.writer.op(code, inputs, [made], kind, **options)
            return made

        mean = add("MEAN", [x, axes], small, "ReducerOptions", keepDims=True)
        centered = add("SUB", [x, mean], x.shape, "SubOptions")
        squares = add("SQUARED_DIFFERENCE", [x, mean], x.shape)
        spread = add("MEAN", [squares, axes], small, "ReducerOptions", keepDims=True)
        eps_stored = b.writer.constant("epsilon", np.array(eps, np.float32))
        inverse = add("RSQRT", [add("ADD", [spread, eps_stored], small, "AddOptions")], small)
        return add("MUL", [centered, inverse], x.shape, "MulOptions")

    def affine(self, x: Stored, order: Order, weight: np.ndarray | None, bias: np.ndarray | None) -> None:
        """Takes weight times ``x`` plus bias as the result; both broadcast in the graph's order."""
        b, call = self.b, self.call
        for code, value, kind in (("MUL", weight, "MulOptions"), ("ADD", bias, "AddOptions")):
            if value is not None:
                wide = value.reshape((1,) * (len(order) - value.ndim) + value.shape).transpose(order)
                made = b.writer.tensor(call.out.name, x.shape)
                operand = b.writer.constant(f"{call.out.name}_{code.lower()}_by", wide.astype(np.float32))
                b.writer.op(code, [x, operand], [made], kind)
                x = made
        b.put(call.out, x, order)


def _layer_norm(b: Build, job: Job) -> None:
    """Over the last axes, wherever they stand in the file."""
    call, norm = job.call, _Norm(b, job.call)
    held = b.floats(b.get(call.inputs[0]))
    weight, bias = _parameter(b, call.attrs["weight"]), _parameter(b, call.attrs["bias"])
    shape = call.attrs.get("normalized_shape")
    if shape is not None:
        count = len(shape) if isinstance(shape, (tuple, list)) else 1
    else:
        count = int(call.attrs["normalized_dim"])
    rank = len(held.order)
    places = sorted(held.order.index(rank - 1 - i) for i in range(count))
    norm.affine(norm.run(held.stored, places, call.attrs["eps"]), held.order, weight, bias)


def _group_norm(b: Build, job: Job) -> None:
    """Over the channels of a group and the whole map: groups become an axis of their own."""
    call, norm = job.call, _Norm(b, job.call)
    held = b.floats(b.get(call.inputs[0]))
    channels = int(held.shape[1])
    count = (
        channels if call.kind == "instance_norm" else int(call.attrs.get("num_groups") or call.attrs["group"])
    )
    weight, bias = (_parameter(b, call.attrs[n]) for n in ("weight", "bias"))
    column = (-1, *[1] * (len(held.order) - 2))
    weight, bias = (None if v is None else v.reshape(column) for v in (weight, bias))
    place = held.order.index(1)
    shape = held.stored.shape
    grouped = b.reshaped(
        held.stored, (*shape[:place], count, channels // count, *shape[place + 1 :]), held.order.index(0)
    )
    batch = held.order.index(0)
    batch += batch > place
    places = [i for i in range(len(shape) + 1) if i not in (batch, place)]
    made = norm.run(grouped, places, call.attrs["eps"])
    norm.affine(b.reshaped(made, shape, held.order.index(0)), held.order, weight, bias)


INTEGER_REDUCTIONS: dict[str, Emitter] = {"mean": _reduced("MEAN"), "sum": _reduced("SUM")}
MOVING_REDUCTIONS: dict[str, Emitter] = {"max": _extreme("REDUCE_MAX"), "min": _extreme("REDUCE_MIN")}
FLOAT_REDUCTIONS: dict[str, Emitter] = {
    "mean": _reduced_float("MEAN"),
    "sum": _reduced_float("SUM"),
    "prod": _reduced_float("REDUCE_PROD"),
    "argmax": _argument("ARG_MAX", "ArgMaxOptions"),
    "argmin": _argument("ARG_MIN", "ArgMinOptions"),
    "softmax": _softmax,
    "logsoftmax": _logsoftmax,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
}
