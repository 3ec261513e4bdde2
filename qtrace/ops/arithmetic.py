"""Binary arithmetic on activations: functions, operators, reversed and in-place operators."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import CallMethod, Expr, TensorNode
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import OpRule, Reading, Role, Target, positional, tensors

__all__ = ["RULES"]


def _binary(expr: Expr) -> Reading | str:
    left, right = positional(expr)[:2]
    if isinstance(expr, CallMethod) and expr.method.startswith("__r"):
        left, right = right, left
    nodes = tensors(left, right)
    if not nodes or not all(is_float_tensor(n) for n in (*nodes, expr.outputs[0])):
        return "integer or shape arithmetic"
    operands = tuple(v if isinstance(v, TensorNode) else float(v) for v in (left, right))
    return Reading(nodes, {"operands": operands})


def _targets(name: str, function: object, reversed_too: bool = True) -> tuple[Target, ...]:
    names = [f"__{name}__", f"__i{name}__"] + ([f"__r{name}__"] if reversed_too else [])
    kernel = "TRUE_DIV" if name == "truediv" else name.upper()
    return (Target(function=function), Target(kernel=kernel), *(Target(method=n) for n in names))  # type: ignore[arg-type]


RULES = (
    OpRule("add", Role.ELEMENTWISE, _targets("add", F.add), _binary),
    OpRule("sub", Role.ELEMENTWISE, _targets("sub", F.sub), _binary),
    OpRule("mul", Role.ELEMENTWISE, _targets("mul", F.mul), _binary),
    OpRule("div", Role.ELEMENTWISE, _targets("truediv", F.div), _binary),
)
