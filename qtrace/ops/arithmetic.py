"""Arithmetic on one or two tensors: functions, operators, reversed and in-place operators, kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.types import CallMethod, Constant, Expr, TensorNode
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, positional, tensors, typed

__all__ = ["RULES", "binary", "fixed", "unary"]


def unary(expr: Expr) -> Reading | str:
    """Reads an op of one tensor."""
    nodes = tensors(positional(expr)[0])
    return typed(expr, nodes) if nodes else "its input is not a tensor of the graph"


def binary(expr: Expr) -> Reading | str:
    """Reads an op of two operands; numbers go to ``scalar``, with the ``side`` on which they stand."""
    left, right = (fixed(v) for v in positional(expr)[:2])
    if isinstance(expr, CallMethod) and expr.method.startswith("__r") and expr.method != "__rshift__":
        left, right = right, left
    attrs: dict[str, Any] = {"operands": (left, right)}
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, (bool, int, float)):
            attrs.update(scalar=float(value), side=side)
    return typed(expr, tensors(left, right), attrs)


def division(expr: Expr) -> Reading | str:
    """Reads a division; one by a tensor stays float."""
    reading = binary(expr)
    if isinstance(reading, str) or reading.role is not None or reading.attrs.get("side") == "right":
        return reading
    return dataclasses.replace(reading, role=Role.FLOAT, reason="a small denominator would round to zero")


def fixed(value: Any) -> Any:
    """An operand: a node, a Python number, or an array of numbers."""
    if isinstance(value, TensorNode):
        # A function that the tracer did not see leaves its numbers as constants of the graph.
        scalar = isinstance(value.expr, Constant) and value.shape == ()
        return value.expr.value.numpy().item() if scalar else value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{value!r} is not a number")
    return array.item() if array.ndim == 0 else array


def _elemwise(expr: Expr) -> Reading | str:
    """MegEngine's quantizable Elemwise: ordinary modes are expanded to functions before quantization."""
    module: Any = owner(expr)
    mode = str(module.method).upper()
    if mode not in ("FUSE_ADD_SIGMOID", "FUSE_ADD_TANH"):
        return f"its mode {mode} has no rule"
    return typed(expr, tensors(*positional(expr)), {"mode": mode})


def _methods(*names: str) -> tuple[Target, ...]:
    return tuple(Target(method=n) for n in names)


def _rule(
    kind: str,
    read: Callable[[Expr], Reading | str],
    functions: tuple[Callable[..., Any], ...],
    kernel: str = "",
    method: str = "",
    reason: str = "",
) -> OpRule:
    targets = [Target(function=f) for f in functions]
    targets += [Target(kernel=kernel)] if kernel else []
    names = (f"__{method}__", f"__i{method}__", f"__r{method}__") if method else ()
    return OpRule(
        kind, Role.FLOAT if reason else Role.ELEMENTWISE, (*targets, *_methods(*names)), read, reason
    )


_NEGATE = (Target(function=F.neg), Target(kernel="NEGATE"))
_ABS = (Target(function=F.abs), Target(kernel="ABS"))
_POWER = "its output spans a power of its input's range"

RULES = (
    _rule("add", binary, (F.add,), "ADD", "add"),
    _rule("sub", binary, (F.sub,), "SUB", "sub"),
    _rule("mul", binary, (F.mul,), "MUL", "mul"),
    _rule("div", division, (F.div,), "TRUE_DIV", "truediv"),
    _rule("maximum", binary, (F.maximum,), "MAX"),
    _rule("minimum", binary, (F.minimum,), "MIN"),
    OpRule("neg", Role.ELEMENTWISE, (*_NEGATE, *_methods("__neg__")), unary),
    OpRule("abs", Role.ELEMENTWISE, (*_ABS, *_methods("__abs__")), unary),
    OpRule("elemwise", Role.ELEMENTWISE, (Target(module=M.Elemwise),), _elemwise),
    _rule("pow", binary, (F.pow,), "POW", "pow", _POWER),
    _rule("square", unary, (F.square,), "SQUARE", reason=_POWER),
    _rule(
        "floor_div",
        binary,
        (F.floor_div,),
        "FLOOR_DIV",
        "floordiv",
        "it rounds: an error of one step changes a whole value",
    ),
    _rule(
        "mod",
        binary,
        (F.mod,),
        "MOD",
        "mod",
        "it wraps around: an error of one step can change the whole range",
    ),
)
