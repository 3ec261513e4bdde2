"""The unit of each parameter: the distance by which a learning rate of 1 moves it.

Learning rates count in quantization steps. The unit of a weight is its scale. The unit of a range is the
change that moves the end of the range by one quantization step. So a step of the optimizer changes an 8-bit
network as little, compared with its rounding errors, as a 4-bit one.
"""

from __future__ import annotations

import numpy as np
from megengine import Parameter

from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import GetAttr
from qtrace.graph.walk import get_module
from qtrace.preparation.model import QuantizedModel

__all__ = ["Units", "range_unit", "size_of"]

_SMALLEST = 0.01  # the size of a parameter whose values are all 0
_RANGE_IN_RMS = 3.0  # the end of a range, in root mean squares of its tensor, where no weight is quantized


class Units:
    """The units of the parameters of a prepared graph.

    Biases, norms and weights that stay in float lack a quantization step. They move by the same share of
    their size as the median quantized weight of the network.

    Args:
        model: the prepared, calibrated graph.
    """

    def __init__(self, model: QuantizedModel) -> None:
        fakes = list(model.fake_quants.values())
        self._ranges = {
            id(parameter): range_unit(fake, parameter)
            for fake in fakes
            for parameter in fake.parameters(recursive=False)
        }
        self._weights = _weight_scales(model)
        shares = [_relative_step(*pair) for pair in self._weights.values()]
        shares = shares or [_RANGE_IN_RMS / float(np.max(_steps_to_end(fake))) for fake in fakes]
        self._share = float(np.median(shares)) if shares else _SMALLEST

    def of(self, parameter: Parameter) -> np.ndarray:
        """Returns the unit of a parameter, float32, broadcastable to its value."""
        if id(parameter) in self._ranges:
            return self._ranges[id(parameter)]
        if id(parameter) in self._weights:
            return self._weights[id(parameter)][1]
        return size_of(parameter.numpy()) * np.float32(self._share)


def range_unit(fake: FakeQuant, parameter: Parameter) -> np.ndarray:
    """Returns the change of a range's parameter that moves the end of the range by one quantization step.

    The logarithm of a power of two has unit 1, since smaller changes mostly leave the scale as it is.

    Args:
        fake: the fake quant that learns the range.
        parameter: a parameter of ``fake``.
    """
    value = parameter.numpy()
    if fake.scheme.power_of_two:
        return np.ones_like(value)
    scale = np.broadcast_to(fake.effective_scale().numpy(), value.shape)
    steps = np.broadcast_to(_steps_to_end(fake), value.shape)
    if parameter is fake.scale:
        return (scale / steps).astype(np.float32)
    return np.maximum(np.abs(value) / steps, scale).astype(np.float32)


def _steps_to_end(fake: FakeQuant) -> np.ndarray:
    """Returns the quantization steps between 0 and the end of the range that is farther from 0."""
    zero_point = fake.effective_zero_point().numpy()
    return np.maximum(fake.scheme.qmax - zero_point, zero_point - fake.scheme.qmin)


def _weight_scales(model: QuantizedModel) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Maps the id of each quantized weight to its value and scale; the smallest scale of a shared weight."""
    weights: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for site in model.sites:
        expr = site.node.expr
        if site.sort != "weight" or not isinstance(expr, GetAttr):
            continue
        parameter = get_module(model.module, expr.name)
        if not isinstance(parameter, Parameter):
            continue
        scale, _ = site.fake_quant.grid_of(parameter.numpy().shape)
        if id(parameter) in weights:
            scale = np.minimum(scale, weights[id(parameter)][1])
        weights[id(parameter)] = parameter.numpy(), scale.astype(np.float32)
    return weights


def _relative_step(value: np.ndarray, scale: np.ndarray) -> float:
    """Returns the step of a weight relative to its root mean square, as the median over its channels."""
    return float(np.median(scale / size_of(value)))


def size_of(value: np.ndarray) -> np.ndarray:
    """Returns the root mean square of a parameter, of a weight by output channel.

    Args:
        value: a weight, output channels first (linear, convolution; with groups: after the groups), or a
            bias or the parameter of a norm; not empty.

    Returns:
        An array that broadcasts to ``value``; a channel that is next to 0 counts as a hundredth of the whole.
    """
    whole = float(np.sqrt(np.mean(np.square(value, dtype=np.float64))))
    axes = tuple(range(1 if value.ndim < 5 else 2, value.ndim))
    if not axes:
        return np.full(value.shape, whole or _SMALLEST, np.float32)
    each = np.sqrt(np.mean(np.square(value, dtype=np.float64), axis=axes, keepdims=True))
    return np.maximum(each, 0.01 * whole if whole else _SMALLEST).astype(np.float32)
