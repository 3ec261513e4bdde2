"""Quantize-dequantize with the gradients of ``qtrace.fakequant.kernels.kernel``, as torch functions."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from qtrace.fakequant.kernels.kernel import Learn, Levels
from qtrace.fakequant.kernels.programs import MARGIN_SHARE
from qtrace.numerics import SMALLEST_SCALE

__all__ = [
    "absolute",
    "clip",
    "larger",
    "positive",
    "quant_dequant",
    "round_away",
    "smaller",
    "straight_through",
]

_CACHED = 2**16  # values that stay in a core's cache
_LARGEST = torch.finfo(torch.float32).max


def larger(x: Any, y: Any) -> Any:
    """Computes the maximum; at a tie the gradient goes to ``x``, as in MegEngine."""
    return torch.where(x >= y, x, y)


def smaller(x: Any, y: Any) -> Any:
    """Computes the minimum; at a tie the gradient goes to ``x``, as in MegEngine."""
    return torch.where(x <= y, x, y)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, low: float | None, high: float | None) -> Any:
        ctx.ends = low, high
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        (x,), (low, high) = ctx.saved_tensors, ctx.ends
        outside = x < (-math.inf if low is None else low)
        return grad.masked_fill(outside | (x > (math.inf if high is None else high)), 0.0), None, None


def clip(x: Any, low: float | None, high: float | None) -> Any:
    """Clips ``x``; the ends themselves get the gradient, as in MegEngine (not in every release of torch)."""
    return _Clip.apply(x, low, high)


def absolute(x: Any) -> Any:
    """Computes the magnitude; its gradient at 0 is -1, as in MegEngine."""
    return torch.where(x > 0, x, -x)


def round_away(x: Any) -> Any:
    """Rounds to the nearest integer, ties away from zero; exact for every float32."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


def round_up(x: Any) -> Any:
    """Rounds to the nearest integer, ties to the larger one; exact for every float32."""
    whole = x.floor()
    return whole + (x - whole >= 0.5).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, step: Any) -> Any:
        return step(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        return grad, None


def straight_through(x: Any, step: Any) -> Any:
    """Computes ``step(x)`` with the gradient of x (Bengio et al. 2013)."""
    return _StraightThrough.apply(x, step)


class _Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Any) -> Any:
        ctx.sign = scale.sign()
        return scale.abs().clamp_min(SMALLEST_SCALE)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.sign


def positive(scale: Any) -> Any:
    """Computes ``max(|scale|, SMALLEST_SCALE)`` of a learned scale; the gradient has the scale's sign."""
    return _Positive.apply(scale)


class _Grid:
    """The grid of one call: size of a step, and the ends relative to the zero point.

    Args:
        scale: the scale, broadcastable to the values; its magnitude is applied.
        zero_point: integers of the shape of ``scale``; it is not read if ``levels`` has the zero point.
        levels: the integer levels.
    """

    def __init__(self, scale: Any, zero_point: Any, levels: Levels) -> None:
        self.size = scale.abs().clamp_min(levels.min_scale)
        zero: Any = zero_point if levels.zero is None else levels.zero
        self.low, self.high = levels.qmin - zero, levels.qmax - zero
        self.margin = (levels.qmax - levels.qmin) * MARGIN_SHARE
        self.rounding = levels.rounding
        if scale.numel() == 1 and isinstance(self.low, torch.Tensor):
            self.low, self.high = self.low.item(), self.high.item()

    def part(self, rows: Any) -> _Grid:
        """Returns the grid of some rows of the values."""
        if self.size.numel() == 1 or self.size.shape[0] == 1:
            return self
        grid = copy.copy(self)
        grid.size = self.size[rows]
        if isinstance(self.low, torch.Tensor):
            grid.low, grid.high = self.low[rows], self.high[rows]
        return grid

    def round(self, x: Any, y: Any, inside: Any | None = None) -> None:
        """Writes ``clip(round(x / size), low, high) * size`` to ``y``, and 1 or 0 to ``inside``.

        Floats tell what is inside the range: torch's kernels for booleans take ten times as long.
        """
        torch.div(x, self.size, out=y)
        if inside is not None:
            torch.clamp(y, self.low - self.margin, self.high + self.margin, out=inside).eq_(y)
        y.clamp_(self.low, self.high)
        if self.rounding == "half_even":
            y.round_()
        else:
            y.copy_(round_away(y) if self.rounding == "half_away" else round_up(y))
        y.mul_(self.size)


class _QuantDequant(torch.autograd.Function):
    """Forward and backward of ``qtrace.fakequant.kernels.kernel.QuantDequant``.

    The forward pass computes what the gradients need, while the values are in the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, zero_point: Any, levels: Levels, learn: Learn | None) -> Any:
        x, grid, y = x.contiguous(), _Grid(scale, zero_point, levels), torch.empty_like(x)
        needed = any(ctx.needs_input_grad)
        inside = torch.empty_like(x) if needed else None
        error = torch.empty_like(x) if needed and learn is not None else None
        for rows in row_slices(x):
            grid.part(rows).round(x[rows], y[rows], None if inside is None else inside[rows])
            if inside is not None and error is not None and learn is not None:
                # An infinite value is outside, and 0 times it would be NaN.
                finite = torch.clamp(x[rows] if learn.residual else y[rows], -_LARGEST, _LARGEST)
                torch.sub(y[rows], finite.mul_(inside[rows]), out=error[rows])
        ctx.learn = learn
        ctx.save_for_backward(*(value for value in (inside, error, scale) if value is not None))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        learn: Learn | None = ctx.learn
        inside, *others = ctx.saved_tensors
        grad = grad.contiguous()
        passed = grad * inside
        if learn is None:
            return passed, None, None, None, None
        error, scale = others
        size = scale.abs().clamp_min(SMALLEST_SCALE)
        grad_scale = _dot(grad, error, scale.shape) / size * learn.gain * (scale / size)
        grad_zero = None
        if learn.zero_point:
            grad_zero = scale.abs() * _sum_to(grad - passed, scale.shape) * -learn.gain
        return passed, grad_scale, grad_zero, None, None


def row_slices(values: Any) -> list[Any]:
    """Splits a tensor along its first axis into parts that stay in the cache of a core between two ops."""
    if values.numel() <= _CACHED:
        return [...]
    count = max(1, _CACHED * values.shape[0] // values.numel())
    return [slice(start, start + count) for start in range(0, values.shape[0], count)]


def _sum_to(terms: Any, shape: Any) -> Any:
    """Sums over the axes along which a tensor of ``shape`` was broadcast."""
    return terms.sum().reshape(shape) if math.prod(shape) == 1 else terms.sum_to_size(shape)


def _dot(a: Any, b: Any, shape: Any) -> Any:
    """Sums products over the axes along which a tensor of ``shape`` was broadcast, where possible by BLAS."""
    count = math.prod(shape)
    if count == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1)).reshape(shape)
    if count == shape[0] == a.shape[0]:
        return torch.linalg.vecdot(a.flatten(1), b.flatten(1)).reshape(shape)
    return (a * b).sum_to_size(shape)


def quant_dequant(x: Any, scale: Any, zero_point: Any, levels: Levels, learn: Learn | None = None) -> Any:
    """Fake-quantizes ``x``, a float32 tensor of torch.

    Args:
        x: the values.
        scale: the scale, broadcastable to ``x``.
        zero_point: float32 holding integers, of the shape of ``scale``; None if ``levels`` has it.
        levels: the integer levels.
        learn: the gradients of scale and zero point; None when both are fixed.
    """
    return _QuantDequant.apply(x, scale, zero_point, levels, learn)
