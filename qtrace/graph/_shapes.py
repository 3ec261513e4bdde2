"""Shapes of a graph that was inlined for a call of other sizes than those it was traced with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megengine as mge
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module.expr import CallFunction, Constant, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode

__all__ = ["differ", "refresh"]

# The sizes of their results come from values, which zeros do not have.
_SIZED_BY_VALUES = ("cond_take", "nms", "non_zero")


def differ(left: Iterable[Node], right: Iterable[Node]) -> bool:
    """Whether any two tensors of the pairs were traced with different shapes."""
    pairs = zip(left, right, strict=True)
    return any(isinstance(x, TensorNode) and _shape(x) != _shape(y) for x, y in pairs)


def refresh(exprs: Sequence[Expr], attribute: Callable[[str], Any], root: Node) -> None:
    """Notes the shapes and dtypes that the results of ``exprs`` have, by running them on zeros.

    A module that is called twice has one graph, whose nodes know the shapes of the first call. Where zeros
    cannot tell, because a size depends on values, the nodes keep what they have.

    Args:
        exprs: of a flat graph, in order; shapes of what they read from before are right.
        attribute: the module or tensor at a dotted path.
        root: the node of the top module.
    """
    if not all(_runs_on_zeros(e) for e in exprs):
        return
    level, mge.config.async_level = mge.config.async_level, 0  # an error must come where it is caught
    try:
        found = _run(exprs, attribute, root)
    except Exception:  # an op that does not take zeros
        return
    finally:
        mge.config.async_level = level
    for node, (shape, dtype) in found.items():
        node._shape, node._dtype = shape, dtype


def _run(
    exprs: Sequence[Expr], attribute: Callable[[str], Any], root: Node
) -> dict[TensorNode, tuple[tuple[int, ...], Any]]:
    last = {node: index for index, expr in enumerate(exprs) for node in expr.inputs}
    values: dict[Node, Any] = {root: attribute("")}
    found: dict[TensorNode, tuple[tuple[int, ...], Any]] = {}
    for index, expr in enumerate(exprs):
        inputs = [values[n] if n in values else _stand_in(n, attribute) for n in expr.inputs]
        for node, value in zip(expr.outputs, expr.interpret(*inputs) or (), strict=True):
            values[node] = value
            _check_evaluates(value)
            if isinstance(value, RawTensor) and isinstance(node, TensorNode):
                found[node] = (tuple(int(n) for n in value.shape), value.dtype)
        for node in expr.inputs:
            if last[node] == index and node is not root:
                values.pop(node, None)
    return found


def _stand_in(node: Node, attribute: Callable[[str], Any]) -> Any:
    """What ``node`` gets or holds, or zeros in its place."""
    if isinstance(node.expr, Constant):
        return node.expr.value
    if isinstance(node.expr, GetAttr):
        value = attribute(node.expr.name)
        _check_evaluates(value)
        return value
    if np.dtype(node.dtype).kind != "f":
        raise ValueError("numbers that may be sizes")
    return mge.Tensor(np.zeros(_shape(node) or (), np.float32)).astype(node.dtype)


def _check_evaluates(value: Any) -> None:
    if isinstance(value, Module) and value.training:
        raise ValueError("it would change its statistics")


def _runs_on_zeros(expr: Expr) -> bool:
    if isinstance(expr, CallFunction) and expr.func.__name__ in _SIZED_BY_VALUES:
        return False
    return not any(isinstance(n, TensorNode) and np.dtype(n.dtype) == np.bool_ for n in expr.inputs)


def _shape(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node, "shape", None)
    return None if shape is None else tuple(int(n) for n in shape)
