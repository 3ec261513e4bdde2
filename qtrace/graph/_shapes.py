"""Shapes of a submodule's tensors at each of its calls.

A traced submodule has one graph however often it is called, and the nodes of that graph record the shapes of
the first call. `flatten` writes the exprs once for each call; this module gives each copy the shapes of its
own call by running its exprs on zeros. A shape that zeros cannot show, because it depends on values, becomes
None ("unknown"): exporters refuse such a node, while a shape of another call would give a wrong file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megengine as mge
import numpy as np
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.engine import quiet_engine
from qtrace.graph.interpreter import interpret
from qtrace.graph.walk import get_module, reads_shape, updates_inputs

__all__ = ["Call", "needs_own_shapes", "record_shapes", "zeros_show_shapes"]

# Ops whose number of results depends on the values of their inputs.
_SIZED_BY_VALUES = {"cond_take", "nms", "non_zero", "CondTake", "NMSKeep", "NonZero"}
# Ops whose result has the same shape for all values of their integer and boolean inputs, like the operators
# of Python (`_is_operator`).
_ELEMENTWISE = {
    *("Elemwise", "TypeCvt", "astype", "gather", "where", "logical_and", "logical_or", "logical_not"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "maximum", "minimum"),
}
_NO_OPERATORS = {"__getitem__", "__setitem__", "__call__", "__new__"}


@dataclass(frozen=True)
class Call:
    """A call of a submodule, written into a flat graph with the shapes of another call.

    Attributes:
        start: position of the call's first expr in the flat graph.
        stop: position after the call's last expr.
        outputs: the call's results in the flat graph.
        recorded: the call's results in the caller's graph, which have the right shapes.
    """

    start: int
    stop: int
    outputs: Sequence[Node]
    recorded: Sequence[Node]


@dataclass(frozen=True)
class _KnownValue:
    """The value of a node when the graph runs on zeros.

    Attributes:
        value: a tensor or a module.
        exact: whether every input of the graph gives this value; False where zeros stand for activations.
    """

    value: Any
    exact: bool


def needs_own_shapes(recorded: Sequence[Node], arguments: Sequence[Node], again: bool) -> bool:
    """Returns whether a call's tensors may have other shapes than its submodule's graph records.

    Args:
        recorded: the inputs of the submodule's graph, as recorded by the first call.
        arguments: the arguments of this call, in the same order.
        again: whether the submodule was called before; an integer tensor may then hold another size.
    """
    for parameter, argument in zip(recorded, arguments, strict=True):
        if isinstance(argument, TensorNode):
            if _shape(parameter) != _shape(argument) or parameter.dtype != argument.dtype:
                return True
            if again and np.dtype(argument.dtype).kind in "iub":
                return True
    return False


def record_shapes(traced: TracedModule, calls: Sequence[Call]) -> None:
    """Writes the shapes and dtypes of the tensors of ``calls``, in time linear in their exprs.

    Args:
        traced: a flat traced module; its modules do not change.
        calls: calls of submodules in the order of the graph, none inside of another.
    """
    if not calls:
        return
    with quiet_engine(traced):
        for call in calls:
            _ZeroRun(traced, traced.graph._exprs[call.start : call.stop]).run()
            for node, recorded in zip(call.outputs, call.recorded, strict=True):
                if isinstance(node, TensorNode) and isinstance(recorded, TensorNode):
                    node._shape, node._dtype = recorded._shape, recorded._dtype


class _ZeroRun:
    """Runs consecutive exprs of a flat graph on zeros in the place of the activations that they read."""

    def __init__(self, traced: TracedModule, exprs: Sequence[Expr]) -> None:
        self.traced = traced
        self.exprs = exprs
        self.values: dict[Node, _KnownValue | None] = {}  # None: unknown
        self.frees: dict[Expr, list[Node]] = {}
        last = {node: expr for expr in exprs for node in expr.inputs}
        for node, expr in last.items():
            self.frees.setdefault(expr, []).append(node)

    def run(self) -> None:
        """Writes the shape and dtype of every result; the shape is None if zeros cannot show it."""
        for expr in self.exprs:
            results = self._compute(expr)
            for node, result in zip(expr.outputs, results, strict=True):
                self.values[node] = result
                if not isinstance(node, TensorNode):
                    continue
                if result is None:
                    node._shape = None
                else:
                    node._shape = tuple(int(n) for n in result.value.shape)
                    node._dtype = result.value.dtype
            for node in self.frees.get(expr, ()):
                self.values.pop(node, None)

    def _compute(self, expr: Expr) -> Sequence[_KnownValue | None]:
        unknown = [None] * len(expr.outputs)
        if isinstance(expr, GetAttr):
            return [self._attribute(expr)]
        if isinstance(expr, Constant):
            return [_KnownValue(expr.value, True)]
        inputs = [self._value(node) for node in expr.inputs]
        if any(value is None for value in inputs):
            return unknown
        known = [value for value in inputs if value is not None]
        zeros = [value.value for value in known if not value.exact]
        if updates_inputs(expr) or not zeros_show_shapes(expr, zeros):
            return unknown
        try:
            results = interpret(expr, [value.value for value in known]) or ()
        except Exception:  # a kernel that does not take zeros: MegEngine's errors have no class of their own
            return unknown
        exact = reads_shape(expr) or all(value.exact for value in known)
        return [_KnownValue(result, exact) for result in results]

    def _value(self, node: Node) -> _KnownValue | None:
        if node not in self.values:
            self.values[node] = self._outer_value(node)
        return self.values[node]

    def _outer_value(self, node: Node) -> _KnownValue | None:
        """Returns the value of a node before the exprs; computes integers, since they may be sizes."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self.values:
                pending.pop()
                continue
            expr = current.expr
            if current is self.traced.graph._inputs[0]:
                self.values[current] = _KnownValue(self.traced, True)
            elif isinstance(expr, (Input, GetAttr, Constant)) or not _is_integer(current):
                self.values[current] = self._source_value(current)
            else:
                missing = [n for n in expr.inputs if n not in self.values]
                if missing:
                    pending.extend(missing)
                    continue
                self.values.update(zip(expr.outputs, self._compute(expr), strict=True))
        return self.values[node]

    def _source_value(self, node: Node) -> _KnownValue | None:
        """Returns a parameter, a constant or a module; zeros for an activation."""
        if isinstance(node.expr, Constant):
            return _KnownValue(node.expr.value, True)
        if isinstance(node.expr, GetAttr):
            return self._attribute(node.expr)
        shape = _shape(node)
        return None if shape is None else _KnownValue(_zeros(shape, node.dtype), False)

    def _attribute(self, expr: GetAttr) -> _KnownValue:
        return _KnownValue(get_module(self.traced, expr.name), True)


def _zeros(shape: tuple[int, ...], dtype: Any) -> mge.Tensor:
    kind = np.dtype(dtype)
    if kind.kind in "iub":
        return mge.Tensor(np.zeros(shape, kind))
    return mge.Tensor(np.zeros(shape, np.float32)).astype(dtype)


def zeros_show_shapes(expr: Expr, zeros: Sequence[Any]) -> bool:
    """Returns whether zeros in the place of the activations give the results of ``expr`` their true shapes.

    Args:
        expr: a call.
        zeros: the activations that ``expr`` reads: Tensors, or other objects with a dtype.
    """
    name = _name(expr)
    if name in _SIZED_BY_VALUES and zeros:
        return False
    if name in _ELEMENTWISE or _is_operator(expr):
        return True
    return reads_shape(expr) or not any(_holds_integers(value) for value in zeros)


def _name(expr: Expr) -> str:
    if isinstance(expr, CallFunction):
        return str(expr.func.__name__)
    if isinstance(expr, Apply):
        return type(expr.opdef).__name__
    return str(expr.method) if isinstance(expr, CallMethod) else ""


def _is_operator(expr: Expr) -> bool:
    """Returns whether ``expr`` is an operator of Python between values, such as ``x < y``."""
    return isinstance(expr, CallMethod) and expr.method.startswith("__") and expr.method not in _NO_OPERATORS


def _holds_integers(value: Any) -> bool:
    return hasattr(value, "dtype") and np.dtype(value.dtype).kind in "iub"


def _is_integer(node: Node) -> bool:
    return isinstance(node, TensorNode) and node.dtype is not None and np.dtype(node.dtype).kind in "iub"


def _shape(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node, "shape", None)
    return None if shape is None else tuple(int(n) for n in shape)
