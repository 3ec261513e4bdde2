"""Refuses calls of MegEngine's at which a kernel divides by 0 and thereby ends the process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import megengine.functional.nn as nn
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor
from megengine.core.ops.builtin import AdaptivePooling
from megengine.jit.tracing import is_tracing
from megengine.traced_module import expr

__all__ = ["check_op", "refuse_divisions_by_zero"]

# What a wrapper takes over of a C++ function, whose module is None.
_NAMES = ("__name__", "__doc__")


def refuse_divisions_by_zero() -> None:
    """Makes MegEngine's adaptive poolings raise a ValueError for a size at which their kernel has stride 0.

    It replaces the C++ function behind ``F.adaptive_avg_pool2d``, ``F.adaptive_max_pool2d`` and their
    modules, and the call of an op in a traced graph; all these stay as they are. A second call does nothing.
    """
    if hasattr(nn.adaptive_pool2d_cpp, "__wrapped__"):
        return
    pool, apply = nn.adaptive_pool2d_cpp, expr.apply

    @functools.wraps(pool, assigned=_NAMES)
    def checked_pool(inp: Any, oshp: Any, mode: Any) -> Any:
        _check_pooled_size(inp, oshp)
        return pool(inp, oshp, mode)

    @functools.wraps(apply, assigned=_NAMES)
    def checked_apply(op: Any, *inputs: Any) -> Any:
        check_op(op, inputs)
        return apply(op, *inputs)

    nn.adaptive_pool2d_cpp, expr.apply = checked_pool, checked_apply


def check_op(op: Any, inputs: Sequence[Any]) -> None:
    """Raises a ValueError if ``op``, an op of MegEngine's core, would divide by 0 on ``inputs``."""
    if isinstance(op, AdaptivePooling):
        _check_pooled_size(inputs[0], inputs[1] if len(inputs) > 1 else tuple(op.shape))


def _check_pooled_size(x: Any, size: Any) -> None:
    """Raises a ValueError for a pooled size that is 0, or larger than that of ``x``.

    MegEngine's stride is the rounded down quotient of both.
    """
    given = _input_size(x)
    pooled = _pooled_size(size)
    if given is None or pooled is None:
        return
    if any(n < 1 for n in pooled):
        raise ValueError(f"adaptive pooling to {pooled} has an empty result: give a size of 1 or more")
    if any(out > n for out, n in zip(pooled, given, strict=True)):
        raise ValueError(
            f"adaptive pooling of an input of {given} to the larger {pooled}, which MegEngine cannot "
            f"compute: give an input of {pooled} or more there, or enlarge it by F.nn.interpolate"
        )


def _input_size(x: Any) -> tuple[int, int] | None:
    """Returns height and width of a tensor; None where they are not known, or there are not two."""
    shape = getattr(x, "_tuple_shape", None) if isinstance(x, Tensor) else getattr(x, "shape", None)
    if shape is None or len(shape) != 4:  # MegEngine itself refuses other numbers of axes
        return None
    return int(shape[2]), int(shape[3])


def _pooled_size(size: Any) -> tuple[int, int] | None:
    """Returns the height and width of the result; None where a compiled graph computes them."""
    numbers = size if isinstance(size, (tuple, list)) else (size,)
    values: list[int] = []
    for number in numbers:
        if isinstance(number, (int, np.integer)):
            values.append(int(number))
        elif isinstance(number, Tensor) and not is_tracing():  # a value that is read there becomes a constant
            values += [int(n) for n in number.numpy().reshape(-1)]
        else:
            return None
    if len(values) == 1:
        values *= 2
    return (values[0], values[1]) if len(values) == 2 else None
