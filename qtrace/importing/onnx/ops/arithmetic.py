"""Elementwise arithmetic, activations, functions of numbers, comparisons, choices, and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph import functions
from qtrace.graph.types import CallFunction, TensorNode
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.model import Stored


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


def _elu(alpha: float) -> Lowering:
    def lower(call: Call) -> Any:
        only_float(call)
        factor, x = call.attribute("alpha", alpha), call.tensor(0)
        negative = call.function(F.mul, call.function(F.expm1, call.function(F.minimum, x, 0.0)), factor)
        return call.function(F.add, call.function(F.relu, x), negative)

    return lower


def _selu(call: Call) -> Any:
    gamma = call.attribute("gamma", 1.05070102214813232421875)
    return call.function(F.mul, _elu(1.67326319217681884765625)(call), gamma)


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
    only_float(call)
    slope = call.values[1]
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


def _comparison(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        if call.dtype(0).kind == "u" and call.dtype(0).itemsize > 2:
            call.refuse(f"compares {call.dtype(0).name}, which MegEngine lacks")
        left, right = call.operand(0), call.operand(1)
        if function is F.equal and right == -math.inf and _is_largest(left):
            return _all_minus_infinity(call, left)
        return call.function(function, call.tensor(0) if isinstance(left, float) else left, right)

    return lower


def _is_largest(node: Any) -> bool:
    return isinstance(node, TensorNode) and isinstance(node.expr, CallFunction) and node.expr.func is F.max


def _all_minus_infinity(call: Call, largest: TensorNode) -> Any:
    """Computes whether the largest value is minus infinity, for which `F.max` gives the smallest float."""
    source, *options = largest.expr.args
    return call.function(F.min, call.function(F.equal, source, -math.inf), *options)


def _logic(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        return call.function(function, *(call.tensor(i) for i in range(len(call.values))))

    return lower


def _where(call: Call) -> Any:
    if call.dtype(1) == np.bool_:
        condition = call.tensor(0)
        chosen = call.function(F.logical_and, condition, call.tensor(1))
        other = call.function(F.logical_and, call.function(F.logical_not, condition), call.tensor(2))
        return call.function(F.logical_or, chosen, other)
    condition, x, y = (call.tensor(i) for i in range(3))
    sizes, shapes = call.common_sizes(condition, x, y)
    return call.function(F.where, *(call.expanded(node, sizes, shapes) for node in (condition, x, y)))


def _is_inf(call: Call) -> Any:
    negative, positive = call.attribute("detect_negative", 1), call.attribute("detect_positive", 1)
    if negative and positive:
        return call.function(F.isinf, call.tensor(0))
    if not negative and not positive:
        call.refuse("detects infinity of neither sign")
    return call.function(F.equal, call.tensor(0), math.inf if positive else -math.inf)


_COMPARISONS: dict[str, Lowering] = {
    "Equal": _comparison(F.equal),
    "Greater": _comparison(F.greater),
    "GreaterOrEqual": _comparison(F.greater_equal),
    "Less": _comparison(F.less),
    "LessOrEqual": _comparison(F.less_equal),
    "And": _logic(F.logical_and),
    "Or": _logic(F.logical_or),
    "Xor": _logic(F.logical_xor),
    "Not": _logic(F.logical_not),
    "Where": _where,
    "IsNaN": _logic(F.isnan),
    "IsInf": _is_inf,
}


def _axes(call: Call) -> tuple[int, ...] | None:
    """Returns the axes to reduce; None if the node does nothing."""
    rank = call.rank(0)
    axes = call.ints(1, None)
    nothing = bool(call.attribute("noop_with_empty_axes", 0))
    if not axes:
        return None if nothing else tuple(range(rank))
    return tuple(sorted(call.axis(a, rank) for a in axes))


def _reduction(
    function: Callable[..., Any],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    integers: bool = False,
) -> Lowering:
    """Returns the lowering of a reduction, with functions of each number before and after it."""

    def lower(call: Call) -> Any:
        axes, keep = _axes(call), bool(call.attribute("keepdims", 1))
        if not call.is_float(0) and not (
            integers and call.dtype(0).kind == "i" and call.dtype(0).itemsize >= 4
        ):
            call.refuse(f"reduces {call.dtype(0).name}, which MegEngine computes otherwise")
        x = call.tensor(0) if before is None else call.function(before, call.tensor(0))
        if axes is not None and call.rank(0):
            x = _reduced(call, function, x, axes, keep)
        return x if after is None else call.function(after, x)

    return lower


def _reduced(call: Call, function: Callable[..., Any], x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    rank = call.rank(0)
    if len(axes) == rank and not keep:
        # MegEngine's result would have one axis for some functions: all axes at once, then none.
        return call.function(function, x)
    return call.function(function, x, axis=axes if len(axes) > 1 else axes[0], keepdims=keep)


_REDUCTIONS: dict[str, Lowering] = {
    "ReduceMean": _reduction(F.mean),
    "ReduceSum": _reduction(F.sum, integers=True),
    "ReduceMax": _reduction(F.max, integers=True),
    "ReduceMin": _reduction(F.min, integers=True),
    "ReduceProd": _reduction(F.prod),
    "ReduceL1": _reduction(F.sum, before=F.abs),
    "ReduceL2": _reduction(F.sum, before=F.square, after=F.sqrt),
    "ReduceSumSquare": _reduction(F.sum, before=F.square),
    "ReduceLogSum": _reduction(F.sum, after=F.log),
    "ReduceLogSumExp": _reduction(F.logsumexp),
}


_INTEGERS = "iu"


def binary(function: Callable[..., Any], integers: bool = True) -> Lowering:
    """Returns the lowering of a function of two tensors that broadcast.

    Args:
        function: MegEngine's function.
        integers: whether it is exact for integers, too.
    """

    def lower(call: Call) -> Any:
        _check_integers(call, integers)
        return call.function(function, *_operands(call))

    return lower


def _check_integers(call: Call, allowed: bool) -> None:
    dtype = call.dtype(0)
    if dtype.kind in _INTEGERS and (not allowed or dtype.itemsize < 4 or dtype.kind == "u"):
        call.refuse(f"computes with {dtype.name}, which MegEngine would compute otherwise")


def _operands(call: Call) -> tuple[Any, Any]:
    left, right = call.operand(0), call.operand(1)
    if call.attribute("broadcast", 0):
        axis, missing = call.attribute("axis", None), call.rank(0) - call.rank(1)
        behind = 0 if axis is None else missing - call.axis(axis, call.rank(0))
        if behind and isinstance(right, TensorNode):  # the axes of the second begin at ``axis`` of the first
            right = call.function(F.reshape, right, (*call.shape(1), *[1] * behind))
    if isinstance(left, float) and isinstance(right, float):
        left = call.tensor(0)
    return left, right


def _div(call: Call) -> Any:
    if call.dtype(0).kind not in _INTEGERS:
        return call.function(F.div, *_operands(call))
    _check_integers(call, True)
    _check_divisor(call)
    # Integers are divided towards zero; MegEngine's floor_div rounds down.
    left, right = call.tensor(0), call.tensor(1)
    quotient = call.function(F.floor_div, call.function(F.abs, left), call.function(F.abs, right))
    signs = call.function(F.mul, call.function(F.sign, left), call.function(F.sign, right))
    return call.function(F.mul, quotient, signs)


def _check_divisor(call: Call) -> None:
    """Refuses a divisor that may be 0: MegEngine's integer kernels would end the process."""
    value = call.values[1]
    if not isinstance(value, Stored) or not value.array.all():
        call.refuse("divides by integers that may be 0, at which MegEngine ends the process")


def _pow(call: Call) -> Any:
    if not call.is_float(0):
        call.refuse(f"computes powers of {call.dtype(0).name}, which MegEngine computes in float32")
    exponent = call.values[1]
    array = getattr(exponent, "array", None)
    if array is not None and array.size == 1 and array.ndim <= call.rank(0):
        value = float(array.reshape(()))
        if value == 2.0:
            return call.function(F.square, call.tensor(0))
        if value == 0.5:
            return call.function(F.sqrt, call.tensor(0))
        return call.function(F.pow, call.tensor(0), value)
    if not call.is_float(1):
        return call.function(F.pow, call.tensor(0), call.method("astype", call.tensor(1), "float32"))
    return call.function(F.pow, call.tensor(0), call.tensor(1))


def _keep_integers(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        _check_integers(call, True)
        return call.function(function, call.tensor(0))

    return lower


def _reciprocal(call: Call) -> Any:
    return call.function(F.div, 1.0, call.tensor(0))


def _fold(function: Callable[..., Any]) -> Lowering:
    """Returns the lowering of an op of any number of tensors."""

    def lower(call: Call) -> Any:
        _check_integers(call, True)
        if len(call.values) == 1:
            return call.tensor(0)
        result = call.tensor(0)
        for index in range(1, len(call.values)):
            result = call.function(function, result, call.operand(index))
        return result

    return lower


def _mean(call: Call) -> Any:
    total = _fold(F.add)(call)
    return call.function(F.mul, total, 1.0 / len(call.values)) if len(call.values) > 1 else total


def _mod(call: Call) -> Any:
    if call.attribute("fmod", 0):
        return _fmod(call)
    if call.dtype(0).kind not in _INTEGERS:
        call.refuse("computes the remainder of floats without fmod, which ONNX does not define")
    _check_integers(call, True)
    _check_divisor(call)
    # MegEngine's remainder has the sign of the first number; ONNX's has the sign of the second.
    left, right = call.tensor(0), call.tensor(1)
    rest = call.function(F.mod, left, right)
    return call.function(F.mod, call.function(F.add, rest, right), right)


def _fmod(call: Call) -> Any:
    """Computes C's remainder, which has the sign of the dividend."""
    if call.dtype(0).kind in _INTEGERS:
        _check_integers(call, True)
        _check_divisor(call)
    left, right = call.tensor(0), call.tensor(1)
    rest = call.function(F.mod, call.function(F.abs, left), call.function(F.abs, right))
    return call.function(F.mul, rest, call.function(F.sign, left))


def _round(call: Call) -> Any:
    """Rounds half to even; MegEngine's kernel rounds half away from zero."""
    if not call.is_float(0):
        call.refuse(f"rounds {call.dtype(0).name}")
    x = call.tensor(0)
    below = call.function(F.floor, x)
    rest = call.function(F.sub, x, below)
    above = call.function(F.add, below, 1.0)
    even = call.function(F.mul, call.function(F.floor, call.function(F.mul, above, 0.5)), 2.0)
    nearest = call.function(F.where, call.function(F.less, rest, 0.5), below, above)
    return call.function(F.where, call.function(F.equal, rest, 0.5), even, nearest)


LOWERINGS: dict[str, Lowering] = {
    "Relu": _relu,
    "Erf": unary(functions.erf),
    "Sigmoid": unary(F.sigmoid),
    "Tanh": unary(F.tanh),
    "Softplus": unary(F.softplus),
    "Clip": _clip,
    "LeakyRelu": _leaky_relu,
    "Elu": _elu(1.0),
    "Selu": _selu,
    "HardSwish": unary(F.hswish),
    "HardSigmoid": _hard_sigmoid,
    "Softsign": _softsign,
    "ThresholdedRelu": _thresholded_relu,
    "PRelu": _prelu,
    "Softmax": _along_axis(_softmax),
    "LogSoftmax": _along_axis(_log_softmax),
    "Dropout": _dropout,
    "Identity": _identity,
    "Hardmax": _along_axis(_hardmax),
    **_COMPARISONS,
    **_REDUCTIONS,
    "Add": binary(F.add),
    "Sub": binary(F.sub),
    "Mul": binary(F.mul),
    "Div": _div,
    "Pow": _pow,
    "Neg": _keep_integers(F.neg),
    "Abs": _keep_integers(F.abs),
    "Sign": _keep_integers(F.sign),
    "Reciprocal": _reciprocal,
    "Min": _fold(F.minimum),
    "Max": _fold(F.maximum),
    "Sum": _fold(F.add),
    "Mean": _mean,
    "Mod": _mod,
    "Round": _round,
    **{
        name: unary(function)
        for name, function in {
            "Sqrt": F.sqrt,
            "Exp": F.exp,
            "Log": F.log,
            "Floor": F.floor,
            "Ceil": F.ceil,
            "Sin": F.sin,
            "Cos": F.cos,
            "Tan": F.tan,
            "Asin": F.asin,
            "Acos": F.acos,
            "Atan": F.atan,
            "Sinh": F.sinh,
            "Cosh": F.cosh,
            "Asinh": F.asinh,
            "Acosh": F.acosh,
            "Atanh": F.atanh,
        }.items()
    },
}
