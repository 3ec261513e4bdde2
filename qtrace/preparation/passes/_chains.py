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
        head: id of expr -> the first op of its chain, for every op that computes on integers.
        tail: id of a head -> the last op of its chain.
        norm: id of a head -> the BatchNorm that stays in the graph and is folded whenever it does not train.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.head: dict[int, Expr] = {}
        self.tail: dict[int, Expr] = {}
        self.norm: dict[int, Expr] = {}
        for expr in view.order:
            if id(expr) not in self.head and view.on_integers(expr):
                self._grow(expr)

    def _grow(self, expr: Expr) -> None:
        """Lets ``expr`` take the following norm and activation into its kernel."""
        view, call = self.view, self.view.calls[id(expr)]
        self.head[id(expr)] = self.tail[id(expr)] = expr
        follower = view.only_user(expr)
        if follower is not None and self._folds(call, view.calls[id(follower)]):
            self._join(expr, follower)
            self.norm[id(expr)] = follower
            follower = view.only_user(follower)
        fused = view.backend.fused.get(call.kind, frozenset())
        if follower is not None and view.calls[id(follower)].kind in fused:
            self._join(expr, follower)

    def _folds(self, layer: OpCall, norm: OpCall) -> bool:
        """Whether ``norm`` can stay and be folded into ``layer`` whenever it does not train."""
        if norm.role is not Role.NORM or layer.weight is None or owner(norm.expr) is None:
            return False
        plan, axes = self.view.weight_plan(layer)
        alone = len(layer.weight.users) == 1 and isinstance(layer.weight.expr, GetAttr)
        return alone and bool(axes) and plan.scheme.symmetric and plan.scheme.signed

    def _join(self, head: Expr, member: Expr) -> None:
        self.head[id(member)] = head
        self.tail[id(head)] = member

    def interior(self, expr: Expr) -> bool:
        """Whether ``expr`` is fused into another: its input is not a tensor of its own."""
        return id(expr) in self.head and self.head[id(expr)] is not expr

    def input_plan(self, head: Expr) -> Plan:
        """How the inputs of a chain are quantized: as the config says for its first op."""
        choice = self.view.choices[id(head)]
        return plan_of(choice.activation, choice.activation_observer, choice.fakequant)

    def output_choice(self, head: Expr) -> Choice:
        """What the config says about the result of a chain: its last rule for the first or last op."""
        first, last = (self.view.choices[id(e)] for e in (head, self.tail[id(head)]))
        return last if last.rank > first.rank else first

    def output_plan(self, head: Expr) -> tuple[Plan, bool]:
        """How the result is quantized, and whether readers that want something else have to round again."""
        choice = self.output_choice(head)
        scheme = choice.output or choice.activation
        return plan_of(scheme, choice.activation_observer, choice.fakequant), choice.output is not None
