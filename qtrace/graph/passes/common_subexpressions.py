"""Merges exprs that compute the same from the same inputs."""

from __future__ import annotations

from typing import Any

from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Constant, Expr, GetAttr
from megengine.traced_module.node import Node

from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import canonical_call
from qtrace.graph.passes.base import FLAT, SOUND, Condition, GraphPass, PassReport
from qtrace.graph.passes.dead_code import NO_DEAD_CODE
from qtrace.graph.purity import find_written, is_pure
from qtrace.graph.walk import exprs, freeze, owner

__all__ = ["NO_COMMON_SUBEXPRESSIONS", "MergeCommonSubexpressions"]


class MergeCommonSubexpressions(GraphPass):
    """Lets the readers of equal results read the first of them, in whichever spelling the calls are.

    Two calls are equal if they call one operation with equal constants on the same tensors. Random ops,
    modules in training, modules of classes of the user's own, and tensors that are written into are left.
    """

    requires = (FLAT, NO_DEAD_CODE)

    def change(self, traced: TracedModule) -> PassReport:
        """Merges all equal exprs in one sweep in graph order."""
        duplicates = _duplicates(traced)
        changed, left = [], []
        outputs = set(traced.graph.outputs)
        with GraphEditor(traced) as editor:
            for expr, first in duplicates:
                if any(node in outputs for node in expr.outputs) and any(n in outputs for n in first.outputs):
                    left.append(f"{_name(expr)}: it is an output beside {_name(first)}, which is equal")
                    continue
                for old, new in zip(expr.outputs, first.outputs, strict=True):
                    editor.replace_uses(old, new)
                editor.remove(expr)
                if not isinstance(expr, (GetAttr, Constant)):
                    changed.append(f"{_name(expr)}: equal to {_name(first)}")
        return PassReport(self.name, tuple(changed), tuple(left))


def _duplicates(traced: TracedModule) -> list[tuple[Expr, Expr]]:
    """Returns each expr that an earlier one equals, and that one, in graph order."""
    order = exprs(traced)
    written = find_written(order)
    same: dict[Node, Node] = {}
    firsts: dict[Any, Expr] = {}
    duplicates = []
    for expr in order:
        if not is_pure(expr) or any(node in written for node in (*expr.inputs, *expr.outputs)):
            continue
        key = _key(expr, same)
        first = firsts.setdefault(key, expr) if key is not None else expr
        if first is not expr:
            duplicates.append((expr, first))
            same.update(zip(expr.outputs, first.outputs, strict=True))
    return duplicates


def _key(expr: Expr, same: dict[Node, Node]) -> Any:
    """Returns a key that is equal for equal exprs; None for an expr that is compared with no other."""
    if isinstance(expr, GetAttr):
        return "getattr", same.get(expr.inputs[0], expr.inputs[0]), str(expr.name)
    if isinstance(expr, Constant):
        return ("constant", freeze(expr.value, id)) if isinstance(expr.value, RawTensor) else None
    call = canonical_call(expr)

    def first(node: Node) -> int:
        return id(same.get(node, node))

    try:
        if call is None:
            return ("module", id(owner(expr)), freeze((expr.args[1:], expr.kwargs), first))
        values = [freeze(value, first) for value in call.values.values()]
        if call.op.commutative and len(values) == 2:
            values.sort(key=repr)
        return call.op, tuple(call.values), tuple(values), len(expr.outputs)
    except TypeError:  # an argument of a type without a value to compare
        return None


def _name(expr: Expr) -> str:
    return ", ".join(str(node.name) for node in expr.outputs)


def _find(traced: TracedModule) -> list[str]:
    outputs = set(traced.graph.outputs)
    return [
        f"{_name(expr)} equals {_name(first)}"
        for expr, first in _duplicates(traced)
        if not all(any(node in outputs for node in e.outputs) for e in (expr, first))
    ]


NO_COMMON_SUBEXPRESSIONS = Condition("has no common subexpressions", _find)
MergeCommonSubexpressions.ensures = (NO_DEAD_CODE, NO_COMMON_SUBEXPRESSIONS, SOUND)
