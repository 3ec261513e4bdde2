"""Activations of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph import functions
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]


def unary(function: Callable[..., Any]) -> Lowering:
    """Returns the lowering of a function of one float tensor."""

    def lower(call: Call) -> Any:
        only_float(call)
        return call.function(function, call.tensor(0))

    return lower


def only_float(call: Call) -> None:
    """Refuses a first input of integers, which MegEngine would convert or compute otherwise."""
    if not call.is_float(0):
        call.refuse(f"computes with {call.dtype(0).name}, where MegEngine computes with float32")


def _relu(call: Call) -> Any:
    return call.function(F.relu, call.tensor(0))


def _clip(call: Call) -> Any:
    low, high = call.scalar(1, None), call.scalar(2, None)
    if low is None and high is None:
        return call.tensor(0)
    if low is not None and high is not None and low > high:
        call.refuse(f"clips to {low} and above, and to {high} and below")
    x = call.tensor(0)
    if low == 0 and high == 6:
        return call.function(F.relu6, x)
    if low == 0 and high is None:
        return call.function(F.relu, x)
    if low is not None and high is not None:
        return call.function(F.clip, x, low, high)
    return call.function(F.maximum, x, low) if high is None else call.function(F.minimum, x, high)


def _leaky_relu(call: Call) -> Any:
    only_float(call)
    return call.function(F.leaky_relu, call.tensor(0), call.attribute("alpha", 0.01))


def _elu(call: Call) -> Any:
    only_float(call)
    alpha, x = call.attribute("alpha", 1.0), call.tensor(0)
    negative = call.function(F.mul, call.function(F.expm1, call.function(F.minimum, x, 0.0)), alpha)
    return call.function(F.add, call.function(F.relu, x), negative)


def _selu(call: Call) -> Any:
    only_float(call)
    alpha = call.attribute("alpha", 1.67326319217681884765625)
    gamma, x = call.attribute("gamma", 1.05070102214813232421875), call.tensor(0)
    negative = call.function(F.mul, call.function(F.expm1, call.function(F.minimum, x, 0.0)), alpha)
    return call.function(F.mul, call.function(F.add, call.function(F.relu, x), negative), gamma)


def _hard_swish(call: Call) -> Any:
    only_float(call)
    return call.function(F.hswish, call.tensor(0))


def _hard_sigmoid(call: Call) -> Any:
    only_float(call)
    slope, offset, x = call.attribute("alpha", 0.2), call.attribute("beta", 0.5), call.tensor(0)
    if abs(slope - 1 / 6) < 1e-7 and offset == 0.5:
        return call.function(F.hsigmoid, x)
    line = call.function(F.add, call.function(F.mul, x, slope), offset)
    return call.function(F.clip, line, 0.0, 1.0)


def _softsign(call: Call) -> Any:
    only_float(call)
    x = call.tensor(0)
    return call.function(F.div, x, call.function(F.add, call.function(F.abs, x), 1.0))


def _thresholded_relu(call: Call) -> Any:
    only_float(call)
    x, alpha = call.tensor(0), float(call.attribute("alpha", 1.0))
    above = call.function(F.greater, x, alpha)
    return call.function(F.where, above, x, call.function(F.zeros_like, x))


def _prelu(call: Call) -> Any:
    slope = call.values[1]
    if not call.is_float(0):
        call.refuse(f"computes with {call.dtype(0).name}, where MegEngine computes with float32")
    rank = call.rank(0)
    if call.version < 7 and isinstance(slope, Stored) and slope.array.size > 1:
        # Before opset 7 a slope belongs to a channel.
        columns = slope.array.reshape(-1, *[1] * (rank - 2))
        slope = replace(slope, array=columns)
    if isinstance(slope, Stored) and rank >= 2:
        channels = call.shape(0)[1]
        shape = (1,) * (rank - slope.array.ndim) + slope.array.shape
        per_channel = all(n == 1 for i, n in enumerate(shape) if i != 1) and shape[1] in (1, channels)
        if per_channel and (rank == 4 or shape[1] == 1):
            return call.module(M.PReLU(shape[1]), {"weight": slope}, call.tensor(0))
    x = call.tensor(0)
    factor = call.layers.tensor(slope) if isinstance(slope, Stored) else call.tensor(1)
    negative = call.function(F.mul, call.function(F.minimum, x, 0.0), factor)
    return call.function(F.add, call.function(F.relu, x), negative)


def _along_axis(function: Callable[[Call, Any, int, int], Any]) -> Lowering:
    """Returns the lowering of a function along one axis; before opset 13, the axes from `axis` on are one.

    Args:
        function: lowers the function of a tensor along an axis, whose length is its last argument.
    """

    def lower(call: Call) -> Any:
        only_float(call)
        rank, x, shape = call.rank(0), call.tensor(0), call.shape(0)
        axis = call.axis(call.attribute("axis", -1 if call.version >= 13 else 1), rank)
        length = math.prod(shape[axis:])
        if call.version >= 13 or length == shape[axis]:
            return function(call, x, axis, shape[axis])
        call.refuse_open(0, range(1, rank), "flattens an input")
        if axis == 0:
            result = function(call, call.function(F.reshape, x, (1, -1)), 1, length)
        else:
            result = function(call, call.function(F.flatten, x, axis), axis, length)
        return call.function(F.reshape, result, (-1, *shape[1:]))

    return lower


def _softmax(call: Call, x: Any, axis: int, length: int) -> Any:
    """Lists the axis: of one number, MegEngine's kernel gives NaN where all logits are below -87."""
    return call.function(F.softmax, x, axis=[axis])


def _log_softmax(call: Call, x: Any, axis: int, length: int) -> Any:
    return call.function(functions.log_softmax, x, axis)


def _hardmax(call: Call, x: Any, axis: int, length: int) -> Any:
    call.refuse_open(0, [axis], "marks the largest of an input")
    first = call.function(F.argmax, x, axis=axis, keepdims=True)
    shape = (length, *[1] * (len(call.builder.shapes(x)[0]) - axis - 1))
    places = Stored(np.arange(length, dtype=np.int32).reshape(shape), f"{call.name}_places")
    return call.method("astype", call.function(F.equal, first, call.layers.tensor(places)), "float32")


def _dropout(call: Call) -> Any:
    for name in ("ratio", "seed"):
        call.attribute(name, None)
    if call.version >= 12 and call.has(2) and bool(call.scalar(2)):
        call.refuse("drops values, as in training: export the network for inference")
    x = call.tensor(0)
    if len(call.node.outputs) < 2 or not call.node.outputs[1]:
        return x
    # The mask is true everywhere; a graph that does not read it drops it.
    mask = call.function(F.ones_like, x)
    return x, mask if call.version < 10 else call.function(F.not_equal, mask, 0)


def _identity(call: Call) -> Any:
    return call.values[0]


LOWERINGS: dict[str, Lowering] = {
    "Relu": _relu,
    "Erf": unary(functions.erf),
    "Sigmoid": unary(F.sigmoid),
    "Tanh": unary(F.tanh),
    "Softplus": unary(F.softplus),
    "Clip": _clip,
    "LeakyRelu": _leaky_relu,
    "Elu": _elu,
    "Selu": _selu,
    "HardSwish": _hard_swish,
    "HardSigmoid": _hard_sigmoid,
    "Softsign": _softsign,
    "ThresholdedRelu": _thresholded_relu,
    "PRelu": _prelu,
    "Softmax": _along_axis(_softmax),
    "LogSoftmax": _along_axis(_log_softmax),
    "Dropout": _dropout,
    "Identity": _identity,
    "Hardmax": _along_axis(_hardmax),
}
