"""Reductions along axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.importing.onnx.call import Call, Lowering

__all__ = ["LOWERINGS"]

# Op -> the opset since which the axes are an input.
_AXES_AS_INPUT = {"ReduceSum": 13}


def _axes(call: Call) -> tuple[int, ...] | None:
    """Returns the axes to reduce; None if the node does nothing."""
    rank = call.rank(0)
    axes_input = call.ints(1, None) if call.version >= _AXES_AS_INPUT.get(call.node.op, 18) else None
    listed = call.ints("axes", None)
    axes = axes_input if axes_input is not None else listed
    nothing = bool(call.attribute("noop_with_empty_axes", 0))
    if not axes:
        return None if nothing else tuple(range(rank))
    return tuple(sorted(call.axis(a, rank) for a in axes))


def _reduction(
    function: Callable[..., Any],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    integers: bool = False,
) -> Lowering:
    """Returns the lowering of a reduction, with functions of each number before and after it."""

    def lower(call: Call) -> Any:
        axes, keep = _axes(call), bool(call.attribute("keepdims", 1))
        if not call.is_float(0) and not (
            integers and call.dtype(0).kind == "i" and call.dtype(0).itemsize >= 4
        ):
            call.refuse(f"reduces {call.dtype(0).name}, which MegEngine computes otherwise")
        x = call.tensor(0) if before is None else call.function(before, call.tensor(0))
        if axes is not None and call.rank(0):
            x = _reduced(call, function, x, axes, keep)
        return x if after is None else call.function(after, x)

    return lower


def _reduced(call: Call, function: Callable[..., Any], x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    rank = call.rank(0)
    if len(axes) == rank and not keep:
        # MegEngine's result would have one axis for some functions: all axes at once, then none.
        return call.function(function, x)
    return call.function(function, x, axis=axes if len(axes) > 1 else axes[0], keepdims=keep)


LOWERINGS: dict[str, Lowering] = {
    "ReduceMean": _reduction(F.mean),
    "ReduceSum": _reduction(F.sum, integers=True),
    "ReduceMax": _reduction(F.max, integers=True),
    "ReduceMin": _reduction(F.min, integers=True),
    "ReduceProd": _reduction(F.prod),
    "ReduceL1": _reduction(F.sum, before=F.abs),
    "ReduceL2": _reduction(F.sum, before=F.square, after=F.sqrt),
    "ReduceSumSquare": _reduction(F.sum, before=F.square),
    "ReduceLogSum": _reduction(F.sum, after=F.log),
    "ReduceLogSumExp": _reduction(F.logsumexp),
}
