"""Opens the batch of reshapes that hold the example's as a number.

A forward may compute the batch as a Python number, as Swin's window_reverse does by dividing the number of
windows; a trace keeps the number. Traces at two batch sizes show which sizes of a reshape follow the batch:
if it is one of them, the reshape can find it out by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Expr
from megengine.traced_module.traced_module import InternalGraph

__all__ = ["close_reshapes", "open_reshapes"]

Opened = dict[Expr, list[tuple[int, Any]]]
"""Each reshape that was opened, with the sizes that it had."""


def open_reshapes(traced: TracedModule, other: TracedModule) -> Opened:
    """Lets the reshapes of a trace find out the one size in which a trace at another batch size differs.

    Args:
        traced: a trace; changed in place, where every difference is such a size.
        other: a trace of the same module at another batch size.

    Returns:
        The reshapes with the sizes that they had; none if there is another difference.
    """
    found: list[tuple[Expr, dict[int, int]]] = []
    for a, b in _pairs(traced.graph, other.graph, set()):
        constants, others = dict(a.const_val or ()), dict(b.const_val or ())
        if constants.keys() != others.keys():
            return {}
        differing = [leaf for leaf, value in constants.items() if _differs(value, others[leaf])]
        if not differing:
            continue
        sizes = _open(a, b, constants, differing)
        if sizes is None:
            return {}
        found.append((a, sizes))
    before = {expr: list(expr.const_val) for expr, _ in found}
    for expr, sizes in found:
        expr.const_val = [(leaf, sizes.get(leaf, value)) for leaf, value in expr.const_val]
    return before


def close_reshapes(opened: Opened) -> None:
    """Gives reshapes the sizes that they had."""
    for expr, constants in opened.items():
        expr.const_val = constants


def _pairs(old: InternalGraph, new: InternalGraph, seen: set[InternalGraph]) -> Iterator[tuple[Expr, Expr]]:
    """Yields the exprs of two graphs side by side, exprs of submodules once."""
    if old in seen:
        return
    seen.add(old)
    for a, b in zip(old._exprs, new._exprs, strict=False):
        yield a, b
        inner, other = getattr(a, "graph", None), getattr(b, "graph", None)
        if inner is not None and other is not None:
            yield from _pairs(inner, other, seen)


def _differs(value: Any, other: Any) -> bool:
    return type(value) is int and type(other) is int and value != other


def _open(a: Expr, b: Expr, constants: dict[int, Any], differing: list[int]) -> dict[int, int] | None:
    """Returns the new sizes of a reshape by their places among its arguments; None if it cannot be opened."""
    name = a.method if isinstance(a, CallMethod) else a.func.__name__ if isinstance(a, CallFunction) else ""
    shape, other = (tuple(map(int, e.outputs[0].shape)) for e in (a, b))
    if name != "reshape" or len(differing) != 1 or len(shape) != len(other):
        return None
    sizes = {differing[0]: -1}
    for leaf, value in constants.items():
        if value != -1:
            continue
        axis = leaf - 1  # after the tensor itself
        if axis >= len(shape) or shape[axis] != other[axis]:
            return None
        sizes[leaf] = shape[axis]
    return sizes
