"""Requests: the parameters that the readers of a tensor ask for, seen through ops that only move values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from qtrace.graph.types import Expr, Node, TensorNode
from qtrace.ops import Role
from qtrace.preparation.annotation import Plan
from qtrace.preparation.passes._chains import Chains, find_summands, find_weights, reads_rounded
from qtrace.preparation.passes._view import View, distinct, plan_of

__all__ = ["Request", "Requests", "propagate_requests"]


class Request(NamedTuple):
    """The parameters that an expr asks for at its inputs.

    Attributes:
        reader: the expr.
        plan: the plan that the expr asks for.
        partial: whether the expr moves values and some reader of the moved value wants it in float.
    """

    reader: Expr
    plan: Plan
    partial: bool


Requests: TypeAlias = Mapping[Node, Sequence[Request]]


def propagate_requests(view: View, chains: Chains) -> dict[Node, list[Request]]:
    """Collects the requests of all exprs, backwards from the ops that compute on integers.

    Returns:
        node -> the requests of the exprs that read it, in execution order.
    """
    requests: dict[Node, list[Request]] = {}
    summands, weights = find_summands(view, chains), find_weights(view, chains)
    for expr in reversed(view.order):
        request = _request(view, chains, requests, expr)
        if request is not None:
            for node in dict.fromkeys(view.calls[expr].inputs):
                if expr in summands and summands[expr].read is node:
                    continue
                if node in weights and reads_rounded(view, weights, expr):
                    continue
                requests.setdefault(node, []).insert(0, request)
    return requests


def _request(view: View, chains: Chains, requests: Requests, expr: Expr) -> Request | None:
    """Returns what ``expr`` requests: its own choice if it computes, its readers' request if it moves."""
    if expr in chains and chains[expr].head is not expr:
        return None
    if view.on_integers(expr):
        choice = view.choices[expr]
        return Request(expr, plan_of(choice.activation, choice.activation_observer, choice.fakequant), False)
    if not view.carries(expr):
        return None
    plans = distinct(request.plan for node in expr.outputs for request in requests.get(node, ()))
    if len(plans) != 1:
        return None
    partial = not all(_all_request(view, node, requests.get(node, ())) for node in expr.outputs)
    return Request(expr, plans[0], partial)


def _all_request(view: View, node: TensorNode, requests: Sequence[Request]) -> bool:
    """Returns whether every reader of the value of ``node``, moved or not, asks for integers."""
    readers = [request.reader for request in requests if not request.partial]
    calls = ((user, view.calls.get(user)) for user in node.users)
    shape_readers = [user for user, call in calls if call is not None and call.role is Role.SHAPE]
    return view.all_values_read_by(node, [*readers, *shape_readers])
