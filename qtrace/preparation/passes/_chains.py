"""Chains: the ops that a backend computes as one kernel, such as conv, norm and relu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from qtrace.graph.types import Expr, GetAttr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import Plan
from qtrace.preparation.passes._choices import Choice
from qtrace.preparation.passes._view import View, plan_of

__all__ = [
    "Chain",
    "Chains",
    "Summand",
    "find_chains",
    "find_summands",
    "find_weights",
    "output_choice",
    "output_plan",
]


@dataclass(frozen=True)
class Chain:
    """Ops that the backend computes in one kernel.

    Attributes:
        exprs: the ops in execution order; each after the first one is fused into the kernel of the first.
        norm: the BatchNorm of the chain that stays in the graph and is folded whenever it does not train.
    """

    exprs: tuple[Expr, ...]
    norm: Expr | None = None

    @property
    def head(self) -> Expr:
        """The first op: its inputs are the inputs of the kernel."""
        return self.exprs[0]

    @property
    def tail(self) -> Expr:
        """The last op: its result is the result of the kernel."""
        return self.exprs[-1]

    @property
    def output(self) -> TensorNode:
        """The result of the kernel."""
        return self.tail.outputs[0]


Chains: TypeAlias = Mapping[Expr, Chain]


def find_weights(view: View, chains: Chains) -> dict[TensorNode, list[Expr]]:
    """Returns the weights that are rounded -> the layers that round them."""
    layers: dict[TensorNode, list[Expr]] = {}
    for expr in view.order:
        weight = view.calls[expr].weight if expr in view.calls else None
        rounds = expr in chains and chains[expr].head is expr
        if weight is not None and is_float_tensor(weight) and (rounds or view.method(expr)):
            layers.setdefault(weight, []).append(expr)
    return layers


def reads_rounded(view: View, weights: Mapping[TensorNode, list[Expr]], expr: Expr) -> bool:
    """Returns whether ``expr`` reads rounded weights as their layers do, so that each is stored once.

    An op on integers rounds what it reads by itself, and so does a layer that reads the moved weight.
    """
    return not view.on_integers(expr) and weights.keys().isdisjoint(expr.outputs)


def find_chains(view: View) -> dict[Expr, Chain]:
    """Finds the ops that the backend computes in one kernel.

    Returns:
        expr -> its chain, for every op that computes on integers; heads in execution order.
    """
    chains: dict[Expr, Chain] = {}
    for expr in view.order:
        if expr not in chains and view.on_integers(expr):
            chain = _grow(view, expr)
            chains.update(dict.fromkeys(chain.exprs, chain))
    return chains


def _grow(view: View, head: Expr) -> Chain:
    """Builds the chain of ``head`` with the norm and the activation that its kernel computes."""
    call, members, norm = view.calls[head], [head], None
    follower = view.only_user(head)
    if follower is not None and _folds(view, call, view.calls[follower]):
        norm = follower
        members.append(norm)
        follower = view.only_user(norm)
    fused = view.backend.fused.get(call.kind, frozenset())
    if follower is not None and view.calls[follower].kind in fused:
        members.append(follower)
    return Chain(tuple(members), norm)


def _folds(view: View, layer: OpCall, norm: OpCall) -> bool:
    """Returns whether ``norm`` can stay and be folded into ``layer`` whenever it does not train."""
    if norm.role is not Role.NORM or layer.weight is None or owner(norm.expr) is None:
        return False
    plan, axes = view.weight_plan(layer)
    unshared = len(layer.weight.users) == 1 and isinstance(layer.weight.expr, GetAttr)
    return unshared and bool(axes) and plan.scheme.symmetric and plan.scheme.signed


@dataclass(frozen=True)
class Summand:
    """What a sum adds before it is rounded, in the kernel of the layer that gives it.

    Attributes:
        read: the input of the sum.
        result: the result of the layer: the same, or the value from which identities lead to it.
    """

    read: TensorNode
    result: TensorNode


def find_summands(view: View, chains: Chains) -> dict[Expr, Summand]:
    """Finds the results that a sum adds before they are rounded, in the kernel of the layer before it.

    Of two such layers, the kernel of the one that the sum names first has the sum.

    Returns:
        sum -> what it reads unrounded.
    """
    summands: dict[Expr, Summand] = {}
    if not view.backend.added_unrounded:
        return summands
    by_output = {chain.output: chain for chain in chains.values()}
    for expr, chain in chains.items():
        call = view.calls[expr]
        if chain.head is not expr or call.kind != "add" or len(set(call.inputs)) != 2:
            continue
        for node in call.inputs:
            result = _behind_identities(view, node)
            source = by_output.get(result)
            if source is not None and _is_added_unrounded(view, source, call):
                summands[expr] = Summand(node, result)
                break
    return summands


def _behind_identities(view: View, node: TensorNode) -> TensorNode:
    """Returns the node that reaches ``node`` through nothing but identities that nothing else reads."""
    call = view.calls.get(node.expr)
    while call is not None and call.kind == "identity" and len(node.users) == 1 and node not in view.outputs:
        node = call.inputs[0]
        call = view.calls.get(node.expr)
    return node


def _is_added_unrounded(view: View, chain: Chain, total: OpCall) -> bool:
    """Returns whether ``total``, of two inputs of one shape, may add the result of ``chain`` unrounded."""
    node = chain.output
    alone = len(node.users) == 1 and node not in view.outputs
    same = len({tuple(n.shape or ()) for n in total.inputs}) == 1
    able = view.calls[chain.head].kind in view.backend.added_unrounded
    return alone and same and able and output_choice(view, chain).output is None


def output_choice(view: View, chain: Chain) -> Choice:
    """Returns the config's choice for the result of ``chain``: by its last rule for the head or the tail."""
    first, last = view.choices[chain.head], view.choices[chain.tail]
    choice = last if last.rank > first.rank else first
    mixed = view.mixed
    left = chain.output in mixed.results or chain.output in mixed.selecting.results
    if left and choice.output is None:
        return replace(choice, quantize_output=False)
    return choice


def output_plan(view: View, chain: Chain) -> tuple[Plan, bool]:
    """Returns the plan of the result of ``chain``, and whether the config fixes its scheme.

    Consumers that want another scheme than a fixed one round again.
    """
    choice = output_choice(view, chain)
    scheme = choice.output or choice.activation
    return plan_of(scheme, choice.activation_observer, choice.fakequant), choice.output is not None
