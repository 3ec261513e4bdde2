"""The fake quants and the modules that follow them, in torch: one function for each class."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megengine import Parameter

from qtrace.extras.torch.learning.layers import LAYERS, batch_norm
from qtrace.extras.torch.learning.rounding import (
    absolute,
    clip,
    larger,
    positive,
    quant_dequant,
    round_away,
    smaller,
    straight_through,
)
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.dorefa import MIN_PEAK_SHARE, PEAK_SHARE, DoReFaFakeQuant
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.following.bias import BIAS_LIMIT, BIAS_QMAX, BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DYNAMIC_LEVELS, DynamicQuant
from qtrace.fakequant.kernels.kernel import Levels
from qtrace.fakequant.learned_range import LearnedRangeFakeQuant
from qtrace.fakequant.lsq import LSQFakeQuant
from qtrace.fakequant.lsq_plus import LSQPlusFakeQuant
from qtrace.fakequant.pact import PACTFakeQuant
from qtrace.fakequant.tqt import TQTFakeQuant
from qtrace.numerics import SMALLEST_NORMAL, SMALLEST_SCALE, SMALLEST_SHARE

__all__ = [
    "MODULES",
    "Leaf",
    "bias_quant",
    "bn_fold",
    "dynamic_quant",
    "fake_quant",
    "shaped",
    "stored_parameters",
]

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
