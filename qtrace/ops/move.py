"""Ops that only move values of one tensor: the integers stay, so the quantization parameters do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import (
    OpRule,
    Reading,
    Role,
    Target,
    arguments,
    axes,
    named,
    positional,
    tensors,
    traced_arguments,
    typed,
)
from qtrace.ops.conv import pair

__all__ = ["RULES"]


def _moved(expr: Expr, node: Any, attrs: dict[str, Any], fixed: str = "") -> Reading | str:
    nodes = tensors(node)
    if not nodes:
        return "its input is not a tensor of the graph"
    return replace(typed(expr, nodes, attrs), fixed=fixed)


def _spread(key: str) -> Callable[[Expr], Reading | str]:
    """A reader for methods that take ``x.f(1, 2)`` as well as ``x.f((1, 2))``.

    The value is a tuple of ints and nodes, or one node that holds all of them.
    """

    def read(expr: Expr) -> Reading | str:
        if isinstance(expr, Apply):
            return _moved(expr, expr.inputs[0], {key: expr.inputs[1]})
        a = named(expr)
        value: Any = a.get(key, a.get("args"))
        if "args" in a and len(value) == 1 and (isinstance(value[0], (tuple, list)) or _vector(value[0])):
            value = value[0]
        if isinstance(value, int):
            value = (value,)
        return _moved(expr, a["inp"], {key: value if tensors(value) else tuple(value)})

    return read


def _vector(value: Any) -> bool:
    """Whether ``value`` is a node that holds a whole shape."""
    return bool(tensors(value)) and len(value.shape) == 1


def _flatten(expr: Expr) -> Reading | str:
    a = named(expr)
    return _moved(expr, a["inp"], {"start": int(a["start_axis"]), "end": int(a["end_axis"])})


def _axis(expr: Expr) -> Reading | str:
    if isinstance(expr, Apply):
        return _moved(expr, expr.inputs[0], {"axis": _removed(expr)})
    a = named(expr)
    return _moved(expr, a["inp"], {"axis": axes(a["axis"])})


def _removed(expr: Expr) -> tuple[int, ...]:
    """The axes of AddAxis and RemoveAxis, which the kernels apply one after the other."""
    found = [int(i) for i in expr.opdef.axis]
    if str(expr.opdef) == "AddAxis":
        return tuple(found)
    left = list(range(len(expr.inputs[0].shape)))
    return tuple(left.pop(i) for i in found)


def _swapaxes(expr: Expr) -> Reading | str:
    a = named(expr)
    pattern = list(range(len(a["inp"].shape)))
    first, second = int(a["axis1"]), int(a["axis2"])
    pattern[first], pattern[second] = pattern[second], pattern[first]
    return _moved(expr, a["inp"], {"pattern": tuple(pattern)})


def _split(expr: Expr) -> Reading | str:
    a = named(expr)
    return _moved(expr, a["inp"], {"sections": a["nsplits_or_sections"], "axis": int(a["axis"])})


def _same(expr: Expr) -> Reading | str:
    operands = positional(expr)
    if operands and isinstance(operands[0], type):  # Tensor.__new__(Tensor, x)
        operands = operands[1:]
    return _moved(expr, operands[0], {})


def _pad(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is not None:
        node, width, mode, value = expr.args[1], module.pad_width, module.mode, module.pad_val
    else:
        a = arguments(expr)
        node, width, mode, value = a["src"], a["pad_width"], a["mode"], a["constant_value"]
    mode, value = str(mode).lower(), float(value)
    numbers, fixed = traced_arguments({"padding": width})
    widths = tuple((int(b), int(e)) for b, e in numbers["padding"])
    if not any(n for pair in widths for n in pair):
        found = _moved(expr, node, {}, fixed)
        return found if isinstance(found, str) else replace(found, kind="identity")
    found = _moved(expr, node, {"width": widths, "mode": mode, "value": value}, fixed)
    if isinstance(found, Reading) and found.role is None and mode == "constant" and value != 0.0:
        reason = f"it pads with {value:g}, which need not be one of the input's values"
        return Reading(found.inputs, found.attrs, role=Role.FLOAT, reason=reason, fixed=fixed)
    return found


def _repeat(expr: Expr) -> Reading | str:
    a = named(expr)
    axis = None if a["axis"] is None else int(a["axis"])
    return _moved(expr, a["inp"], {"repeats": a["repeats"], "axis": axis})


def _roll(expr: Expr) -> Reading | str:
    a = named(expr)
    shift = a["shift"] if isinstance(a["shift"], (tuple, list)) else (a["shift"],)
    return _moved(expr, a["inp"], {"shift": tuple(shift), "axis": axes(a["axis"])})


def _pixel_shuffle(expr: Expr) -> Reading | str:
    module = owner(expr)
    factor = module.upscale_factor if module is not None else named(expr)["upscale_factor"]
    numbers, fixed = traced_arguments({"factor": factor})
    return _moved(expr, positional(expr)[0], {"factor": int(numbers["factor"])}, fixed)


def _sliding_window(expr: Expr) -> Reading | str:
    module: Any = owner(expr)
    names = ("kernel_size", "padding", "stride", "dilation")
    found = named(expr) if module is None else {n: getattr(module, n) for n in names}
    numbers, fixed = traced_arguments({n: found[n] for n in names})
    return _moved(expr, positional(expr)[0], {n: pair(numbers[n]) for n in names}, fixed)


def _rule(kind: str, read: Callable[[Expr], Reading | str], *targets: Target) -> OpRule:
    return OpRule(kind, Role.CARRY, targets, read)


RULES = (
    _rule("reshape", _spread("target_shape"), Target(function=F.reshape), Target(method="reshape")),
    _rule("transpose", _spread("pattern"), Target(function=F.transpose), Target(method="transpose")),
    _rule("swapaxes", _swapaxes, Target(function=F.swapaxes)),
    _rule("flatten", _flatten, Target(function=F.flatten), Target(method="flatten")),
    _rule("expand_dims", _axis, Target(function=F.expand_dims), Target(kernel="AddAxis")),
    _rule("squeeze", _axis, Target(function=F.squeeze), Target(kernel="RemoveAxis")),
    _rule(
        "broadcast_to",
        _spread("shape"),
        Target(function=F.broadcast_to),
        Target(method="_broadcast"),
        Target(kernel="Broadcast"),
    ),
    _rule("repeat", _repeat, Target(function=F.repeat)),
    _rule("tile", _spread("reps"), Target(function=F.tile)),
    _rule("roll", _roll, Target(function=F.roll)),
    _rule("split", _split, Target(function=F.split)),
    _rule(
        "identity",
        _same,
        Target(module=M.Identity),
        # MegEngine's own marks of where its quantization begins and ends; in float they do nothing.
        Target(module=M.QuantStub),
        Target(module=M.DequantStub),
        Target(function=F.copy),
        Target(method="detach"),
        Target(method="to"),
        Target(method="__pos__"),
        Target(method="__new__"),
        Target(kernel="Identity"),
        Target(kernel="Copy"),
    ),
    _rule("dropout", _same, Target(module=M.Dropout), Target(function=F.dropout)),
    _rule("pad", _pad, Target(module=M.Pad), Target(function=F.nn.pad)),
    _rule("pixel_shuffle", _pixel_shuffle, Target(module=M.PixelShuffle), Target(function=F.pixel_shuffle)),
    _rule(
        "sliding_window", _sliding_window, Target(module=M.SlidingWindow), Target(function=F.sliding_window)
    ),
)
