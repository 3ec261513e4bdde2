"""Finds the first difference between two runs or two traces of one module."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr
from megengine.traced_module.node import Node
from megengine.traced_module.pytree import tree_flatten
from megengine.traced_module.traced_module import InternalGraph

from qtrace.gradients import plain
from qtrace.graph.source_lines import source_line
from qtrace.graph.walk import module_path, op_label

__all__ = ["TraceDifference", "describe", "first_difference", "output_mismatch", "random_exprs", "values"]

_RTOL = 1e-5  # of the largest value of the output; both sides run the same kernels


def values(result: Any) -> list[Any]:
    """Returns the leaves of a forward's result, tensors as arrays, after every op has run."""
    leaves = tree_flatten(result, is_leaf=lambda _: True)[0]
    return [_plain_leaf(leaf) for leaf in leaves]


def _plain_leaf(leaf: Any) -> Any:
    """Returns a tensor as an array, and an array, which is no tensor of the result, as a list."""
    if isinstance(leaf, Tensor):
        return leaf.numpy()
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def output_mismatch(left: list[Any], right: list[Any]) -> str | None:
    """Describes how ``right`` differs from ``left``, both from ``values``; None if equal. NaN equals NaN.

    ``right`` may lack what is no array: a trace returns only tensors.
    """
    if len(left) != len(right):
        left = [value for value in left if isinstance(value, np.ndarray)]
    if len(left) != len(right):
        return f"it returns {len(right)} values instead of {len(left)}"
    for index, (x, y) in enumerate(zip(left, right, strict=True)):
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            continue
        if x.shape != y.shape:
            return f"output {index} has shape {y.shape} instead of {x.shape}"
        if x.dtype != y.dtype:
            return f"output {index} is {y.dtype} instead of {x.dtype}"
        error = _error(x, y)
        if error is not None:
            return f"output {index} is off by up to {error:.3g}"
    return None


def _error(x: np.ndarray, y: np.ndarray) -> float | None:
    if np.array_equal(x, y):  # nearly always
        return None
    if x.dtype.kind != "f":
        return float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64))))
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return float("inf")
    if not finite.any():
        return None
    x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
    error = float(np.max(np.abs(x - y)))
    return error if error > _RTOL * float(np.max(np.abs(x))) else None


@dataclass(frozen=True)
class TraceDifference:
    """The first expr of a trace that differs from another trace of the same module, with the reason."""

    expr: Expr
    reason: str

    def __str__(self) -> str:
        return f"first at {describe(self.expr)}: {self.reason}"


def describe(expr: Expr) -> str:
    """Describes an expr by its printed form, its op, the module whose forward calls it and its line."""
    printed = " ".join(repr(expr).split())
    if len(printed) > 140:
        printed = printed[:137] + "..."
    path = module_path(expr)
    line = source_line(expr)
    place = (repr(path) if path else "the top module") + (f", {line}" if line else "")
    return f"`{printed}` ({op_label(expr)} in {place})"


def first_difference(old: TracedModule, new: TracedModule) -> TraceDifference | None:
    """Finds the first expr of ``old``, in execution order, that differs from ``new``; None if equal."""
    return _GraphComparison().graphs(old.graph, new.graph)


class _GraphComparison:
    """Walks two graphs side by side and pairs their nodes."""

    def __init__(self) -> None:
        self.pair: dict[Node, Node] = {}
        self.compared: set[tuple[Any, Any]] = set()

    def graphs(self, old: InternalGraph, new: InternalGraph) -> TraceDifference | None:
        if (old, new) in self.compared:
            return None
        self.compared.add((old, new))
        self.bind(old._inputs, new._inputs)
        for a, b in zip_longest(old._exprs, new._exprs):
            if a is None or b is None:
                if a is None:
                    return TraceDifference(_last(old), f"the module goes on with {op_label(b)} there")
                return TraceDifference(a, "the module does not run it there")
            reason = self.reason(a, b)
            if reason:
                return TraceDifference(a, reason)
            inner = (getattr(a, "graph", None), getattr(b, "graph", None))
            if inner[0] is not None and inner[1] is not None:
                deeper = self.graphs(*inner)
                if deeper:
                    return deeper
            self.bind(a.outputs, b.outputs)
        if len(old._outputs) != len(new._outputs):
            return TraceDifference(_last(old), "the module returns another number of values there")
        for x, y in zip(old._outputs, new._outputs, strict=True):
            if self.pair.get(x) is not y:
                return TraceDifference(x.expr, f"the module returns {op_label(y.expr)}'s output there")
        return None

    def bind(self, old: list[Node], new: list[Node]) -> None:
        self.pair.update((x, y) for x, y in zip(old, new, strict=False))

    def reason(self, a: Expr, b: Expr) -> str | None:
        """Returns the reason why ``b`` is not the same step as ``a``; None if it is."""
        if type(a) is not type(b) or _target(a) != _target(b):
            return f"the module runs {op_label(b)} there"
        if isinstance(a, Constant) and isinstance(a.value, Tensor):
            if not _same_value(a.value.numpy(), b.value.numpy()):
                return "it is a constant, but the module computes it from its input"
            return None
        if isinstance(a, Apply) and not _same_value(a.opdef.__getstate__(), b.opdef.__getstate__()):
            return "its settings were computed from the input"
        constants, others = a.const_val or [], b.const_val or []
        for (i, x), (j, y) in zip(constants, others, strict=False):
            if i == j and not _same_value(x, y):
                return f"it holds {_short(x)} where the module has {_short(y)}"
        if len(constants) != len(others) or len(a.inputs) != len(b.inputs):
            return "the module gives it other arguments there"
        if any(self.pair.get(x) is not y for x, y in zip(a.inputs, b.inputs, strict=True)):
            return "the module gives it other values to read there"
        return None


def _last(graph: InternalGraph) -> Expr:
    return graph._exprs[-1] if graph._exprs else graph._outputs[0].expr


def _target(expr: Expr) -> Any:
    if isinstance(expr, GetAttr):
        return expr.name
    if isinstance(expr, CallMethod):
        return expr.method
    if isinstance(expr, CallFunction):
        return plain(expr.func)
    if isinstance(expr, Apply):
        return type(expr.opdef)
    return type(expr.value) if isinstance(expr, Constant) and isinstance(expr.value, Module) else None


def _same_value(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        x, y = np.asarray(x), np.asarray(y)
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    try:
        return bool(x == y or repr(x) == repr(y))  # repr settles NaN
    except (TypeError, ValueError, RuntimeError):
        return repr(x) == repr(y)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."


def random_exprs(traced: TracedModule) -> list[Expr]:
    """Returns the exprs that draw random numbers."""
    random = []
    for expr in traced.graph.exprs():
        name = type(expr.opdef).__name__ if isinstance(expr, Apply) else ""
        if isinstance(expr, CallFunction):
            name = expr.func.__name__ if expr.func.__name__ == "dropout" else ""
        if name.endswith("RNG") or name in ("Dropout", "dropout"):
            random.append(expr)
    return random
