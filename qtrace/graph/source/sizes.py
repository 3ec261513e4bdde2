"""Which shapes a source reads as ``x.shape``: a Tensor when the source is traced, a tuple when it runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import megengine.functional as F
from megengine.traced_module.traced_module import InternalGraph

from qtrace.gradients import plain
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, Node, TensorNode
from qtrace.graph.walk import owner, reads_shape

__all__ = ["find_plain_shapes"]

_ALL_AXES = 7  # the axis of a GetVarShape that reads the whole shape
# They give the same number for numbers as for Tensors of int32.
_ARITHMETIC = frozenset(
    ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__neg__")
)
# Function -> its arguments that may be a number as well as a Tensor.
_TAKES_SIZES = {
    F.reshape: ("target_shape",),
    F.broadcast_to: ("shape",),
    F.full: ("shape",),
    F.zeros: ("shape",),
    F.ones: ("shape",),
    F.arange: ("start", "stop", "step"),
    F.vision.interpolate: ("size",),
}


def find_plain_shapes(graph: InternalGraph) -> set[Node]:
    """Finds the shapes that ``x.shape`` stands for, whether the source is traced or run.

    All that reads such a shape, or a size computed from it, takes numbers as well as Tensors. The others are
    Tensors in either case: ops compute with them, or the graph returns them.

    Args:
        graph: a graph of a traced module.

    Returns:
        The nodes of these shapes.
    """
    candidates = _find_candidates(graph)
    plain_nodes: set[Node] = set()
    for expr in reversed(graph._exprs):
        for node in expr.outputs or ():
            if node not in candidates or node in graph._outputs:
                continue
            if all(_takes(user, node, candidates, plain_nodes) for user in node.users):
                plain_nodes.add(node)
    return {expr.outputs[0] for expr in graph._exprs if _is_whole_shape(expr)} & plain_nodes


def _find_candidates(graph: InternalGraph) -> set[Node]:
    """Finds the nodes that are a tuple or a number if shapes are tuples, whoever reads them."""
    shapes: set[Node] = set()
    sizes: set[Node] = set()
    for expr in graph._exprs:
        if _is_whole_shape(expr):
            shapes.add(expr.outputs[0])
        elif isinstance(expr, CallMethod) and expr.outputs and not expr.kwargs:
            if expr.method == "__getitem__" and expr.args[0] in shapes:
                index = expr.args[1]
                if type(index) is int:
                    sizes.add(expr.outputs[0])
                elif isinstance(index, slice) and not any(_nodes(index)):
                    shapes.add(expr.outputs[0])
            elif expr.method in _ARITHMETIC and all(type(a) is int or a in sizes for a in expr.args):
                sizes.add(expr.outputs[0])
    return shapes | sizes


def _is_whole_shape(expr: Expr) -> bool:
    """Whether an expr is the shape of a tensor that has axes: ``shape`` of another is a tuple, always."""
    if not isinstance(expr, Apply) or not reads_shape(expr):
        return False
    (node,) = expr.inputs
    axis = expr.opdef.__getstate__().get("axis", _ALL_AXES)
    return axis == _ALL_AXES and isinstance(node, TensorNode) and bool(node.shape)


def _takes(user: Expr, node: Node, candidates: set[Node], plain_nodes: set[Node]) -> bool:
    """Whether a reader of a size takes a number as well as a Tensor."""
    if user.outputs and user.outputs[0] in candidates:
        return user.outputs[0] in plain_nodes
    if isinstance(user, CallMethod) and owner(user) is None and not isinstance(user.args[0], type):
        if user.method == "__getitem__":  # a Tensor as an index takes the place of a number and of an axis
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            return user.args[0] is not node and not any(node is each for each in index)
        return user.method == "reshape" and user.args[0] is not node
    if isinstance(user, CallFunction):
        function = plain(user.func)
        names = _TAKES_SIZES.get(function, ())
        arguments = inspect.signature(function).bind(*user.args, **user.kwargs).arguments if names else {}
        others = (value for name, value in arguments.items() if name not in names)
        return bool(names) and not any(node is each for value in others for each in _nodes(value))
    return False


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, slice):
        yield from _nodes((value.start, value.stop, value.step))
    elif isinstance(value, dict):
        yield from _nodes(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _nodes(each)
