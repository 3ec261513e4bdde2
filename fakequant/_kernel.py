"""The quantize-dequantize operation with its gradients.

Forward, with v = x / s: q = clip(round(v), qmin - z, qmax - z), y = q * s, which is ONNX's
QuantizeLinear followed by DequantizeLinear in float32, operation by operation.

Backward (straight through; Esser et al. 2020, "Learned Step Size Quantization", eq. 3, written for
q relative to the zero point, which makes it hold for affine schemes too)::

    dy/dx = 1      inside,  0 outside       inside: qmin - z <= v <= qmax - z
    dy/ds = q - v  inside,  q outside       q is then qmin - z or qmax - z
    dy/dz = 0      inside, -s outside

A fake quant that learns a zero point, a threshold or the ends of a range derives s and z from it with
differentiable operations: the chain rule then gives the formula of its paper. `Learn` says what flows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.autodiff import Function
from megengine.core.tensor.array_method import _elwise

__all__ = ["Learn", "QuantDequant", "as_float32", "quant_dequant", "straight_through"]

# Adding 1.5 * 2**23 leaves a float32 no fraction bits: the FPU rounds half to even. Three passes of
# 0.35 ms for 1.6 M values instead of 6.5 ms for F.round. The upper clip must stand between the addition
# and the subtraction: alone, jit.trace cancels the pair at its default opt_level. The lower clip stands
# before (its bound is an integer, so rounding does not care) since the gradient wants the unrounded value.
_MAGIC = 12582912.0
# More than 1 / the smallest distance from a bound that matters.
_STEEP = 1e30


@dataclass(frozen=True)
class Learn:
    """What flows back to the range.

    Attributes:
        gain: factor on the gradients of scale and zero point.
        residual: whether values inside the range count with their rounding (LSQ), or only those outside
            with the level they clip to (PACT).
        zero_point: whether the zero point gets a gradient.
    """

    gain: float = 1.0
    residual: bool = True
    zero_point: bool = False


class QuantDequant(Function):
    """Quantize-dequantize as one differentiable function; an instance serves one call.

    Args:
        qmin: smallest integer, zero point included.
        qmax: largest integer.
        half_even: round ties to even (True) or away from zero (False).
        shape: shape of the scale.
        learn: what flows back to scale and zero point; None when both are fixed.
    """

    def __init__(
        self, qmin: int, qmax: int, half_even: bool, shape: tuple[int, ...], learn: Learn | None
    ) -> None:
        super().__init__()
        self.qmin, self.qmax, self.half_even = qmin, qmax, half_even
        self.shape, self.learn = shape, learn

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Computes ``clip(round(x / scale), qmin - zp, qmax - zp) * scale``.

        Args:
            x: float32 tensor of any shape.
            scale: float32, broadcastable to ``x``, positive.
            zero_point: float32 holding integers, of the shape of ``scale``.
        """
        low, high = self.qmin - zero_point, self.qmax - zero_point
        v = x / scale
        above = F.maximum(v, low)
        if self.half_even:
            q = F.minimum(above + _MAGIC, high + _MAGIC) - _MAGIC
        else:
            q = F.minimum(F.round(above), high)
        self.saved = (v, above, high, *((None, None) if self.learn is None else (q, scale)))
        return q * scale

    def backward(self, grad: Tensor) -> tuple[Any, Any, Any]:
        """Returns the gradients of x, of the scale and of the zero point (None where it is not learned)."""
        v, above, high, q, scale = self.saved
        inside = F.minimum(above, high)
        # Masks by vectorised float kernels: comparisons, casts and abs are ten times slower on CPU. The
        # gradient of relu6 passes where its argument is between 0 and 6: here 3 inside, far away outside.
        side = _elwise(v - inside, _STEEP, 3.0, mode="FUSE_MUL_ADD3")
        grad_x = _elwise(side, grad, mode="RELU6_GRAD")
        learn = self.learn
        if learn is None:
            return grad_x, None, None
        if learn.residual:
            # grad_x is 0 where `inside` is not v; v itself may be infinite there.
            grad_scale = _dot_to(grad, q, self.shape) - _dot_to(grad_x, inside, self.shape)
        else:
            grad_scale = _dot_to(grad - grad_x, q, self.shape)
        grad_zero = None
        if learn.zero_point:
            grad_zero = scale * _sum_to(grad - grad_x, self.shape) * -learn.gain
        return grad_x, grad_scale * learn.gain, grad_zero


def _sum_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums ``a`` over the axes along which a tensor of ``shape`` was broadcast."""
    axes = [i for i, size in enumerate(shape) if size == 1]
    if len(axes) == len(shape):
        return a.sum().reshape(shape)
    return F.sum(a, axis=axes, keepdims=True) if axes else a


def _dot_to(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums ``a * b`` over the axes along which a tensor of ``shape`` was broadcast."""
    axes = [i for i, size in enumerate(shape) if size == 1]
    own = len(shape) - len(axes)
    if own == 0:
        return F.dot(a.flatten(), b.flatten()).reshape(shape)
    if axes and axes[0] == own:  # the sums are of rows that lie in one piece
        rows = math.prod(shape)
        return F.matmul(a.reshape(rows, 1, -1), b.reshape(rows, -1, 1)).reshape(shape)
    return F.sum(a * b, axis=axes, keepdims=True) if axes else a * b


def quant_dequant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    half_even: bool,
    shape: tuple[int, ...],
    learn: Learn | None = None,
) -> Tensor:
    """Fake-quantizes ``x``; see the module's docstring for the mathematics.

    Args:
        x: float32 tensor of any shape.
        scale: float32 positive scales, broadcastable to ``x``.
        zero_point: float32 holding integers, of the shape of ``scale``.
        qmin: smallest integer.
        qmax: largest integer.
        half_even: the rounding of ties.
        shape: the shape of ``scale``, known before the call (it is symbolic under ``jit.trace``).
        learn: what flows back to scale and zero point; None when both are fixed.

    Returns:
        A float32 tensor of the shape of ``x`` with values ``(q - zero_point) * scale``.
    """
    return QuantDequant(qmin, qmax, half_even, shape, learn)(x, scale, zero_point)


class _Through(Function):
    """Applies a step function and lets the gradient pass; an instance serves one call."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def backward(self, grad: Tensor) -> Tensor:
        return grad


def straight_through(x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
    """``step(x)``, such as ``F.round``, with the gradient of x (Bengio et al. 2013).

    Args:
        x: a tensor of any shape.
        step: an element by element function.
    """
    return _Through(step)(x)


def as_float32(value: float | np.ndarray) -> Tensor:
    """A float32 Tensor of ``value``."""
    return Tensor(np.asarray(value, dtype=np.float32))
