"""Gradients of nodes that are kept as in the file.

Where such a node had none, nothing before it would seem to make noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor

from qtrace.graph.opaque import OpaqueOp

__all__ = ["has_slopes", "with_slopes"]

_RESIZING = ("Resize", "Upsample")
# Each value of their results is a value of an input, or a constant.
_MOVING = ("ScatterND", "ScatterElements", "Scatter", "GatherND", "MaxUnpool", "ReverseSequence", "Compress")
_EXACT = 1 << 23  # float32 holds whole numbers up to twice that


def has_slopes(op: object) -> bool:
    """Returns whether the result of a node that is kept gets a gradient by `with_slopes`."""
    return isinstance(op, OpaqueOp) and op.operators in (*_RESIZING, *_MOVING)


def with_slopes(
    op: OpaqueOp, inputs: Sequence[Any], results: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]
) -> Sequence[Any]:
    """Gives the result of a node that resizes images or moves values a gradient.

    Args:
        op: the node.
        inputs: the module and the node's inputs.
        results: what the node gives for them.
        run: runs the node on other inputs.
    """
    if len(results) != 1 or not isinstance(results[0], Tensor):
        return results
    near = None
    if op.operators in _RESIZING:
        near = _resized(inputs[1], results[0])
    elif op.operators in _MOVING:
        near = _moved(inputs, results[0], run)
    return results if near is None else (near + (results[0] - near).detach(),)


def _resized(image: Any, result: Tensor) -> Tensor | None:
    """Resizes bilinearly: near enough to any resizing for an estimate."""
    if len(image.shape) != 4 or tuple(image.shape[:2]) != tuple(result.shape[:2]):
        return None
    return F.nn.interpolate(image, size=tuple(int(n) for n in result.shape[2:]), mode="bilinear")


def _moved(
    inputs: Sequence[Any], result: Tensor, run: Callable[[Sequence[Any]], Sequence[Any]]
) -> Tensor | None:
    """Takes the values of the result out of those of the inputs, whose places two runs on numbers tell."""
    places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and _is_float(value)]
    sizes = [int(np.prod(inputs[i].shape)) for i in places]
    total = sum(sizes)
    if not 0 < total < _EXACT or not _is_float(result):
        return None
    moved = []
    for first in (1, total + 1):
        numbers = np.split(np.arange(first, first + total, dtype=np.float32), np.cumsum(sizes)[:-1])
        others = list(inputs)
        for i, values in zip(places, numbers, strict=True):
            others[i] = Tensor(values.reshape(inputs[i].shape))
        moved.append(run(others)[0].numpy())
    taken = moved[1] - moved[0] == total  # the others are constants of the node
    chosen = np.where(taken, moved[0] - 1, 0).astype(np.int32).reshape(-1)
    values = F.concat([F.flatten(inputs[i]) for i in places])
    return F.reshape(values[Tensor(chosen)], result.shape) * Tensor(taken.astype(np.float32))


def _is_float(value: Any) -> bool:
    return bool(np.dtype(value.dtype).kind == "f")
