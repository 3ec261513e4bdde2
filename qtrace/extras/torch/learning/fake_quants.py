"""Fake quants and roundings in torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from megengine import Parameter

from qtrace.extras.torch.learning.layers import LAYERS, batch_norm
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.dorefa import MIN_PEAK_SHARE, PEAK_SHARE, DoReFaFakeQuant
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.following.bias import BIAS_LIMIT, BIAS_QMAX, BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DYNAMIC_LEVELS, DynamicQuant
from qtrace.fakequant.kernels import MARGIN_SHARE, Learn, Levels
from qtrace.fakequant.learned_range import LearnedRangeFakeQuant
from qtrace.fakequant.lsq import LSQFakeQuant
from qtrace.fakequant.lsq_plus import LSQPlusFakeQuant
from qtrace.fakequant.pact import PACTFakeQuant
from qtrace.fakequant.tqt import TQTFakeQuant
from qtrace.numerics import SMALLEST_NORMAL, SMALLEST_SCALE, SMALLEST_SHARE

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
    """Forward and backward of ``qtrace.fakequant.kernels.QuantDequant``.

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


Leaf = Callable[[Any], Any]
"""Gives the tensor of torch for a Tensor of the MegEngine module."""

_BIAS_LEVELS = Levels(-BIAS_QMAX, BIAS_QMAX, rounding="half_away", zero=0, min_scale=SMALLEST_NORMAL)


def _stored(fake: Any, leaf: Leaf) -> tuple[Any, Any]:
    return leaf(fake.scale), leaf(fake.zero_point)


def _learned_range(fake: Any, leaf: Leaf) -> tuple[Any, Any]:
    scheme, high = fake.scheme, leaf(fake.high)
    if scheme.symmetric:
        steps = scheme.qmax - scheme.symmetric_zero_point
        return larger(absolute(high) / steps, SMALLEST_SCALE), leaf(fake.zero_point)
    low, high = smaller(leaf(fake.low), 0.0), larger(high, 0.0)
    scale = larger((high - low) / (scheme.qmax - scheme.qmin), SMALLEST_SCALE)
    zero_point = clip(scheme.qmin - low / scale, scheme.qmin, scheme.qmax)
    return scale, straight_through(zero_point, round_away)


def _lsq_plus(fake: Any, leaf: Leaf) -> tuple[Any, Any]:
    scheme = fake.scheme
    if scheme.symmetric:
        return _stored(fake, leaf)
    scale = larger(absolute(leaf(fake.scale)), SMALLEST_SCALE)
    zero_point = clip(-leaf(fake.offset) / scale, scheme.qmin, scheme.qmax)
    return scale, straight_through(zero_point, round_away)


def _pact(fake: Any, leaf: Leaf) -> tuple[Any, Any]:
    zero_point = leaf(fake.zero_point)
    steps = fake.scheme.qmax - zero_point
    if not fake.scheme.symmetric:
        steps = torch.maximum(steps, zero_point - fake.scheme.qmin)
    return larger(absolute(leaf(fake.bound)) / steps, SMALLEST_SCALE), zero_point


class _NextPowerOfTwo(torch.autograd.Function):
    """Computes ``2**ceil(x)`` with the gradient of ``2**x`` at ``ceil(x)``."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.power = torch.exp2(x.ceil())
        return ctx.power.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.power * math.log(2.0)


def _tqt(fake: Any, leaf: Leaf) -> tuple[Any, Any]:
    bits = fake.scheme.bits - fake.scheme.signed
    scale = _NextPowerOfTwo.apply(leaf(fake.log2_threshold) - bits)
    return larger(scale, SMALLEST_SCALE), leaf(fake.zero_point)


_DERIVED: dict[type, Callable[[Any, Leaf], tuple[Any, Any]]] = {
    DoReFaFakeQuant: _stored,
    FixedFakeQuant: _stored,
    LSQFakeQuant: _stored,
    LearnedRangeFakeQuant: _learned_range,
    LSQPlusFakeQuant: _lsq_plus,
    PACTFakeQuant: _pact,
    TQTFakeQuant: _tqt,
}


def stored_parameters(fake: FakeQuant, leaf: Leaf) -> tuple[Any, Any]:
    """Returns the scale and the zero point that ``fake`` rounds with."""
    scale, zero_point = _DERIVED[type(fake)](fake, leaf)
    return scale, zero_point


def shaped(fake: Any, x: Any, leaf: Leaf) -> Any:
    """Returns what is rounded: ``x``, or the transformed weight of DoReFa."""
    if not fake.transforms:
        return x
    transformed = torch.tanh(x)
    axes = [axis for axis, size in enumerate(fake.shape) if size == 1]
    peak = magnitude = absolute(transformed)
    if axes or not fake.shape:
        # The gradient goes to every value that equals the maximum, as in MegEngine.
        over = axes or list(range(x.ndim))
        top = magnitude.detach().amax(over, keepdim=True)
        peak = ((magnitude - magnitude.detach()) * (magnitude.detach() == top)).sum(over, keepdim=True) + top
        peak = peak if axes else peak.reshape(())
    steps = fake.scheme.qmax - fake.scheme.symmetric_zero_point
    reach = leaf(fake.scale) * (steps * PEAK_SHARE)
    floor = larger(reach * MIN_PEAK_SHARE, SMALLEST_SCALE)
    return transformed / larger(peak, floor) * reach


def fake_quant(fake: FakeQuant, leaf: Leaf, x: Any) -> Any:
    """Computes what the module ``fake`` computes of ``x`` in its phase."""
    if fake.phase in ("float", "observe"):
        return x
    scale, zero_point = _DERIVED[type(fake)](fake, leaf)
    blocks = _in_blocks(fake, x)
    rounded = quant_dequant(
        shaped(fake, blocks, leaf), scale, zero_point, Levels.of(fake.scheme), fake.learning
    )
    return rounded if fake.scheme.block is None else rounded.reshape(len(x), -1)[:, : x.shape[1]]


def _in_blocks(fake: FakeQuant, x: Any) -> Any:
    """Views a weight as `FakeQuant.in_blocks` does."""
    size = fake.scheme.block
    if size is None:
        return x
    outputs, count = fake.shape[:2]
    return torch.nn.functional.pad(x, (0, count * size - x.shape[1])).reshape(outputs, count, size)


def dynamic_quant(module: DynamicQuant, leaf: Leaf, x: Any) -> Any:
    """Computes what a `DynamicQuant` computes."""
    if module.phase in ("float", "observe"):
        return x
    values = x.detach()
    low, high = values.min().clamp(max=0.0), values.max().clamp(min=0.0)
    scale = (high - low) / 255.0
    scale = torch.where(scale > 0.0, scale, torch.ones_like(scale))
    zero_point = torch.round((-low / scale).clamp(0.0, 255.0))
    return quant_dequant(x, scale, zero_point, DYNAMIC_LEVELS)


def _effective_scale(fake: FakeQuant, leaf: Leaf) -> Any:
    scale = _DERIVED[type(fake)](fake, leaf)[0]
    return positive(scale) if isinstance(fake.scale, Parameter) else scale


def _round_bias(module: BiasQuant, bias: Any, activation: Any, weight: Any) -> Any:
    shape = module.shape if weight.ndim > 1 else ()
    if module.factor != 1.0:
        activation = activation * module.factor
    scale = (activation * weight).reshape(shape).detach()  # it gets no gradient from a bias
    return quant_dequant(bias, scale, None, _BIAS_LEVELS)


def bias_quant(module: BiasQuant, leaf: Leaf, bias: Any, activation: FakeQuant, weight: FakeQuant) -> Any:
    """Computes what a `BiasQuant` computes, from the fake quants of the layer's input and weight."""
    if module.phase in ("float", "observe"):
        return bias
    scales = (_DERIVED[type(fake)](fake, leaf)[0] for fake in (activation, weight))
    return _round_bias(module, bias, *scales)


def bn_fold(
    module: BnFold, leaf: Leaf, x: Any, weight: Any, bias: Any, bn: Any, weight_quant: Any, source: Any
) -> Any:
    """Computes what a `BnFold` computes: layer and BatchNorm in training, a folded layer in evaluation."""
    layer = LAYERS[module.kind]
    if bn.training or module.phase in ("float", "observe"):
        return batch_norm(bn, layer(x, fake_quant(weight_quant, leaf, weight), bias, **module.options), leaf)
    folded, shift, scale = _fold(module, weight, bias, bn, weight_quant, source, leaf)
    levels = Levels.of(weight_quant.scheme)
    quantized = quant_dequant(folded, scale, leaf(weight_quant.zero_point), levels, weight_quant.learning)
    if source is not None:
        shift = _round_bias(module.bias_quant, shift, _DERIVED[type(source)](source, leaf)[0], scale)
    return layer(x, quantized, shift, **module.options)


def _fold(
    module: BnFold, weight: Any, bias: Any, bn: Any, weight_quant: Any, source: Any, leaf: Leaf
) -> tuple[Any, Any, Any]:
    """Computes the folded weight and bias, and the scales of the folded weight."""
    gain = 1.0 / torch.sqrt(leaf(bn.running_var).reshape(-1) + bn.eps)
    if bn.weight is not None:
        gain = gain * leaf(bn.weight).reshape(-1)
    shift = -leaf(bn.running_mean).reshape(-1) * gain
    if bias is not None:
        shift = shift + bias.reshape(-1) * gain
    if bn.bias is not None:
        shift = shift + leaf(bn.bias).reshape(-1)
    gain = gain.reshape(weight_quant.shape)
    scale = _effective_scale(weight_quant, leaf) * absolute(gain)
    scale = larger(scale, larger(scale.amax() * SMALLEST_SHARE, SMALLEST_SCALE))
    if source is not None:
        smallest = absolute(shift) / (_effective_scale(source, leaf) * BIAS_LIMIT)
        scale = larger(scale, smallest.reshape(weight_quant.shape))
    return shaped(weight_quant, weight, leaf) * gain, shift.reshape(module.bias_shape), scale


MODULES: tuple[type, ...] = (*_DERIVED, BiasQuant, BnFold, DynamicQuant)
"""The classes of a prepared graph's own modules that have a form in torch."""
