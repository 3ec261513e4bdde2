"""The first op of a graph that gives NaN or infinity although all that it reads is finite."""

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
_OTHERS = "calibration refuses such values: trace with an example like real data, or limit what the op reads"


def nonfinite_results(traced: TracedModule, args: tuple[Any, ...]) -> list[str]:
    """Runs ``traced`` once and looks at every value.

    Args:
        traced: a traced module.
        args: inputs.

    Returns:
        A sentence that names the first op with a NaN or infinite result from finite inputs, its line, and
        the remedy; empty where there is none.
    """
    search = _NonfiniteSearch(flatten(traced))
    search.run(*args)
    expr = search.found
    if expr is None:
        return []
    gives = f"{name_with_line(expr, op_label(expr))} gives {search.what} for finite inputs on the example"
    return [f"{gives}: {remedy_for(expr) or _OTHERS}."]


class _NonfiniteSearch(Interpreter):
    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.found: Expr | None = None
        self.what = ""
        self._infinite: set[Node] = set()

    def on_node(self, node: Node, value: Any) -> Any:
        """Remembers which nodes hold NaN or infinity."""
        if self.found is None and isinstance(node, TensorNode) and np.dtype(value.dtype).kind == "f":
            array = value.numpy()
            if not np.isfinite(array).all():
                self._infinite.add(node)
                if self._is_origin(node.expr):
                    self.found = node.expr
                    self.what = "NaN" if np.isnan(array).any() else "infinity"
        return value

    def _is_origin(self, expr: Expr) -> bool:
        read: Sequence[Node] = [n for n in expr.inputs if isinstance(n, TensorNode)]
        return bool(read) and not is_meant(expr) and not any(n in self._infinite for n in read)


def is_meant(expr: Expr) -> bool:
    """Whether ``expr`` has NaN or infinity among its arguments, such as ``F.where(mask, x, -inf)``."""
    return any(isinstance(v, float) and not math.isfinite(v) for _, v in expr.const_val or ())


def remedy_for(expr: Expr) -> str:
    """What to do about an op that gives NaN for finite inputs; "" where it depends on the op."""
    if isinstance(expr, CallFunction):
        softmax = expr.func is F.softmax
    else:
        softmax = isinstance(expr, Apply) and isinstance(expr.opdef, builtin.Softmax)
    return _SOFTMAX if softmax or isinstance(owner(expr), M.Softmax) else ""
