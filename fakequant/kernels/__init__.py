"""The forward and backward programs of fake quants, compiled once for each form.

On small tensors, one op per kernel would take longer than the kernels: on CPU, MegEngine needs about 70 us to
pass an op to its threads. In eager mode and without a queue, small tensors are therefore computed in numpy,
whose calls take a microsecond: bit by bit the same but for sums.

Forward, with s the magnitude of the scale and v = x / s: q = clip(round(v), qmin - z, qmax - z),
y = q * s. This is ONNX's QuantizeLinear followed by DequantizeLinear in float32, operation by operation.

Backward (straight through; Esser et al. 2020, "Learned Step Size Quantization", eq. 3, written for
q relative to the zero point, which makes it hold for affine schemes too)::

    dy/dx = 1      inside,  0 outside       inside: qmin - z <= v <= qmax - z
    dy/ds = q - v  inside,  q outside       q is then qmin - z or qmax - z
    dy/dz = 0      inside, -s outside

A value beyond a bound by less than a millionth of the range counts as inside.

A fake quant that learns a zero point, a threshold or the ends of a range derives s and z from it with
differentiable operations. The chain rule then gives the formula of its paper. `Learn` selects the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import megengine.functional as F
import numpy as np
from megengine import Tensor, config
from megengine.autodiff import Function
from megengine.core._imperative_rt.common import CompNode
from megengine.core._imperative_rt.core2 import get_grad_key
from megengine.core.ops.builtin import Elemwise
from megengine.core.tensor.utils import subgraph_fn
from megengine.jit.tracing import is_tracing
from pydantic import BeforeValidator, Field

from qtrace.gradients.conv import CPUS
from qtrace.numerics import SMALLEST_SCALE
from qtrace.plugins.options import Bool, Float, show
from qtrace.scheme import QScheme, Rounding

__all__ = [
    "MARGIN_SHARE",
    "Gradients",
    "Learn",
    "Levels",
    "Programs",
    "QuantDequant",
    "StepGain",
    "as_float32",
    "as_tensor",
    "differentiate",
    "fits",
    "of_magnitude",
    "positive",
    "programs",
    "quant_dequant",
    "round_array",
    "step_gain",
    "straight_through",
]


# The elementwise arithmetic of quantize-dequantize, each direction as one op of several kernels.

# Adding 1.5 * 2**23 leaves a float32 no fraction bits: the FPU rounds half to even. Three passes of
# 0.35 ms for 1.6 M values instead of 6.5 ms for F.round. The upper clip must be between the addition
# and the subtraction, or else jit.trace cancels the pair at its default opt_level. The lower clip comes
# before: its bound is an integer, which rounding does not change.
_ROUNDING_OFFSET = 1.5 * 2.0 ** np.finfo(np.float32).nmant
# Values beyond the ends by this share of the range count as inside. It exceeds the rounding error of `_line`
# in float32, so that the ends themselves are inside.
MARGIN_SHARE = 2.0**-20

# An array is a copy, which lives until the gradients are computed: larger tensors would take much memory.
_MOST_VALUES = 1 << 18

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
class Learn:
    """Selects the gradients of scale and zero point.

    Attributes:
        gain: factor on the gradients of scale and zero point.
        residual: True if values inside the range add their rounding to the gradient (LSQ), False if only
            values outside count, with the level they clip to (PACT).
        zero_point: whether the zero point gets a gradient.
    """

    gain: float = 1.0
    residual: bool = True
    zero_point: bool = False


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


def _line_of(levels: Levels) -> tuple[float, float]:
    """Returns slope and offset of a line in ``x / scale + zero`` that is in [0, 6] inside the range."""
    low, high = levels.qmin, levels.qmax
    slope = 6.0 / ((high - low) * (1.0 + 2.0 * MARGIN_SHARE))
    return slope, 3.0 - slope * (low + high) / 2


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
        (slope, middle), fixed = _line_of(self.levels), self.levels.zero
        if fixed is None:
            offset = f(_FMA, zero, c(slope), c(middle))
        else:
            offset = c(fixed * slope + middle)
        size = _magnitude(scale, self.levels.min_scale, f, c)
        # Not fused: with one number per channel, the fused kernel takes four times as long.
        return f(_ADD, f(_MUL, x, f(_DIV, c(slope), size)), offset)


def fits(x: Tensor) -> bool:
    """Whether arrays are computed in the place of a tensor: it is small, and on a CPU without a queue.

    A trace records ops, and after a queue an array has to wait for all of it.
    """
    if is_tracing() or config.async_level != 0:
        return False
    shape = x._tuple_shape
    if shape is None or not 0 < math.prod(shape) <= _MOST_VALUES:
        return False
    return x.format != "nhwc" and _is_cpu(x.device)


def as_tensor(values: np.ndarray, like: Tensor) -> Tensor:
    """Returns a tensor of ``values`` on the device of ``like``, which keeps no array of them."""
    return Tensor(values, device=like.device, no_cache=True)


@lru_cache(maxsize=64)
def _is_cpu(device: Any) -> bool:
    return str(device.physical_name).startswith(CPUS)


@lru_cache(maxsize=256)
def _numbers(levels: Levels) -> tuple[np.float32, ...]:
    """Returns the ends of the range in float32, the upper one with the rounding offset, too."""
    fixed = levels.zero or 0
    low, high = levels.qmin - fixed, levels.qmax - fixed
    upper = levels.qmax + _ROUNDING_OFFSET - fixed
    return np.float32(low), np.float32(high), np.float32(upper)


def _size(scale: np.ndarray, levels: Levels) -> np.ndarray:
    return np.maximum(np.abs(scale), np.float32(levels.min_scale))


@np.errstate(all="ignore")  # as MegEngine computes
def round_array(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, levels: Levels) -> np.ndarray:
    """Computes ``clip(round(x / |scale|), qmin - zero, qmax - zero) * |scale|``.

    Args:
        x: float32.
        scale: float32, broadcastable to ``x``.
        zero: float32 holding integers, of the shape of ``scale``; it is not read if ``levels`` has it.
        levels: the integer levels.
    """
    size = _size(scale, levels)
    ends: Any = _numbers(levels)
    if levels.zero is None:
        ends = [end - zero for end in ends]
    low, high, upper = ends
    y = np.asarray(np.divide(x, size))
    np.fmax(y, low, out=y)
    if levels.rounding == "half_even":
        y += np.float32(_ROUNDING_OFFSET)
        np.minimum(y, upper, out=y)
        y -= np.float32(_ROUNDING_OFFSET)
    elif levels.rounding == "half_away":
        np.minimum(y, high, out=y)
        whole = np.trunc(y)
        np.add(whole, np.copysign(np.abs(y - whole) >= 0.5, y), out=y)
    else:
        np.minimum(y, high, out=y)
        whole = np.floor(y)
        fraction = y - whole
        fraction += fraction
        np.minimum(np.floor(fraction), np.float32(1), out=fraction)
        np.add(whole, fraction, out=y)
    y *= size
    return y


class Gradients(NamedTuple):
    """The gradients of one call.

    Attributes:
        x: the gradient of the values; None if nobody asked for it.
        scale: the gradient of the scale; None if it is not learned.
        zero: the gradient of the zero point; None if it is not learned.
    """

    x: np.ndarray | None
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None


@np.errstate(all="ignore")
def differentiate(
    saved: tuple[np.ndarray, ...], grad: np.ndarray, levels: Levels, learn: Learn | None, of_x: bool = True
) -> Gradients:
    """Computes the gradients of `round_array`.

    Args:
        saved: x, scale and zero point as for `round_array`, and its result.
        grad: the gradient of the result.
        levels: the integer levels.
        learn: the gradients of scale and zero point; None when both are fixed.
        of_x: whether the values need a gradient.
    """
    x, scale, zero, y = saved
    size, (slope, middle) = _size(scale, levels), _line_of(levels)
    line = x * (np.float32(slope) / size)
    if levels.zero is None:
        line += zero * np.float32(slope) + np.float32(middle)
    else:
        line += np.float32(levels.zero * slope + middle)
    outside = line <= 0
    outside |= line >= 6
    mask = outside.astype(np.int32)
    mask -= 1
    asked = of_x or learn is None or learn.zero_point
    passed = _selected(grad, mask) if asked else None
    if learn is None:
        return Gradients(passed)
    terms = y - _selected(x if learn.residual else y, mask)
    terms *= grad
    if levels.min_scale != SMALLEST_SCALE:
        size = np.maximum(np.abs(scale), np.float32(SMALLEST_SCALE))
    of_scale = _sum_array_to(terms, scale.shape) / size * np.float32(learn.gain) * (scale / size)
    if passed is None or not learn.zero_point:
        return Gradients(passed, of_scale)
    of_zero = np.abs(scale) * _sum_array_to(grad - passed, scale.shape) * np.float32(-learn.gain)
    return Gradients(passed, of_scale, of_zero)


def _selected(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns ``values`` where ``mask`` is -1, and 0 where it is 0, infinite ones too.

    A tenth of the time of `numpy.where`.
    """
    return (np.ascontiguousarray(values).view(np.int32) & mask).view(np.float32)


def _sum_array_to(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over the axes along which an array of ``shape`` was broadcast."""
    missing = values.ndim - len(shape)
    axes = (*range(missing), *(missing + i for i, size in enumerate(shape) if size == 1))
    return np.asarray(values.sum(axis=axes, dtype=np.float32)).reshape(shape)


_ADD, _SUB, _MUL, _DIV = (Elemwise(mode=mode) for mode in ("ADD", "SUB", "MUL", "TRUE_DIV"))
_MAX, _MIN, _ABS = (Elemwise(mode=mode) for mode in ("MAX", "MIN", "ABS"))
_ROUND, _FLOOR = Elemwise(mode="ROUND"), Elemwise(mode="FLOOR")
_FMA, _PASS = Elemwise(mode="FUSE_MUL_ADD3"), Elemwise(mode="RELU6_GRAD")


# The quantize-dequantize operation with its gradients.


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


# The factor on the gradient of a learned step size.


def _gain(value: Any) -> Any:
    number = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    if not isinstance(value, bool) and not number:
        raise ValueError(f"choose true (1 / sqrt(N * Q)), false (1) or a number above 0, not {show(value)}.")
    return value


StepGain = Annotated[Bool | Annotated[Float, Field(gt=0)], BeforeValidator(_gain)]
"""The option ``grad_scale``: true, false or a number above 0."""


def step_gain(grad_scale: bool | float, scheme: QScheme, numel: int) -> float:
    """Returns ``1 / sqrt(N * Q)`` of Esser et al. 2020, section 2.2, or the option's own factor.

    With this factor, an optimizer step changes a scale and the weights by about the same share.

    Args:
        grad_scale: True for the paper's factor, False for 1, or the factor itself.
        scheme: the scheme; Q is the number of its positive levels, or of all levels if it is affine.
        numel: N, the number of values of a parameter, or of one sample of an activation, that share the
            scale.
    """
    if grad_scale is True:
        levels = scheme.qmax if scheme.symmetric else scheme.qmax - scheme.qmin
        return 1.0 / math.sqrt(numel * levels)
    return 1.0 if grad_scale is False else grad_scale
