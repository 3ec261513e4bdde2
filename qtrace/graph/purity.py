"""Exprs that give the same result for the same inputs, and change nothing."""

from __future__ import annotations

from megengine.module import Module
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr
from megengine.traced_module.node import Node

from qtrace.gradients import plain
from qtrace.graph.walk import op_label, owner, updates_inputs, writes_into

__all__ = ["find_written", "is_pure"]

_RANDOM = (
    "uniform",
    "normal",
    "gamma",
    "beta",
    "poisson",
    "permutation",
    "shuffle",
    "dropout",
    "multinomial",
)


def is_pure(expr: Expr) -> bool:
    """Returns whether ``expr`` depends only on its inputs and acts on nothing but its outputs.

    A function or a module of a class of the user's own is not known to be pure, nor is a module in training.
    A method that writes into its tensor is not.
    """
    if isinstance(expr, (GetAttr, Constant)):
        return True
    if expr._disable_remove or not expr.outputs or updates_inputs(expr) or _is_random(expr):
        return False
    module = owner(expr)
    if module is not None:
        return _is_plain(module)
    if isinstance(expr, CallMethod):
        return not writes_into(expr)
    if isinstance(expr, CallFunction):
        return str(plain(expr.func).__module__).startswith(("megengine", "qtrace"))
    return isinstance(expr, Apply)


def find_written(order: list[Expr]) -> set[Node]:
    """Returns the nodes whose tensors a later expr writes into."""
    return {e.inputs[0] for e in order if isinstance(e, CallMethod) and writes_into(e)}


def _is_random(expr: Expr) -> bool:
    label = op_label(expr).rpartition(".")[2].lower()
    return label.endswith("rng") or label in _RANDOM


def _is_plain(module: Module) -> bool:
    """Returns whether ``module`` is one of MegEngine's own in evaluation."""
    return type(module).__module__.startswith("megengine.module") and not module.training
