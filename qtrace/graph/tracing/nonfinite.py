"""Finds the first op of a graph that gives NaN or infinity for finite inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.core.ops import builtin
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, Expr
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.source_lines import name_with_line
from qtrace.graph.walk import op_label, owner

__all__ = ["is_meant", "nonfinite_results", "remedy_for"]

_SOFTMAX = (
    "MegEngine's softmax does so on CPU where all values along the axis are below -87.33. Subtract the "
    "largest one first, which gives the same result: F.softmax(x - F.max(x, axis, keepdims=True), axis)"
)
_OTHER_REMEDY = (
    "calibration refuses such values: trace with an example like real data, or limit what the op reads"
)


def nonfinite_results(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Runs ``traced`` once and checks every value.

    Args:
        traced: a traced module.
        args: inputs of the traced module by position.
        kwargs: inputs by name.

    Returns:
        A sentence that names the first op with a NaN or infinite result from finite inputs, its line, and
        the remedy; empty if there is no such op.
    """
    search = _NonfiniteSearch(flatten(traced))
    search.run(*args, **kwargs)
    expr = search.origin
    if expr is None:
        return []
    problem = f"{name_with_line(expr, op_label(expr))} gives {search.kind} for finite inputs on the example"
    return [f"{problem}: {remedy_for(expr) or _OTHER_REMEDY}."]


class _NonfiniteSearch(Interpreter):
    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.origin: Expr | None = None
        self.kind = ""
        self._infinite: set[Node] = set()

    def on_node(self, node: Node, value: Any) -> Any:
        """Records which nodes hold NaN or infinity."""
        if self.origin is None and isinstance(node, TensorNode) and np.dtype(value.dtype).kind == "f":
            array = value.numpy()
            if not np.isfinite(array).all():
                self._infinite.add(node)
                if self._is_origin(node.expr):
                    self.origin = node.expr
                    self.kind = "NaN" if np.isnan(array).any() else "infinity"
        return value

    def _is_origin(self, expr: Expr) -> bool:
        read: Sequence[Node] = [n for n in expr.inputs if isinstance(n, TensorNode)]
        return bool(read) and not is_meant(expr) and not any(n in self._infinite for n in read)


def is_meant(expr: Expr) -> bool:
    """Returns whether NaN or infinity is an argument of ``expr``, such as ``F.where(mask, x, -inf)``."""
    return any(isinstance(v, float) and not math.isfinite(v) for _, v in expr.const_val or ())


def remedy_for(expr: Expr) -> str:
    """Returns the remedy for an op that gives NaN for finite inputs; "" if there is no specific one."""
    if isinstance(expr, CallFunction):
        softmax = expr.func is F.softmax
    else:
        softmax = isinstance(expr, Apply) and isinstance(expr.opdef, builtin.Softmax)
    return _SOFTMAX if softmax or isinstance(owner(expr), M.Softmax) else ""
