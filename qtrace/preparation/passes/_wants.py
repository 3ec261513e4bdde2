"""Wants: the parameters that the readers of a tensor ask for, seen through ops that only move values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from qtrace.graph.types import Expr, Node, TensorNode
from qtrace.ops import Role
from qtrace.preparation.annotation import Plan
from qtrace.preparation.passes._chains import Chains, find_summands, find_weights, reads_rounded
from qtrace.preparation.passes._view import View, distinct, plan_of

__all__ = ["Want", "Wants", "propagate_wants"]


class Want(NamedTuple):
    """The parameters that an expr asks for at its inputs.

    Attributes:
        reader: the expr.
        plan: the plan that the expr asks for.
        partial: whether the expr moves values and some reader of the moved value wants it in float.
    """

    reader: Expr
    plan: Plan
    partial: bool


Wants: TypeAlias = Mapping[Node, Sequence[Want]]


def propagate_wants(view: View, chains: Chains) -> dict[Node, list[Want]]:
    """Collects the wants of all exprs, backwards from the ops that compute on integers.

    Returns:
        node -> the wants of the exprs that read it, in execution order.
    """
    wants: dict[Node, list[Want]] = {}
    summands, weights = find_summands(view, chains), find_weights(view, chains)
    for expr in reversed(view.order):
        want = _want(view, chains, wants, expr)
        if want is not None:
            for node in dict.fromkeys(view.calls[expr].inputs):
                if expr in summands and summands[expr].read is node:
                    continue
                if node in weights and reads_rounded(view, weights, expr):
                    continue
                wants.setdefault(node, []).insert(0, want)
    return wants


def _want(view: View, chains: Chains, wants: Wants, expr: Expr) -> Want | None:
    """Returns the want of ``expr``: its own choice if it computes, the want of its readers if it moves."""
    if expr in chains and chains[expr].head is not expr:
        return None
    if view.on_integers(expr):
        choice = view.choices[expr]
        return Want(expr, plan_of(choice.activation, choice.activation_observer, choice.fakequant), False)
    if not view.carries(expr):
        return None
    plans = distinct(want.plan for node in expr.outputs for want in wants.get(node, ()))
    if len(plans) != 1:
        return None
    partial = not all(_all_want(view, node, wants.get(node, ())) for node in expr.outputs)
    return Want(expr, plans[0], partial)


def _all_want(view: View, node: TensorNode, wants: Sequence[Want]) -> bool:
    """Returns whether every reader of the value of ``node``, moved or not, asks for integers."""
    readers = [want.reader for want in wants if not want.partial]
    calls = ((user, view.calls.get(user)) for user in node.users)
    shape_readers = [user for user, call in calls if call is not None and call.role is Role.SHAPE]
    return view.all_values_read_by(node, [*readers, *shape_readers])
