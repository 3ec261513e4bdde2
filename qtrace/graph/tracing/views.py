"""Rules about views: the ops and gradients that give them, and the kernels that misread them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Expr, is_call_module
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.arguments import signature

__all__ = [
    "broadcasts_first_axes",
    "gives_view",
    "is_arithmetic",
    "is_product",
    "kernel_name",
    "reads_only_shape",
    "refuses_views",
    "returns_views",
]

_PRODUCTS = {"mul", "div", "truediv", "pow", "MUL", "TRUE_DIV", "POW"}
_ARITHMETIC = {"add", "sub", "maximum", "minimum", "ADD", "SUB", "MAX", "MIN", *_PRODUCTS}
_ARITHMETIC |= {"FUSE_ADD_RELU", "FUSE_ADD_H_SWISH", "FUSE_MUL_ADD3"}
# Ops whose result is a view if their input is one. Some copy at times: one copy more does no harm.
_KEEPS_LAYOUT = {"reshape", "Reshape", "flatten", "expand_dims", "AddAxis", "squeeze", "RemoveAxis"}
_KEEPS_LAYOUT |= {"transpose", "Dimshuffle", "swapaxes", "roll"}
_KEEPS_LAYOUT |= {
    "copy",
    "Copy",
    "detach",
    "Identity",
    "Dropout",
    "dropout",
    "__pos__",
    "to",
    "astype",
    "TypeCvt",
}
_NORMS = {"layer_norm", "LayerNorm"}
# Kernels that assert that their first input is contiguous.
_CONTIGUOUS = {"max_pool2d", "avg_pool2d", "MaxPool2d", "AvgPool2d", "Pooling", "roi_align", "ROIAlign"}
_CONTIGUOUS |= {"conv_transpose2d", "conv_transpose3d", "ConvTranspose2d", "ConvTranspose3d"}
_CONTIGUOUS |= {"ConvTransposeRelu2d", "ConvTransposeBn2d", "ConvTransposeBnRelu2d"}
_CONTIGUOUS |= {"ConvolutionBackwardData", "Convolution3DBackwardData"}
_REPEATS = {"broadcast_to", "_broadcast", "Broadcast", "repeat", "tile"}
_SUMS = {"sum", "mean"}


def kernel_name(expr: Expr) -> str:
    """Returns the function, method or kernel that ``expr`` calls; ``add`` for all operators of addition."""
    if isinstance(expr, CallFunction):
        module = str(expr.func.__module__)
        return str(expr.func.__name__) if module.startswith("megengine.") else ""
    if isinstance(expr, Apply):
        kind = type(expr.opdef).__name__
        return str(expr.opdef.mode).rpartition(".")[2] if kind == "Elemwise" else kind
    if not isinstance(expr, CallMethod):
        return ""
    if is_call_module(expr):
        return str(expr.inputs[0].module_type.__name__)
    name = str(expr.method)
    bare = name.strip("_")
    known = bare if bare in _ARITHMETIC else bare[1:] if bare[1:] in _ARITHMETIC and bare[0] in "ri" else ""
    return known if known and name.startswith("__") else name


def is_arithmetic(name: str) -> bool:
    """Returns whether a kernel of the call ``name`` may read a view as contiguous memory."""
    return name in _ARITHMETIC


def is_product(name: str) -> bool:
    """Returns whether such a kernel computes a gradient of the call from the gradient that arrives."""
    return name in _PRODUCTS


def refuses_views(name: str) -> bool:
    """Returns whether the kernel of the call ``name``, or the kernel of its gradient, stops at a view."""
    return name in _NORMS or name in _CONTIGUOUS


def reads_only_shape(name: str) -> bool:
    """Returns whether the result of the call ``name`` depends on the shape of its input only."""
    return name in ("GetVarShape", "zeros_like", "ones_like", "full_like")


def broadcasts_first_axes(
    view: Sequence[int], other: Sequence[int], view_is_fixed: bool, other_is_fixed: bool
) -> bool:
    """Returns whether ``other`` is, at some batch size, broadcast only over the first axes of ``view``.

    Args:
        view: the shape of the operand that may be a view.
        other: the shape of the other operand.
        view_is_fixed: whether the view is without a batch, since it does not depend on the inputs' values.
        other_is_fixed: the same of the other operand; its first axis then has the same size for all batches.
    """
    rank = max(len(view), len(other))
    pairs = zip(
        (1,) * (rank - len(view)) + tuple(view), (1,) * (rank - len(other)) + tuple(other), strict=True
    )
    axes = [
        "none" if x == y == 1 else "same" if x == y else "spread" if y == 1 else "other" for x, y in pairs
    ]
    cases = [axes]
    if not view_is_fixed and len(view) == rank:
        cases.append(["none", *axes[1:]])  # a batch of 1
        if other_is_fixed and axes[0] == "none":
            cases.append(["spread", *axes[1:]])  # a larger one
    return any(_spreads_then_same([a for a in case if a != "none"]) for case in cases)


def _spreads_then_same(axes: list[str]) -> bool:
    spread = next((i for i, axis in enumerate(axes) if axis != "spread"), len(axes))
    return 0 < spread < len(axes) and all(axis == "same" for axis in axes[spread:])


def gives_view(expr: Expr, name: str, inputs: Sequence[tuple[Node, bool]]) -> bool:
    """Returns whether the results of ``expr`` may be views whose rows are not contiguous.

    Args:
        expr: the expr.
        name: what it calls; see `kernel_name`.
        inputs: the nodes that ``expr`` reads, each with whether it may be such a view.
    """
    if name in _REPEATS:
        return True
    if name in ("split", "Split"):
        return inputs[0][1] or _axis(expr, 2, len(inputs[0][0].shape or ())) != 0
    if name == "Subtensor":
        return True
    if name == "__getitem__":
        return _cuts(expr.args[1], len(inputs[0][0].shape or ()), inputs[0][1])
    if name in _KEEPS_LAYOUT and inputs:
        source, is_view = next(pair for pair in inputs if isinstance(pair[0], TensorNode))
        return is_view and source.dtype == expr.outputs[0].dtype
    return False


def _cuts(index: Any, rank: int, is_view: bool) -> bool:
    """Returns whether ``x[index]`` is a view without contiguous rows, for a tensor of ``rank`` axes."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (list, TensorNode)) and not _is_number(item) for item in items):
        return False  # gathers into new memory
    indexed = [item for item in items if item is not None and item is not Ellipsis]
    place = items.index(Ellipsis) if any(item is Ellipsis for item in items) else len(items)
    front = [item for item in items[:place] if item is not None]
    whole: list[Any] = [slice(None)] * max(rank - len(indexed), 0)
    axes = [*front, *whole, *indexed[len(front) :]]
    if axes and not (isinstance(axes[-1], slice) and axes[-1].step in (None, 1)):
        return False  # steps along the last axis: another kernel
    first = axes[0] if axes else slice(None)
    steps = isinstance(first, slice) and first.step not in (None, 1)
    return is_view or steps or any(not _is_whole(item) for item in axes[1:])


def _is_whole(item: Any) -> bool:
    return (
        isinstance(item, slice) and item.start in (None, 0) and item.stop is None and item.step in (None, 1)
    )


def _is_number(item: Any) -> bool:
    return isinstance(item, TensorNode) and item.shape == ()


def returns_views(expr: Expr, name: str, arrives: bool) -> list[bool]:
    """Returns whether the gradient of ``expr`` for each of its inputs may be a view without contiguous rows.

    Args:
        expr: the expr.
        name: what it calls; see `kernel_name`.
        arrives: whether the gradient of an output of ``expr`` is such a view.
    """
    if name in _SUMS:
        return [_sums_first_axes(expr, len(node.shape or ())) for node in expr.inputs]
    if name in ("add", "ADD", "sub", "SUB"):
        return [arrives and node.shape == expr.outputs[0].shape for node in expr.inputs]
    if name in ("concat", "Concat", "stack"):
        joins_rows = _axis(expr, 1, len(expr.outputs[0].shape or ())) == 0
        return [arrives or not joins_rows] * len(expr.inputs)
    return [arrives and name in _KEEPS_LAYOUT] * len(expr.inputs)


def _sums_first_axes(expr: Expr, rank: int) -> bool:
    """Returns whether the gradient of a sum or mean is, at some batch size, broadcast over the first axes."""
    axis = _argument(expr, "axis", 1)
    if axis is None or not isinstance(axis, (int, tuple, list)):
        return False
    axes = {int(a) % max(rank, 1) for a in (axis if isinstance(axis, (tuple, list)) else [axis])}
    return bool(axes & {0, 1}) and rank - 1 not in axes


def _axis(expr: Expr, position: int, rank: int) -> int:
    axis = expr.opdef.axis if isinstance(expr, Apply) else _argument(expr, "axis", position)
    return int(axis) % max(rank, 1) if isinstance(axis, int) else -1


def _argument(expr: Expr, name: str, position: int) -> Any:
    """Returns an argument of a function or method by its name; None if the call lacks it."""
    if isinstance(expr, CallFunction):
        bound = signature(expr.func).bind(*expr.args, **expr.kwargs)
        bound.apply_defaults()
        return bound.arguments.get(name)
    if isinstance(expr, Apply):
        return getattr(expr.opdef, name, None)
    return expr.kwargs.get(name, expr.args[position] if len(expr.args) > position else None)
