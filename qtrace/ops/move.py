"""Ops that only move values: the integers stay, so the quantization parameters do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, method_arguments, tensors

__all__ = ["RULES"]


def _moved(node: Any, attrs: dict[str, Any]) -> Reading | str:
    nodes = tensors(node)
    if not nodes or not is_float_tensor(nodes[0]):
        return "integer or shape arithmetic"
    return Reading(nodes[:1], attrs)


def _call(expr: Expr) -> dict[str, Any]:
    """Arguments by name; the tensor under ``inp``."""
    if hasattr(expr, "func"):
        a = arguments(expr)
    else:
        a = method_arguments(expr)
        a["inp"] = a.pop("self")
    return a


def _spread(key: str) -> Callable[[Expr], Reading | str]:
    """A reader for methods that take ``x.f(1, 2)`` as well as ``x.f((1, 2))``."""

    def read(expr: Expr) -> Reading | str:
        a = _call(expr)
        value: Any = a.get(key, a.get("args"))
        if "args" in a and len(value) == 1 and isinstance(value[0], (tuple, list)):
            value = value[0]
        return _moved(a["inp"], {key: value if tensors(value) else tuple(value)})

    return read


def _flatten(expr: Expr) -> Reading | str:
    a = _call(expr)
    return _moved(a["inp"], {"start": int(a["start_axis"]), "end": int(a["end_axis"])})


def _axis(expr: Expr) -> Reading | str:
    a = _call(expr)
    return _moved(a["inp"], {"axis": a["axis"]})


def _getitem(expr: Expr) -> Reading | str:
    return _moved(expr.args[0], {"index": expr.args[1]})


def _split(expr: Expr) -> Reading | str:
    a = _call(expr)
    return _moved(a["inp"], {"sections": a["nsplits_or_sections"], "axis": a["axis"]})


def _same(expr: Expr) -> Reading | str:
    return _moved(expr.args[1] if owner(expr) is not None else expr.args[0], {})


def _pad(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is not None:
        node, width, mode, value = expr.args[1], module.pad_width, module.mode, module.pad_val
    else:
        a = arguments(expr)
        node, width, mode, value = a["src"], a["pad_width"], a["mode"], a["constant_value"]
    if str(mode).lower() == "constant" and float(value) != 0.0:
        return "it pads with a constant other than zero"
    return _moved(node, {"width": tuple(tuple(w) for w in width), "mode": str(mode).lower(), "value": 0.0})


def _rule(kind: str, read: Callable[[Expr], Reading | str], *targets: Target) -> OpRule:
    return OpRule(kind, Role.CARRY, targets, read)


RULES = (
    _rule("reshape", _spread("target_shape"), Target(function=F.reshape), Target(method="reshape")),
    _rule("transpose", _spread("pattern"), Target(function=F.transpose), Target(method="transpose")),
    _rule("flatten", _flatten, Target(function=F.flatten), Target(method="flatten")),
    _rule("expand_dims", _axis, Target(function=F.expand_dims)),
    _rule("squeeze", _axis, Target(function=F.squeeze)),
    _rule("getitem", _getitem, Target(method="__getitem__")),
    _rule("split", _split, Target(function=F.split)),
    _rule("identity", _same, Target(module=M.Identity)),
    _rule("dropout", _same, Target(module=M.Dropout), Target(function=F.dropout)),
    _rule("pad", _pad, Target(module=M.Pad), Target(function=F.nn.pad)),
)
