"""Chains: the ops that a backend computes as one kernel, such as conv, norm and relu."""

from __future__ import annotations

from qtrace.graph.types import Expr, GetAttr
from qtrace.graph.walk import owner
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import Plan
from qtrace.preparation.passes._view import View, plan_of
from qtrace.preparation.passes.select import Choice

__all__ = ["Chains"]


class Chains:
    """Which ops are computed as one.

    Attributes:
        head: expr -> the first op of its chain, for every op that computes on integers.
        tail: head -> the last op of its chain.
        norm: head -> the BatchNorm that stays in the graph and is folded whenever it does not train.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.head: dict[Expr, Expr] = {}
        self.tail: dict[Expr, Expr] = {}
        self.norm: dict[Expr, Expr] = {}
        for expr in view.order:
            if expr not in self.head and view.on_integers(expr):
                self._grow(expr)

    def _grow(self, expr: Expr) -> None:
        """Lets ``expr`` take the following norm and activation into its kernel."""
        view, call = self.view, self.view.calls[expr]
        self.head[expr] = self.tail[expr] = expr
        follower = view.only_user(expr)
        if follower is not None and self._folds(call, view.calls[follower]):
            self._join(expr, follower)
            self.norm[expr] = follower
            follower = view.only_user(follower)
        fused = view.backend.fused.get(call.kind, frozenset())
        if follower is not None and view.calls[follower].kind in fused:
            self._join(expr, follower)

    def _folds(self, layer: OpCall, norm: OpCall) -> bool:
        """Whether ``norm`` can stay and be folded into ``layer`` whenever it does not train."""
        if norm.role is not Role.NORM or layer.weight is None or owner(norm.expr) is None:
            return False
        plan, axes = self.view.weight_plan(layer)
        alone = len(layer.weight.users) == 1 and isinstance(layer.weight.expr, GetAttr)
        return alone and bool(axes) and plan.scheme.symmetric and plan.scheme.signed

    def _join(self, head: Expr, member: Expr) -> None:
        self.head[member] = head
        self.tail[head] = member

    def interior(self, expr: Expr) -> bool:
        """Whether ``expr`` is fused into another: its input is not a tensor of its own."""
        return expr in self.head and self.head[expr] is not expr

    def input_plan(self, head: Expr) -> Plan:
        """How the inputs of a chain are quantized: as the config says for its first op."""
        choice = self.view.choices[head]
        return plan_of(choice.activation, choice.activation_observer, choice.fakequant)

    def output_choice(self, head: Expr) -> Choice:
        """What the config says about the result of a chain: its last rule for the first or last op."""
        first, last = (self.view.choices[e] for e in (head, self.tail[head]))
        return last if last.rank > first.rank else first

    def output_plan(self, head: Expr) -> tuple[Plan, bool]:
        """How the result is quantized, and whether readers that want something else have to round again."""
        choice = self.output_choice(head)
        scheme = choice.output or choice.activation
        return plan_of(scheme, choice.activation_observer, choice.fakequant), choice.output is not None
