"""The origin of NaN and infinity: the first op on the way to a value that holds them.

Both may be meant: -inf in a mask, NaN for "no value". An argument, a parameter or an input holds them then,
and ops move, select, ask for them or calculate on them.
"""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.core.ops import builtin
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, Constant, Expr, GetAttr, is_call_module
from megengine.traced_module.node import Node, TensorNode

from qtrace.gradients import plain
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.notes import name_with_line
from qtrace.graph.walk import op_label, owner, reads_shape, tensor_inputs

_SOFTMAX = (
    "MegEngine's softmax does so on CPU where all values along the axis are below -87.33. Subtract the "
    "largest one first, which gives the same result: F.softmax(x - F.max(x, axis, keepdims=True), axis)"
)
SWALLOWS_NAN = (
    "gives numbers for NaN in MegEngine on CPU, and NaN in other runtimes: call it before NaN is put in"
)
"""What is wrong with an op of MegEngine's that makes numbers of NaN, as the end of a sentence."""
_OTHER_REMEDY = (
    "calibration refuses such values: trace with an example like real data, or limit what the op reads"
)


class NonfiniteSearch(Interpreter):
    """Runs a flat graph and follows NaN and infinity from the expr that produced them first.

    Args:
        traced: the graph, in the phase to examine.

    Attributes:
        origins: node that holds NaN or infinity -> the expr that produced them first, in graph order; None
            if they are meant.
        nan: node that holds NaN -> the number of its values that are NaN.
    """

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.origins: dict[Node, Expr | None] = {}
        self.nan: dict[Node, int] = {}

    @property
    def origin(self) -> Expr | None:
        """The first expr that produced NaN or infinity that is not meant; None if there is none."""
        return next(filter(None, self.origins.values()), None)

    def on_node(self, node: Node, value: Any) -> Any:
        """Finds the origin of a value that is not finite."""
        if isinstance(node, TensorNode) and np.dtype(value.dtype).kind == "f":
            array = value.numpy()
            if not np.isfinite(array).all():
                if count := int(np.isnan(array).sum()):
                    self.nan[node] = count
                self.origins[node] = self._origin(node)
        return value

    def _origin(self, node: Node) -> Expr | None:
        expr = node.expr
        tensors = [n for n in expr.inputs if isinstance(n, TensorNode)]
        before = [self.origins[n] for n in tensors if n in self.origins]
        if earlier := next(filter(None, before), None):
            return earlier
        if not tensors or any(isinstance(v, float) and not math.isfinite(v) for _, v in expr.const_val or ()):
            return None
        if node not in self.nan:
            return None if before else expr
        own = (GetAttr, Constant)  # a layer that reads NaN as a parameter of its own makes NaN
        meant = (not isinstance(n.expr, own) or self._keeps_nan(expr) for n in tensors if n in self.nan)
        return None if any(meant) else expr

    def calculates_with_nan(self) -> bool:
        """Returns whether an op made anything else of NaN than NaN at the same places."""
        readers = [expr for node in self.nan for expr in node.users]
        return self.origin is not None or not all(map(self._keeps_nan, readers))

    @property
    def swallowing(self) -> Expr | None:
        """The first function of one tensor that gives numbers for NaN of the tensor; None without one."""
        for node, count in self.nan.items():
            for expr in node.users:
                counts = [self.nan.get(n, 0) for n in expr.outputs if _alike(n, node)]
                called = isinstance(expr, CallFunction) or is_call_module(expr) or _is_elementwise(expr)
                if called and len(tensor_inputs(expr)) == 1 and counts and min(counts) < count:
                    return expr
        return None

    def _keeps_nan(self, expr: Expr) -> bool:
        """Returns whether ``expr`` moves NaN, selects other values, asks for it, or gives it in place."""
        read = [self.nan.get(node, 0) for node in expr.inputs]
        counts = [self.nan.get(node, 0) for node in expr.outputs]
        if is_call_module(expr):
            return False
        if len(read) == 2 and expr.inputs[0] is expr.inputs[1] and not any(counts):  # x == x
            return True
        if isinstance(expr, CallFunction):
            kind = plain(expr.func).__module__.rpartition(".")[-1]
            activation = kind == "nn" and read == counts
            return (
                expr.func is F.isnan or kind == "tensor" or activation or (kind == "elemwise" and all(counts))
            )
        if isinstance(expr, Apply):
            return reads_shape(expr) or (_is_elementwise(expr) and all(counts))
        return expr.method in ("__getitem__", "__setitem__") or all(counts)


def _is_elementwise(expr: Expr) -> bool:
    return isinstance(expr, Apply) and isinstance(expr.opdef, builtin.Elemwise)


def _alike(result: Node, node: Node) -> bool:
    return isinstance(result, TensorNode) and (result.shape, result.dtype) == (node.shape, node.dtype)


def search_nonfinite(traced: TracedModule, args: Any, kwargs: Any) -> NonfiniteSearch:
    """Runs a flat graph on the arguments of its forward, and returns where NaN and infinity come from."""
    search = NonfiniteSearch(traced)
    search.run(*args, **kwargs)
    return search


def nonfinite_results(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Runs ``traced`` once and checks every value.

    Args:
        traced: a traced module.
        args: inputs of the traced module by position.
        kwargs: inputs by name.

    Returns:
        A sentence that names the first op with a NaN or infinite result from finite inputs, its line, and
        the remedy. Without such an op, a sentence that names the first one that gives numbers for NaN that is
        meant; empty if there is none.
    """
    search = search_nonfinite(flatten(traced), args, kwargs)
    expr = search.origin
    if expr is None:
        reader = search.swallowing
        return [] if reader is None else [f"{name_with_line(reader, op_label(reader))} {SWALLOWS_NAN}."]
    kind = "NaN" if any(node in search.nan for node in expr.outputs) else "infinity"
    problem = f"{name_with_line(expr, op_label(expr))} gives {kind} for finite inputs on the example"
    return [f"{problem}: {remedy_for(expr) or _OTHER_REMEDY}."]


def remedy_for(expr: Expr) -> str:
    """Returns the remedy for an op that gives NaN for finite inputs; "" if there is no specific one."""
    if isinstance(expr, CallFunction):
        softmax = expr.func is F.softmax
    else:
        softmax = isinstance(expr, Apply) and isinstance(expr.opdef, builtin.Softmax)
    return _SOFTMAX if softmax or isinstance(owner(expr), M.Softmax) else ""
