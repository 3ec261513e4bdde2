"""The arithmetic of quantization in numpy: the reference that graphs, exporters and tests are held to.

``q = saturate(round(x / scale) + zero_point)`` and ``x = (q - zero_point) * scale`` are the operators
QuantizeLinear and DequantizeLinear of ONNX (https://onnx.ai/onnx/operators). The division is true, and in the
precision of x. The mapping follows Jacob et al. 2018, "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", section 2.1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qtrace.errors import SchemeError
from qtrace.scheme import QParams, QScheme, Rounding

GAP = 8.0
"""Between the numbers that stand for infinity, such as those of a mask, and all others."""

# The smallest normal float32: runtimes, MegEngine among them, flush smaller ones to zero.
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
# The smallest scale: the product of two, which is the scale of a bias, is still a normal float32. So is its
# square, by which `jit.trace` divides where the gradient of a learned scale divides twice.
SMALLEST_SCALE = math.sqrt(SMALLEST_NORMAL)
EXACT_INTEGERS = 2 ** (np.finfo(np.float32).nmant + 1)
"""Float32 holds each whole number up to this one."""
# The smallest scale of a channel, as a share of the largest one of its tensor: a float32 that is added to one
# `EXACT_INTEGERS` times as large vanishes, and so do the channel's values in every activation of up to 16
# bits.
SMALLEST_SHARE = 1.0 / EXACT_INTEGERS
# The number of values that are computed at a time, which stay in the cache.
_BLOCK = 1 << 15


def round_half_away(x: Any) -> np.ndarray:
    """Rounds to the nearest integer, ties away from zero; float in, the same float type out.

    The fraction is exact in floating point, unlike ``floor(x + 0.5)``, which takes 0.49999997f to 1.
    """
    x = np.asarray(x)
    whole = np.trunc(x)
    with np.errstate(invalid="ignore"):  # inf - inf: the comparison says False, inf stays
        tie_or_more = np.abs(x - whole) >= 0.5
    return np.asarray(whole + np.copysign(tie_or_more.astype(whole.dtype), x))


def round_half_up(x: Any) -> np.ndarray:
    """Rounds to the nearest integer, ties to the larger one; float in, the same float type out.

    A fraction that becomes 1 in floating point, as for a tiny negative number, counts as 1.
    """
    x = np.asarray(x)
    whole = np.floor(x)
    with np.errstate(invalid="ignore"):  # inf - inf: the comparison says False, inf stays
        tie_or_more = x - whole >= 0.5
    return np.asarray(whole + tie_or_more.astype(whole.dtype))


_ROUNDINGS: Any = {"half_even": np.rint, "half_away": round_half_away, "half_up": round_half_up}


def round_to(x: Any, rounding: Rounding) -> np.ndarray:
    """Rounds floats of any shape to integers in the manner of `QScheme.rounding`."""
    return np.asarray(_ROUNDINGS[rounding](x))


def expand(param: np.ndarray, axis: int | None, ndim: int) -> np.ndarray:
    """Views a scale or zero point so that it broadcasts against its tensor.

    Args:
        param: shape ``()`` per tensor, or ``(C,)`` per channel.
        axis: the tensor's axis of channels (may be negative); None per tensor.
        ndim: the rank of the tensor.

    Returns:
        A view of shape ``()``, or of rank `ndim` with C at `axis` and 1 elsewhere.

    Raises:
        SchemeError: when the tensor lacks the axis, or the shapes do not fit.
    """
    if axis is None and param.ndim == 0:
        return param
    if axis is None or param.ndim != 1:
        raise SchemeError(
            f"a parameter of shape {param.shape} does not fit axis {axis}: (C,) goes with an axis."
        )
    if not -ndim <= axis < ndim:
        raise SchemeError(f"channel axis {axis} lies outside a tensor of rank {ndim}: choose another axis.")
    shape = [1] * ndim
    shape[axis] = param.size
    return param.reshape(shape)


def grid(lo: Any, hi: Any, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    """Computes the scale and zero point with which `scheme` covers ranges, without the checks of `choose`.

    Each range is treated by itself: no scale is smaller than 2**-126, and none depends on the others.

    Args:
        lo, hi: float64 arrays of any shapes that broadcast, finite, ``lo <= hi``.
        scheme: the scheme of the tensor.

    Returns:
        The scale (float32) and the zero point (int32), of the broadcast shape.
    """
    lo = np.minimum(np.asarray(lo, np.float64), 0.0)
    hi = np.maximum(np.asarray(hi, np.float64), 0.0)
    if scheme.symmetric:
        span, steps = np.maximum(-lo, hi), scheme.qmax - scheme.symmetric_zero_point
    else:
        span, steps = hi - lo, scheme.qmax - scheme.qmin
    scale = np.where(span > 0, span, 1.0) / steps
    if scheme.power_of_two:
        mantissa, exponent = np.frexp(scale)  # in [0.5, 1): 0.5 is a power of two itself
        scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
    with np.errstate(over="ignore"):
        scale = np.asarray(np.maximum(scale, SMALLEST_NORMAL)).astype(np.float32)
    if scheme.symmetric:
        return scale, np.full(scale.shape, scheme.symmetric_zero_point, np.int32)
    # The zero point follows from the scale as rounded to float32, which is the one in use.
    zero_point = round_to(scheme.qmin - lo / scale.astype(np.float64), scheme.rounding)
    return scale, np.clip(zero_point, scheme.qmin, scheme.qmax).astype(np.int32)


def choose(lo: Any, hi: Any, scheme: QScheme) -> QParams:
    """Chooses scale and zero point so that a range is covered and 0.0 is exactly representable.

    The range is widened to contain 0. A symmetric scheme covers ``max(|lo|, |hi|)`` on both sides. Else the
    scale is ``(hi - lo) / (qmax - qmin)``, and the zero point is rounded in the scheme's manner. That may
    shift the covered range by half a step. A power-of-two scale is rounded up, so that nothing clips. A range
    of nothing but 0 is treated as [0, 1].

    Dead channels do not get scales of their own size: a range that is smaller than 2**-24 of the tensor's
    largest is widened to that share. A tensor whose largest scale would be smaller than 2**-63 counts as 0.

    Args:
        lo, hi: the ends of the range, scalars per tensor or of shape ``(C,)`` per channel.
        scheme: the scheme of the tensor.

    Returns:
        Parameters of shape ``()`` or ``(C,)``.

    Raises:
        SchemeError: when an end is not finite, ``lo > hi``, the range is too wide for float32, or the shapes
            do not fit the scheme.
    """
    try:
        low, high = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    except (TypeError, ValueError):
        raise SchemeError(
            f"choose: {lo!r} to {hi!r} is no range: give two numbers, or one pair per channel."
        ) from None
    for end in (low, high):
        if not np.isfinite(end).all():
            raise SchemeError(f"choose: a range ends at {end[~np.isfinite(end)][0]}: give finite ends.")
    crossed = low > high
    if crossed.any():
        raise SchemeError(f"choose: lo {low[crossed][0]} exceeds hi {high[crossed][0]}: swap the ends.")
    with np.errstate(over="ignore"):
        scale, zero_point = grid(*_widen(low, high, scheme), scheme)
    if np.isinf(scale).any():
        raise SchemeError("choose: the range is so wide that float32 cannot hold its scale: clip the tensor.")
    return QParams(scheme, scale, zero_point)


def alive(sizes: np.ndarray) -> np.ndarray:
    """Returns which channels have at least `SMALLEST_SHARE` of the magnitude of the largest channel.

    Args:
        sizes: the largest magnitude of each channel, shape (C,).

    Returns:
        bool (C,); False for a channel of zeros.
    """
    return (sizes > 0) & (sizes >= SMALLEST_SHARE * sizes.max(initial=0.0))


def _widen(lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    """Widens the ranges of dead channels as `choose` does, and sets the ranges of a dead tensor to 0."""
    lo, hi = np.minimum(lo, 0.0), np.maximum(hi, 0.0)
    steps = scheme.qmax - (scheme.symmetric_zero_point if scheme.symmetric else scheme.qmin)
    span = np.maximum(-lo, hi) if scheme.symmetric else hi - lo
    if not span.size or span.max() < SMALLEST_SCALE * steps:
        return np.zeros_like(lo), np.zeros_like(hi)
    smallest = np.maximum(SMALLEST_SHARE * span.max(), SMALLEST_SCALE * steps)
    dead = (span > 0) & (span < smallest)
    factor = np.where(dead, smallest / np.where(dead, span, 1.0), 1.0)
    return lo * factor, hi * factor


def quantize(x: Any, qparams: QParams, dtype: Any = np.int32) -> np.ndarray:
    """Computes ``saturate(round(x / scale) + zero_point)``, as ONNX's QuantizeLinear does.

    Infinities saturate; NaN becomes `qmin`, as in onnxruntime.

    Args:
        x: numbers of any shape; the arithmetic is float32, or float64 when x is.
        qparams: the parameters; per channel along ``qparams.scheme.axis``.
        dtype: the type of the integers, which may be one of floats that has them.

    Returns:
        Integers in ``[qmin, qmax]``, of the shape of x.

    Raises:
        SchemeError: when x lacks the axis or another number of channels.
    """
    x, scheme = _floats(x), qparams.scheme
    scale, zero_point = (param.astype(x.dtype) for param in _broadcast_params(qparams, x))
    with np.errstate(over="ignore"):
        if scale.ndim:
            return _saturated(x, scale, zero_point, scheme, np.empty(x.shape, x.dtype)).astype(dtype)
        values, levels = np.ascontiguousarray(x).reshape(-1), np.empty(x.size, dtype)
        scratch = np.empty(min(x.size, _BLOCK), x.dtype)
        for start in range(0, x.size, _BLOCK):
            part = values[start : start + _BLOCK]
            levels[start : start + _BLOCK] = _saturated(part, scale, zero_point, scheme, scratch[: part.size])
        return levels.reshape(x.shape)


def _saturated(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, scheme: QScheme, out: np.ndarray
) -> np.ndarray:
    """Computes the integers of x as floats, in ``out`` or in a new array."""
    np.divide(x, scale, out=out)
    q = np.rint(out, out=out) if scheme.rounding == "half_even" else round_to(out, scheme.rounding)
    np.add(q, zero_point, out=q)
    # fmax rather than clip: it takes NaN to qmin.
    return np.fmin(np.fmax(q, scheme.qmin, out=q), scheme.qmax, out=q)


def smallest_type(scheme: QScheme) -> np.dtype:
    """Returns the smallest type that has the integers of a scheme."""
    return np.min_scalar_type(scheme.qmin if scheme.qmin < 0 else scheme.qmax)


def quantize_bias(bias: np.ndarray, scale: np.ndarray, limit: int) -> np.ndarray:
    """Computes the integers of a bias: ``bias / scale`` in float32, rounded half away from zero.

    Args:
        bias: numbers of any shape.
        scale: the scale of the accumulator, broadcastable to ``bias``.
        limit: the largest magnitude of an integer; larger ones saturate.

    Returns:
        int32 of the shape of ``bias``.
    """
    steps = bias.astype(np.float32) / scale.astype(np.float32)
    return np.clip(round_half_away(steps.astype(np.float64)), -limit, limit).astype(np.int32)


def dequantize(q: Any, qparams: QParams) -> np.ndarray:
    """Computes ``(q - zero_point) * scale`` in float32, as ONNX's DequantizeLinear does.

    Args:
        q: integers of any shape.
        qparams: the parameters; per channel along ``qparams.scheme.axis``.

    Returns:
        float32 of the shape of q.

    Raises:
        SchemeError: when q lacks the axis or another number of channels.
    """
    q = np.asarray(q)
    scale, zero_point = _broadcast_params(qparams, q)
    # The difference has at most 17 bits: exact as int32 and as float32.
    if q.dtype.kind in "iu" and q.dtype.itemsize <= 2:
        values = np.asarray(np.subtract(q, zero_point, dtype=np.float32, casting="unsafe"))
    else:
        values = np.asarray(q.astype(np.int32, copy=False) - zero_point).astype(np.float32)
    return np.multiply(values, scale.astype(np.float32), out=values)


def fake_quantize(x: Any, qparams: QParams) -> np.ndarray:
    """Quantizes and dequantizes x: the nearest value that the integers can express.

    Args:
        x: numbers of any shape.
        qparams: the parameters; per channel along ``qparams.scheme.axis``.

    Returns:
        An array of the shape of x: float64 when x is, else float32.

    Raises:
        SchemeError: when x lacks the axis or another number of channels.
    """
    x = _floats(x)
    # Integers of a scheme and their differences are exact as float32: int32 between would take longer.
    values = quantize(x, qparams, x.dtype)
    scale, zero_point = _broadcast_params(qparams, values)
    np.subtract(values, zero_point.astype(x.dtype), out=values)
    return np.multiply(values, scale.astype(x.dtype), out=values)


def exact_levels(x: np.ndarray, qparams: QParams) -> np.ndarray | None:
    """Returns the integers of values that `dequantize` has given; None if a value is another one.

    These are the integers of `quantize`, found in a third of its time. They are found in blocks that stay in
    the cache, and by a product, which is off by less than half a step. That each value is the one of its
    integer is checked.

    Args:
        x: floats of any shape.
        qparams: the parameters; one scale for each channel gives None, too.

    Returns:
        The integers, of the shape of x, in their `smallest_type`.
    """
    scheme = qparams.scheme
    if x.dtype != np.float32 or qparams.scale.ndim:
        return None
    low, high, zero = scheme.qmin, scheme.qmax, np.float32(qparams.zero_point)
    scale, values = np.float32(qparams.scale), np.ascontiguousarray(x).reshape(-1)
    levels = np.empty(values.size, smallest_type(scheme))
    scratch = np.empty((2, min(values.size, _BLOCK)), np.float32)
    with np.errstate(all="ignore"):  # what overflows is no value of an integer
        inverse = np.float32(1.0) / scale
        for start in range(0, values.size, _BLOCK):
            part = values[start : start + _BLOCK]
            steps, back = scratch[:, : part.size]
            np.rint(np.multiply(part, inverse, out=steps), out=steps)
            if (np.multiply(steps, scale, out=back) != part).any():
                return None
            np.add(steps, zero, out=steps)
            if steps.min() < low or steps.max() > high:
                return None
            levels[start : start + _BLOCK] = steps
    return levels.reshape(x.shape)


def _floats(x: Any) -> np.ndarray:
    """Converts x to float32 (float16 too) or float64; numpy 1 would divide in float16."""
    x = np.asarray(x)
    small = x.dtype in (np.float16, np.float32)
    return x.astype(np.float32 if small else np.float64, copy=False)


def _broadcast_params(qparams: QParams, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and zero point in shapes that broadcast to x."""
    axis = qparams.scheme.axis
    if qparams.scheme.block is not None:
        return expand_blocks(qparams, x.shape)
    scale, zero_point = (expand(param, axis, x.ndim) for param in (qparams.scale, qparams.zero_point))
    if axis is not None and x.shape[axis] != scale.size:
        raise SchemeError(
            f"a tensor of shape {x.shape} has {x.shape[axis]} channels on axis {axis}, but its parameters "
            f"are for {scale.size}."
        )
    return scale, zero_point


def expand_blocks(qparams: QParams, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and zero point of each value of a weight with a scale per block of inputs.

    Args:
        qparams: the parameters.
        shape: the shape of the weight, (outputs, inputs).

    Raises:
        SchemeError: when the weight lacks such blocks, or another number of them.
    """
    block = qparams.scheme.block
    assert block is not None
    if len(shape) != 2 or qparams.scheme.axis not in (0, -2):
        raise SchemeError(f"a tensor of shape {shape} lacks blocks of inputs: give one of (outputs, inputs).")
    count = -(-shape[1] // block)
    if qparams.scale.size != shape[0] * count:
        raise SchemeError(
            f"a tensor of shape {shape} has {shape[0] * count} blocks of {block} inputs, but its parameters "
            f"are for {qparams.scale.size}."
        )
    scale, zero_point = (
        np.repeat(param.reshape(shape[0], count), block, axis=1)[:, : shape[1]]
        for param in (qparams.scale, qparams.zero_point)
    )
    return scale, zero_point
