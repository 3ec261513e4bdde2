"""Which nodes depend on the values of a graph's inputs: shape math is told from data by this alone."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Apply, CallFunction, Expr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, tensor_inputs

__all__ = ["static_nodes"]

_LIKE = (F.zeros_like, F.ones_like, F.full_like)


def static_nodes(traced: TracedModule) -> set[int]:
    """The ids of the tensor nodes that do not depend on the values of the graph's inputs.

    They depend on parameters, constants and shapes only: ``reshape(self.table)``, or the places of anchors
    that are made by ``arange`` over ``x.shape``. Reading the shape of a tensor is not reading its values.

    Args:
        traced: a flat traced module.
    """
    found: set[int] = set()
    for expr in exprs(traced):
        if all(id(n) in found for n in _values_read(expr)):
            found.update(id(n) for n in expr.outputs if isinstance(n, TensorNode))
    return found


def _values_read(expr: Expr) -> list[TensorNode]:
    """The tensor nodes whose values, not only shapes, ``expr`` reads."""
    if isinstance(expr, Apply) and str(expr.opdef) == "GetVarShape":
        return []
    nodes = tensor_inputs(expr)
    if isinstance(expr, CallFunction) and expr.func in _LIKE:
        return [n for n in nodes if n is not expr.args[0]]
    return nodes
