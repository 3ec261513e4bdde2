"""The element by element work of quantize-dequantize, each direction as one op of several kernels.

An op of its own for every kernel would cost more than the kernels do on small tensors: on CPU, MegEngine
needs about 70 us to hand an op to its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.core._imperative_rt.common import CompNode
from megengine.core.ops.builtin import Elemwise
from megengine.core.tensor.utils import subgraph_fn

from qtrace.numerics import SMALLEST_SCALE
from qtrace.scheme import QScheme

__all__ = ["Levels", "Programs", "of_magnitude", "programs"]

# Adding 1.5 * 2**23 leaves a float32 no fraction bits: the FPU rounds half to even. Three passes of
# 0.35 ms for 1.6 M values instead of 6.5 ms for F.round. The upper clip must stand between the addition
# and the subtraction: alone, jit.trace cancels the pair at its default opt_level. The lower clip stands
# before: its bound is an integer, so rounding does not care.
_MAGIC = 12582912.0
# How far beyond its ends, as a share of the range, a value still counts as inside: more than float32 rounds
# the line by which it is told, so that the ends themselves are inside.
_MARGIN = 2.0**-20

Program = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Levels:
    """The integers that are rounded to.

    Attributes:
        qmin: the smallest, zero point included.
        qmax: the largest.
        half_even: round ties to even (True) or away from zero (False).
        zero: the zero point of all channels, where the scheme fixes it.
        least: the smallest scale that is applied.
    """

    qmin: int
    qmax: int
    half_even: bool = True
    zero: int | None = None
    least: float = SMALLEST_SCALE

    @classmethod
    def of(cls, scheme: QScheme) -> Levels:
        """Those of a scheme."""
        zero = scheme.symmetric_zero_point if scheme.symmetric else None
        return cls(scheme.qmin, scheme.qmax, scheme.rounding == "half_even", zero)


@dataclass(frozen=True)
class Programs:
    """What is computed of each value; x, scale and zero point are the first three inputs of all.

    Of a scale the magnitude counts: one that is learned may cross zero.

    Attributes:
        round: gives y.
        pass_inside: with the gradient of y, gives that of x.
        with_residual: with the gradient of y and y, gives the gradient of x, and terms whose sums over the
            scale are the gradient of the scale.
        without_residual: the same with the levels of what clips instead of residuals.
    """

    round: Program
    pass_inside: Program
    with_residual: Program
    without_residual: Program


@lru_cache(maxsize=256)
def programs(levels: Levels, device: str) -> Programs:
    """The programs for these integers on a device."""
    one = _Programs(levels)
    return Programs(
        _op(one.round, 3, device),
        _op(one.pass_inside, 4, device),
        _op(one.with_residual, 5, device),
        _op(one.without_residual, 5, device),
    )


@lru_cache(maxsize=4096)
def of_magnitude(gain: float, device: str) -> Program:
    """From a gradient of the logarithm of ``|scale|``, and the scale: ``gain`` times that of the scale."""

    def divide(inputs: Any, f: Any, c: Any) -> Any:
        slope, scale = inputs
        size = _magnitude(scale, SMALLEST_SCALE, f, c)
        # The sign last: the division alone says what it said when scales were positive.
        return (f(_MUL, f(_MUL, f(_DIV, slope, size), c(gain)), f(_DIV, scale, size)),), (False,)

    return _op(divide, 2, device)


def _op(function: Callable[..., Any], inputs: int, device: str) -> Program:
    program: Program = subgraph_fn(
        "QuantDequant", dtype=np.float32, device=CompNode(device), nr_inputs=inputs
    )(function)
    return program


def _magnitude(scale: Any, least: float, f: Any, c: Any) -> Any:
    return f(_MAX, f(_ABS, scale), c(least))


class _Programs:
    """Builds the programs: ``f`` applies an op, ``c`` makes a constant."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels

    def round(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero = inputs
        scale = _magnitude(scale, self.levels.least, f, c)
        low, high = self._bound(self.levels.qmin, zero, f, c), self.levels.qmax
        above = f(_MAX, f(_DIV, x, scale), low)
        if self.levels.half_even:
            below = f(_MIN, f(_ADD, above, c(_MAGIC)), self._bound(high + _MAGIC, zero, f, c))
            q = f(_SUB, below, c(_MAGIC))
        else:
            q = f(_MIN, f(_ROUND, above), self._bound(high, zero, f, c))
        return (f(_MUL, q, scale),), (False,)

    def pass_inside(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad = inputs
        return (f(_PASS, self._line(x, scale, zero, f, c), grad),), (False,)

    def with_residual(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad, y = inputs
        line = self._line(x, scale, zero, f, c)
        # A selection, not a product: outside, x may be infinite.
        step = f(_SUB, y, f(_PASS, line, x))
        return (f(_PASS, line, grad), f(_MUL, grad, step)), (False, False)

    def without_residual(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad, y = inputs
        grad_x = f(_PASS, self._line(x, scale, zero, f, c), grad)
        return (grad_x, f(_MUL, f(_SUB, grad, grad_x), y)), (False, False)

    def _bound(self, end: float, zero: Any, f: Any, c: Any) -> Any:
        """An end of the range, relative to the zero point."""
        return f(_SUB, c(end), zero) if self.levels.zero is None else c(end - self.levels.zero)

    def _line(self, x: Any, scale: Any, zero: Any, f: Any, c: Any) -> Any:
        """A line in x that is between 0 and 6 inside, which is where the gradient of relu6 passes.

        Masks by vectorised float kernels: comparisons, casts and abs are ten times slower on CPU.
        """
        low, high, fixed = self.levels.qmin, self.levels.qmax, self.levels.zero
        slope = 6.0 / ((high - low) * (1.0 + 2.0 * _MARGIN))
        middle = 3.0 - slope * (low + high) / 2
        if fixed is None:
            offset = f(_FMA, zero, c(slope), c(middle))
        else:
            offset = c(fixed * slope + middle)
        size = _magnitude(scale, self.levels.least, f, c)
        # Not fused: with a number for each channel, the fused kernel takes four times as long.
        return f(_ADD, f(_MUL, x, f(_DIV, c(slope), size)), offset)


_ADD, _SUB, _MUL, _DIV = (Elemwise(mode=mode) for mode in ("ADD", "SUB", "MUL", "TRUE_DIV"))
_MAX, _MIN, _ABS, _ROUND = (Elemwise(mode=mode) for mode in ("MAX", "MIN", "ABS", "ROUND"))
_FMA, _PASS = Elemwise(mode="FUSE_MUL_ADD3"), Elemwise(mode="RELU6_GRAD")
