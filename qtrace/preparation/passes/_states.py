"""States: which ops compute on integers, are fused, carry integers or stay float; and float islands."""

from __future__ import annotations

from collections.abc import Mapping

from qtrace.graph.types import Constant, Expr, GetAttr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops import Role
from qtrace.preparation.passes._chains import Chains
from qtrace.preparation.passes._sites import Placement
from qtrace.preparation.passes._view import View

__all__ = ["find_states", "number_islands"]


def find_states(view: View, chains: Chains, placement: Placement) -> dict[Expr, str]:
    """Says of each op, in execution order, which state of `ExprNote` it has."""
    ops = (expr for expr in view.order if not isinstance(expr, (GetAttr, Constant)))
    return {expr: _state(view, chains, placement, expr) for expr in ops}


def _state(view: View, chains: Chains, placement: Placement, expr: Expr) -> str:
    if expr in chains:
        return "int" if chains[expr].head is expr else "fused"
    if view.carries(expr) and any(node in placement.groups for node in expr.outputs):
        return "carried"
    call = view.calls.get(expr)
    reads_shapes = call is not None and call.role is Role.SHAPE
    floats = any(is_float_tensor(node) and node not in view.static for node in expr.outputs)
    return "float" if floats and not reads_shapes else "shape"


def number_islands(view: View, states: Mapping[Expr, str]) -> dict[Expr, int]:
    """Numbers the connected parts of float ops that integers enter and leave, in execution order.

    Returns:
        float op -> the number of its island; 0 for a part that integers do not both enter and leave.
    """
    numbers: dict[Expr, int] = {}
    count = 0
    for expr, state in states.items():
        if state == "float" and expr not in numbers:
            part, is_island = _connected_floats(view, states, expr)
            count += is_island
            numbers.update(dict.fromkeys(part, count if is_island else 0))
    return numbers


def _connected_floats(view: View, states: Mapping[Expr, str], start: Expr) -> tuple[set[Expr], bool]:
    """The float ops that are connected with ``start``, and whether integers enter and leave them."""
    part, borders, stack = {start}, set(), [start]
    while stack:
        expr = stack.pop()
        before = [n.expr for n in expr.inputs if is_float_tensor(n) and n not in view.static]
        behind = [u for n in expr.outputs if is_float_tensor(n) for u in n.users]
        for side, neighbours in (("in", before), ("out", behind)):
            for other in neighbours:
                state = states.get(other)
                if state in ("int", "carried", "fused"):
                    borders.add(side)
                elif state == "float" and other not in part:
                    part.add(other)
                    stack.append(other)
    return part, borders == {"in", "out"}
