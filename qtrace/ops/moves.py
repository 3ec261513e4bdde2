"""Ops that move, pick and join values without changing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import (
    Arguments,
    UnreadableError,
    activation,
    arguments,
    integers,
    named,
    operands,
    positional,
    settings,
    tensors,
    traced_arguments,
    unreadable,
)
from qtrace.ops.base import Reading, Role, op_rule, typed

# Ops that only move values of one tensor: integers and quantization parameters stay the same.


def _moved(expr: Expr, node: Any, attrs: dict[str, Any], fixed: str = "") -> Reading:
    return replace(typed(expr, (Arguments(inp=node).tensor(),), attrs), fixed=fixed)


def _spread(key: str) -> Callable[[Expr], Reading]:
    """Builds a reader for methods that take ``x.f(1, 2)`` as well as ``x.f((1, 2))``.

    The value is a tuple of ints and nodes, or one node that holds the whole tuple.
    """

    def read(expr: Expr) -> Reading:
        if isinstance(expr, Apply):
            node, numbers = operands(expr, 2)
            return _moved(expr, node, {key: numbers})
        a = named(expr)
        value: Any = a.get(key, a.get("args"))
        if "args" in a and len(value) == 1 and (isinstance(value[0], (tuple, list)) or _vector(value[0])):
            value = value[0]
        if isinstance(value, int):
            value = (value,)
        if not tensors(value) and not isinstance(value, (tuple, list)):
            raise unreadable(key, value, "several numbers")
        return _moved(expr, a["inp"], {key: value if tensors(value) else tuple(value)})

    return read


def _vector(value: Any) -> bool:
    """Returns whether ``value`` is a node that holds a whole shape."""
    return bool(tensors(value)) and len(value.shape) == 1


def _flatten(expr: Expr) -> Reading:
    a = named(expr)
    return _moved(expr, a["inp"], {"start": a.integer("start_axis"), "end": a.integer("end_axis")})


def _expand_dims(expr: Expr) -> Reading:
    return _moved(expr, activation(expr), {"axis": settings(expr, "axis").axes("axis")})


def _squeeze(expr: Expr) -> Reading:
    node, axes = activation(expr), settings(expr, "axis").axes("axis")
    if isinstance(expr, Apply):  # the kernel removes one axis after the other
        remaining = list(range(len(node.shape)))
        axes = tuple(remaining.pop(i) for i in axes or ())
    return _moved(expr, node, {"axis": axes})


def _swapaxes(expr: Expr) -> Reading:
    a = named(expr)
    first, second, rank = a.integer("axis1"), a.integer("axis2"), len(a.tensor().shape)
    if not all(-rank <= axis < rank for axis in (first, second)):
        raise UnreadableError(f"its axes {first} and {second} do not fit a tensor of rank {rank}")
    pattern = list(range(rank))
    pattern[first], pattern[second] = pattern[second], pattern[first]
    return _moved(expr, a["inp"], {"pattern": tuple(pattern)})


def _split(expr: Expr) -> Reading:
    a = named(expr)
    return _moved(expr, a["inp"], {"sections": a["nsplits_or_sections"], "axis": a.integer("axis")})


def _same(expr: Expr) -> Reading:
    values = positional(expr)
    created = bool(values) and isinstance(values[0], type)  # Tensor.__new__(Tensor, x)
    return _moved(expr, operands(expr, 1 + created)[created], {})


def _pad(expr: Expr) -> Reading:
    a = settings(expr, "pad_width", "mode", "pad_val")
    value = a.number("pad_val" if "pad_val" in a else "constant_value")
    node, mode = activation(expr), str(a["mode"]).lower()
    numbers, fixed = traced_arguments({"padding": a["pad_width"]})
    widths = _widths(numbers["padding"])
    if not any(n for pair in widths for n in pair):
        return replace(_moved(expr, node, {}, fixed), kind="identity")
    reading = _moved(expr, node, {"width": widths, "mode": mode, "value": value}, fixed)
    if reading.role is None and mode == "constant" and value != 0.0:
        reason = f"it pads with {value:g}, which need not be one of the input's values"
        return replace(reading, role=Role.FLOAT, reason=reason)
    return reading


def _widths(value: Any) -> tuple[tuple[int, ...], ...]:
    """Reads the padding before and after each axis."""
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, (tuple, list)) for v in value):
        raise unreadable("padding", value, "pairs of integers")
    return tuple(integers("padding", v, 2) for v in value)


def _repeat(expr: Expr) -> Reading:
    a = named(expr)
    axis = None if a["axis"] is None else a.integer("axis")
    return _moved(expr, a["inp"], {"repeats": a["repeats"], "axis": axis})


def _roll(expr: Expr) -> Reading:
    a = named(expr)
    shift = a["shift"] if isinstance(a["shift"], (tuple, list)) else (a["shift"],)
    return _moved(expr, a["inp"], {"shift": tuple(shift), "axis": a.axes("axis")})


def _pixel_shuffle(expr: Expr) -> Reading:
    numbers, fixed = traced_arguments({"factor": settings(expr, "upscale_factor")["upscale_factor"]})
    return _moved(expr, activation(expr), {"factor": numbers.integer("factor")}, fixed)


def _sliding_window(expr: Expr) -> Reading:
    names = ("kernel_size", "padding", "stride", "dilation")
    a = settings(expr, *names)
    numbers, fixed = traced_arguments({n: a[n] for n in names})
    return _moved(expr, activation(expr), {n: numbers.integers(n, 2) for n in names}, fixed)


_MOVE = (
    op_rule("reshape", Role.CARRY, _spread("target_shape"), F.reshape),
    op_rule("transpose", Role.CARRY, _spread("pattern"), F.transpose),
    op_rule("swapaxes", Role.CARRY, _swapaxes, F.swapaxes),
    op_rule("flatten", Role.CARRY, _flatten, F.flatten),
    op_rule("expand_dims", Role.CARRY, _expand_dims, F.expand_dims, kernels=["AddAxis"]),
    op_rule("squeeze", Role.CARRY, _squeeze, F.squeeze, kernels=["RemoveAxis"]),
    op_rule("broadcast_to", Role.CARRY, _spread("shape"), F.broadcast_to, kernels=["Broadcast"]),
    op_rule("repeat", Role.CARRY, _repeat, F.repeat),
    op_rule("tile", Role.CARRY, _spread("reps"), F.tile),
    op_rule("roll", Role.CARRY, _roll, F.roll),
    op_rule("split", Role.CARRY, _split, F.split),
    op_rule(
        "identity",
        Role.CARRY,
        _same,
        # MegEngine's own marks of where its quantization begins and ends; in float they do nothing.
        *(M.Identity, M.QuantStub, M.DequantStub, F.copy),
        methods=["detach", "to", "__pos__", "__new__"],
        kernels=["Identity", "Copy"],
    ),
    op_rule("dropout", Role.CARRY, _same, M.Dropout, F.dropout),
    op_rule("pad", Role.CARRY, _pad, M.Pad, F.nn.pad),
    op_rule("pixel_shuffle", Role.CARRY, _pixel_shuffle, M.PixelShuffle, F.pixel_shuffle),
    op_rule("sliding_window", Role.CARRY, _sliding_window, M.SlidingWindow, F.sliding_window),
)


# Ops that pick values of one tensor by an index or a mask and do not change them.


def _getitem(expr: Expr) -> Reading:
    node, index = operands(expr, 2)
    return typed(expr, tensors(node), {"index": index})


def _gather(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"]), {"axis": a.integer("axis"), "index": a["index"]})


def _indexing_one_hot(expr: Expr) -> Reading:
    a = arguments(expr)
    attrs = {"index": a["index"], "axis": a.integer("axis"), "keepdims": a.flag("keepdims")}
    return typed(expr, tensors(a["src"]), attrs)


def _cond_take(expr: Expr) -> Reading:
    """Reads ``cond_take``, whose second output holds integer positions of the picked floats."""
    a = arguments(expr)
    nodes, attrs = tensors(a["x"]), {"mask": a["mask"]}
    return Reading(nodes, attrs) if all(is_float_tensor(n) for n in nodes) else typed(expr, nodes, attrs)


def _embedding(expr: Expr) -> Reading:
    index = tensors(*operands(expr, 1))
    if not index:
        raise UnreadableError("its index is fixed")
    return Reading((), {"index": index[0], "weight": settings(expr, "weight")["weight"]})


def _one_hot(expr: Expr) -> Reading:
    a = arguments(expr)
    numbers, fixed = traced_arguments({"num_classes": a["num_classes"]})
    return Reading(tensors(a["inp"]), {"num_classes": numbers.integer("num_classes")}, fixed=fixed)


_TABLE = "a table that is read and not computed with"

_PICK = (
    op_rule("getitem", Role.CARRY, _getitem, methods=["__getitem__"]),
    op_rule("gather", Role.CARRY, _gather, F.gather),
    op_rule("indexing_one_hot", Role.CARRY, _indexing_one_hot, F.nn.indexing_one_hot),
    op_rule("cond_take", Role.CARRY, _cond_take, F.cond_take),
    op_rule("embedding", Role.FLOAT, _embedding, M.Embedding, F.nn.embedding, reason=_TABLE),
    op_rule("one_hot", Role.SHAPE, _one_hot, F.nn.one_hot, reason="it makes integers of integers"),
)


# Ops that join values of several tensors in one.


def _join(expr: Expr) -> Reading:
    if isinstance(expr, Apply):
        a = Arguments(inps=tuple(expr.inputs), axis=expr.opdef.axis)
    else:
        a = arguments(expr)
    if not isinstance(a["inps"], (tuple, list)):
        raise UnreadableError("it joins the parts of one tensor, where its rule reads a list of tensors")
    parts = tuple(a["inps"])
    nodes = tensors(*parts)
    if len(nodes) < len(parts) and any(is_float_tensor(n) for n in nodes):
        raise UnreadableError("one of the tensors that it joins is not a tensor of the graph")
    return typed(expr, nodes, {"axis": a.integer("axis"), "parts": parts})


def _setitem(expr: Expr) -> Reading:
    """Reads ``x[index] = value``, whose output is the changed tensor that later readers read."""
    target, index, value = operands(expr, 3)
    return typed(expr, tensors(target, value), {"index": index, "value": value})


def _read_where(expr: Expr) -> Reading:
    mask, x, y = operands(expr, 3)
    return typed(expr, tensors(x, y), {"mask": mask, "operands": (x, y)})


def _scatter(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"], a["source"]), {"axis": a.integer("axis"), "index": a["index"]})


_JOIN = (
    op_rule("concat", Role.CONCAT, _join, M.Concat, F.concat, kernels=["Concat"]),
    op_rule("stack", Role.CONCAT, _join, F.stack, kernels=["Stack"]),
    op_rule("setitem", Role.CONCAT, _setitem, methods=["__setitem__"]),
    op_rule("where", Role.CONCAT, _read_where, F.where, kernels=["Where"]),
    op_rule("scatter", Role.CONCAT, _scatter, F.scatter),
)

RULES = (*_MOVE, *_PICK, *_JOIN)
