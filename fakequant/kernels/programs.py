"""The elementwise arithmetic of quantize-dequantize, each direction as one op of several kernels.

On small tensors, one op per kernel would take longer than the kernels: on CPU, MegEngine needs about 70 us to
pass an op to its threads.
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
from qtrace.scheme import QScheme, Rounding

__all__ = ["MARGIN_SHARE", "Levels", "Programs", "of_magnitude", "programs"]

# Adding 1.5 * 2**23 leaves a float32 no fraction bits: the FPU rounds half to even. Three passes of
# 0.35 ms for 1.6 M values instead of 6.5 ms for F.round. The upper clip must be between the addition
# and the subtraction, or else jit.trace cancels the pair at its default opt_level. The lower clip comes
# before: its bound is an integer, which rounding does not change.
_ROUNDING_OFFSET = 12582912.0
# Values beyond the ends by this share of the range count as inside. It exceeds the rounding error of `_line`
# in float32, so that the ends themselves are inside.
MARGIN_SHARE = 2.0**-20

Program = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Levels:
    """The integer levels of a quantizer.

    Attributes:
        qmin: the smallest integer.
        qmax: the largest integer.
        rounding: the rule for ties, as in `QScheme.rounding`.
        zero: the zero point of all channels if the scheme fixes it, else None.
        min_scale: the smallest scale that is applied.
    """

    qmin: int
    qmax: int
    rounding: Rounding = "half_even"
    zero: int | None = None
    min_scale: float = SMALLEST_SCALE

    @classmethod
    def of(cls, scheme: QScheme) -> Levels:
        """Returns the integer levels of ``scheme``."""
        zero = scheme.symmetric_zero_point if scheme.symmetric else None
        return cls(scheme.qmin, scheme.qmax, scheme.rounding, zero)


@dataclass(frozen=True)
class Programs:
    """The programs of one quantizer. Their first three inputs are x, scale and zero point.

    They apply the magnitude of the scale, since a learned scale may cross zero.

    Attributes:
        round: computes y.
        pass_inside: from the gradient of y, computes the gradient of x.
        with_residual: from the gradient of y and y, computes the gradient of x, and terms whose sums,
            divided by the scale, are its gradient: residuals inside the range, levels outside.
        without_residual: computes the same without residuals: terms inside the range are 0.
    """

    round: Program
    pass_inside: Program
    with_residual: Program
    without_residual: Program


@lru_cache(maxsize=256)
def programs(levels: Levels, device: str) -> Programs:
    """Builds the programs for ``levels`` on ``device``."""
    builder = _ProgramBuilder(levels)
    return Programs(
        _op(builder.round, 3, device),
        _op(builder.pass_inside, 4, device),
        _op(builder.with_residual, 5, device),
        _op(builder.without_residual, 5, device),
    )


@lru_cache(maxsize=4096)
def of_magnitude(gain: float, device: str) -> Program:
    """Builds the program from a gradient of ``log |scale|``, and the scale, to ``gain`` times the scale's."""

    def divide(inputs: Any, f: Any, c: Any) -> Any:
        slope, scale = inputs
        size = _magnitude(scale, SMALLEST_SCALE, f, c)
        # The sign comes last, so that positive scales get the same bits as without it.
        return (f(_MUL, f(_MUL, f(_DIV, slope, size), c(gain)), f(_DIV, scale, size)),), (False,)

    return _op(divide, 2, device)


def _op(function: Callable[..., Any], inputs: int, device: str) -> Program:
    program: Program = subgraph_fn(
        "QuantDequant", dtype=np.float32, device=CompNode(device), nr_inputs=inputs
    )(function)
    return program


def _magnitude(scale: Any, minimum: float, f: Any, c: Any) -> Any:
    return f(_MAX, f(_ABS, scale), c(minimum))


class _ProgramBuilder:
    """Defines the programs: ``f`` applies an op, ``c`` makes a constant."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels

    def round(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero = inputs
        scale = _magnitude(scale, self.levels.min_scale, f, c)
        low, high = self._bound(self.levels.qmin, zero, f, c), self.levels.qmax
        above = f(_MAX, f(_DIV, x, scale), low)
        if self.levels.rounding == "half_even":
            below = f(
                _MIN, f(_ADD, above, c(_ROUNDING_OFFSET)), self._bound(high + _ROUNDING_OFFSET, zero, f, c)
            )
            q = f(_SUB, below, c(_ROUNDING_OFFSET))
        elif self.levels.rounding == "half_away":
            q = f(_MIN, f(_ROUND, above), self._bound(high, zero, f, c))
        else:  # the fraction of a tiny negative number is 1 in float32
            inside = f(_MIN, above, self._bound(high, zero, f, c))
            whole = f(_FLOOR, inside)
            fraction = f(_SUB, inside, whole)
            q = f(_ADD, whole, f(_MIN, f(_FLOOR, f(_ADD, fraction, fraction)), c(1.0)))
        return (f(_MUL, q, scale),), (False,)

    def pass_inside(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad = inputs
        return (f(_PASS, self._line(x, scale, zero, f, c), grad),), (False,)

    def with_residual(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad, y = inputs
        line = self._line(x, scale, zero, f, c)
        # A selection, not a product, as x may be infinite outside.
        step = f(_SUB, y, f(_PASS, line, x))
        return (f(_PASS, line, grad), f(_MUL, grad, step)), (False, False)

    def without_residual(self, inputs: Any, f: Any, c: Any) -> Any:
        x, scale, zero, grad, y = inputs
        grad_x = f(_PASS, self._line(x, scale, zero, f, c), grad)
        return (grad_x, f(_MUL, f(_SUB, grad, grad_x), y)), (False, False)

    def _bound(self, end: float, zero: Any, f: Any, c: Any) -> Any:
        """Computes an end of the range relative to the zero point."""
        return f(_SUB, c(end), zero) if self.levels.zero is None else c(end - self.levels.zero)

    def _line(self, x: Any, scale: Any, zero: Any, f: Any, c: Any) -> Any:
        """Computes a line in x that is in [0, 6] inside the range, where relu6 passes its gradient.

        It masks by vectorised float kernels: comparisons, casts and abs are ten times slower on CPU.
        """
        low, high, fixed = self.levels.qmin, self.levels.qmax, self.levels.zero
        slope = 6.0 / ((high - low) * (1.0 + 2.0 * MARGIN_SHARE))
        middle = 3.0 - slope * (low + high) / 2
        if fixed is None:
            offset = f(_FMA, zero, c(slope), c(middle))
        else:
            offset = c(fixed * slope + middle)
        size = _magnitude(scale, self.levels.min_scale, f, c)
        # Not fused: with one number per channel, the fused kernel takes four times as long.
        return f(_ADD, f(_MUL, x, f(_DIV, c(slope), size)), offset)


_ADD, _SUB, _MUL, _DIV = (Elemwise(mode=mode) for mode in ("ADD", "SUB", "MUL", "TRUE_DIV"))
_MAX, _MIN, _ABS = (Elemwise(mode=mode) for mode in ("MAX", "MIN", "ABS"))
_ROUND, _FLOOR = Elemwise(mode="ROUND"), Elemwise(mode="FLOOR")
_FMA, _PASS = Elemwise(mode="FUSE_MUL_ADD3"), Elemwise(mode="RELU6_GRAD")
