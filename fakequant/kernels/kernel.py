"""The quantize-dequantize operation with its gradients.

Forward, with s the magnitude of the scale and v = x / s: q = clip(round(v), qmin - z, qmax - z),
y = q * s, which is ONNX's QuantizeLinear followed by DequantizeLinear in float32, operation by operation.

Backward (straight through; Esser et al. 2020, "Learned Step Size Quantization", eq. 3, written for
q relative to the zero point, which makes it hold for affine schemes too)::

    dy/dx = 1      inside,  0 outside       inside: qmin - z <= v <= qmax - z
    dy/ds = q - v  inside,  q outside       q is then qmin - z or qmax - z
    dy/dz = 0      inside, -s outside

A value beyond a bound by less than a millionth of the range counts as inside.

A fake quant that learns a zero point, a threshold or the ends of a range derives s and z from it with
differentiable operations: the chain rule then gives the formula of its paper. `Learn` selects the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.autodiff import Function
from megengine.core._imperative_rt.core2 import get_grad_key

from qtrace.fakequant.kernels.programs import (
    Learn,
    Levels,
    as_tensor,
    differentiate,
    fits,
    of_magnitude,
    programs,
    round_array,
)
from qtrace.numerics import SMALLEST_SCALE

__all__ = ["Learn", "Levels", "QuantDequant", "as_float32", "positive", "quant_dequant", "straight_through"]


class QuantDequant(Function):
    """Quantize-dequantize as one differentiable function; an instance serves one call.

    Args:
        levels: the integer levels.
        shape: shape of the scale.
        learn: the gradients of scale and zero point; None when both are fixed.
        of_x: whether the values need a gradient.
    """

    def __init__(
        self, levels: Levels, shape: tuple[int, ...], learn: Learn | None, of_x: bool = True
    ) -> None:
        super().__init__()
        self.levels, self.shape, self.learn, self.of_x = levels, shape, learn, of_x

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Computes ``clip(round(x / |scale|), qmin - zp, qmax - zp) * |scale|``.

        Args:
            x: float32 tensor of any shape.
            scale: float32, broadcastable to ``x``.
            zero_point: float32 holding integers, of the shape of ``scale``.
        """
        self.arrays: tuple[np.ndarray, ...] | None = None
        if fits(x):
            arrays = x.numpy(), scale.numpy().reshape(self.shape), zero_point.numpy().reshape(self.shape)
            rounded = round_array(*arrays, self.levels)
            self.arrays = (*arrays, rounded)
            return as_tensor(rounded, x)
        (y,) = programs(self.levels, str(x.device)).round(x, scale, zero_point)
        self.saved = (x, scale, zero_point, None if self.learn is None else y)
        return y

    def backward(self, grad: Tensor) -> tuple[Any, Any, Any]:
        """Returns the gradients of x, of the scale and of the zero point (None if it is not learned)."""
        if self.arrays is not None:
            return self._by_arrays(grad, self.arrays)
        x, scale, zero_point, y = self.saved
        kernels, learn = programs(self.levels, str(grad.device)), self.learn
        if learn is None:
            return kernels.pass_inside(x, scale, zero_point, grad)[0], None, None
        if learn.residual:
            grad_x, terms = kernels.with_residual(x, scale, zero_point, grad, y)
        else:
            grad_x, terms = kernels.without_residual(x, scale, zero_point, grad, y)
        (grad_scale,) = of_magnitude(learn.gain, str(grad.device))(_sum_to(terms, self.shape), scale)
        grad_zero = None
        if learn.zero_point:
            grad_zero = F.abs(scale) * _sum_to(grad - grad_x, self.shape) * -learn.gain
        return grad_x, grad_scale, grad_zero

    def _by_arrays(self, grad: Tensor, arrays: tuple[np.ndarray, ...]) -> tuple[Any, Any, Any]:
        gradients = differentiate(arrays, grad.numpy(), self.levels, self.learn, self.of_x)
        x, scale, zero = (None if g is None else as_tensor(g, grad) for g in gradients)
        return x, scale, zero


def _sum_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums ``a`` over the axes along which a tensor of ``shape`` was broadcast."""
    axes = [i for i, size in enumerate(shape) if size == 1]
    kept_axes = len(shape) - len(axes)
    if kept_axes == 0:
        return a.sum().reshape(shape)
    if axes and axes[0] == kept_axes:  # each sum is of one contiguous row
        return F.sum(a.reshape(math.prod(shape), -1), axis=1).reshape(shape)
    return F.sum(a, axis=axes, keepdims=True) if axes else a


def quant_dequant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    levels: Levels,
    shape: tuple[int, ...],
    learn: Learn | None = None,
) -> Tensor:
    """Fake-quantizes ``x`` as the module's docstring defines.

    Args:
        x: floats of any shape; float16, as under ``megengine.amp``, is rounded as float32.
        scale: float32, broadcastable to ``x``; its magnitude is applied, since a learned scale may have
            crossed zero; the gradient has the scale's sign.
        zero_point: float32 holding integers, of the shape of ``scale``; None if ``levels`` has it.
        levels: the integer levels.
        shape: the shape of ``scale``, known before the call (it is symbolic under ``jit.trace``).
        learn: the gradients of scale and zero point; None when both are fixed.

    Returns:
        A float32 tensor of the shape of ``x`` with values ``(q - zero_point) * |scale|``.
    """
    if zero_point is None:
        zero_point = scale  # a placeholder that is not read
    if x.dtype != np.float32:
        x = x.astype("float32")
    of_x = get_grad_key((x,)) is not None
    return QuantDequant(levels, shape, learn, of_x)(x, scale, zero_point)


class _Positive(Function):
    """Computes the magnitude of a learned scale; an instance serves one call."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, scale: Tensor) -> Tensor:
        self.scale = scale
        return self._shaped(F.maximum(F.abs(scale), SMALLEST_SCALE))

    def backward(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # all its consumers treat the scale as fixed
            return None
        return self._shaped(grad * F.sign(self.scale))

    def _shaped(self, value: Tensor) -> Tensor:
        # In a Function, MegEngine turns scalars into vectors of one element.
        return value if self.shape else value.reshape(())


def positive(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Computes ``max(|scale|, SMALLEST_SCALE)`` of a learned scale; the gradient has the scale's sign.

    Args:
        scale: float32 scale, which may have crossed zero.
        shape: shape of ``scale``, known before the call.
    """
    return _Positive(shape)(scale)


class _StraightThrough(Function):
    """Applies a step function and lets the gradient pass; an instance serves one call."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def backward(self, grad: Tensor) -> Tensor:
        return grad


def straight_through(x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes ``step(x)`` with the gradient of x (Bengio et al. 2013).

    Args:
        x: a tensor of any shape.
        step: an elementwise function such as ``F.round``.
    """
    return _StraightThrough(step)(x)


def as_float32(value: float | np.ndarray) -> Tensor:
    """Converts ``value`` to a float32 Tensor."""
    return Tensor(np.asarray(value, dtype=np.float32))
