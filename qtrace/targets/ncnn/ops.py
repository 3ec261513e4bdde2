"""ncnn layers without weights: arithmetic, activation functions and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.ops import OpCall
from qtrace.targets.ncnn.layers import LAYERS, NORMS
from qtrace.targets.ncnn.moves import MOVES
from qtrace.targets.ncnn.writer import NcnnWriter, floats

__all__ = ["EMITTERS"]

Emitter = Callable[[NcnnWriter, OpCall], None]

_BINARY = {"add": 0, "sub": 1, "mul": 2, "div": 3, "maximum": 4, "minimum": 5, "pow": 6}
# Code of an operation -> the code with the operands exchanged.
_REVERSED = {0: 0, 1: 7, 2: 2, 3: 8, 4: 4, 5: 5, 6: 9}
_UNARY = {"abs": 0, "neg": 1, "floor": 2, "ceil": 3, "square": 4, "sqrt": 5, "exp": 7, "log": 8}
_UNARY |= {"sin": 9, "cos": 10}
# The bound that stands for none: the largest float32.
_LARGEST = float(np.finfo(np.float32).max)


def _layer(kind: str, params: Callable[[OpCall], dict[int, Any]] = lambda call: {}) -> Emitter:
    """Emits a layer of one input, with parameters by ncnn's numbers."""

    def emit(w: NcnnWriter, call: OpCall) -> None:
        w.emit(kind, call, params(call), everywhere=True)

    return emit


def _prelu(w: NcnnWriter, call: OpCall) -> None:
    slope = w.stored(call.attrs["slope"], "slope").reshape(-1)
    w.emit("PReLU", call, {0: slope.size}, [floats(slope)])


def _pixel_shuffle(w: NcnnWriter, call: OpCall) -> None:
    w.emit("PixelShuffle", call, {0: call.attrs["factor"]})


def _bounds(call: OpCall) -> dict[int, Any]:
    low, high = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    return {0: -_LARGEST if low is None else float(low), 1: _LARGEST if high is None else float(high)}


def _binary(w: NcnnWriter, call: OpCall) -> None:
    code = _BINARY[call.kind]
    if "scalar" in call.attrs:
        code = _REVERSED[code] if call.attrs["side"] == "left" else code
        w.emit("BinaryOp", call, {0: code, 1: 1, 2: float(call.attrs["scalar"])}, everywhere=True)
        return
    names = [_operand(w, call, operand) for operand in call.attrs["operands"]]
    w.emit("BinaryOp", call, {0: code}, bottoms=names, everywhere=True)


# The largest exponent: a whole one becomes up to two products for each of its binary digits.
_LARGEST_EXPONENT = 1024
_SMALLEST = float(np.finfo(np.float32).tiny)


def _pow(w: NcnnWriter, call: OpCall) -> None:
    """Writes a power as products, or with a root, where the base may be 0 or negative.

    ncnn's own takes a logarithm: 2.4e38 for 0 and for negative numbers (1.0.20261020, measured). Its
    square root is right for both, and with ``root`` for powers of x: x ** 1.7 = root * x ** 1.2, and
    x ** -1.7 = x ** -1.2 / root. A negative power of 0 is NaN, as each division by 0 is in ncnn.
    """
    exponent = call.attrs.get("scalar")
    if exponent is not None and call.attrs["side"] == "left" and exponent > 0:
        _binary(w, call)
        return
    if exponent is None or call.attrs["side"] == "left":
        raise ExportError("ncnn raises only positive numbers to computed powers: write it as exp(log(x) * y)")
    if not abs(exponent) <= _LARGEST_EXPONENT:
        raise ExportError(
            f"it raises to {exponent:g}, and powers are written for ncnn with exponents from "
            f"-{_LARGEST_EXPONENT} to {_LARGEST_EXPONENT}: end the graph before it, or clip the exponent"
        )
    x, count = w.name(call.inputs[0]), abs(int(exponent))
    factor, divides = None, False
    if exponent != int(exponent):
        divides = exponent < 0
        value = w.layer("UnaryOp", [x], w.fresh(call.out.name), {0: _UNARY["sqrt"]})
        if abs(exponent) != 0.5:
            factor = _positive_power(w, call, x, float(exponent - np.copysign(0.5, exponent)))
    elif exponent == 0:
        value = _positive_power(w, call, x, 0.0)
    elif exponent == -1:
        value, divides = x, True
    else:
        if exponent < 0:  # before the products, which are infinite for smaller values
            inverse = {0: _REVERSED[_BINARY["div"]], 1: 1, 2: 1.0}
            x = w.layer("BinaryOp", [x], w.fresh(call.out.name), inverse)
        powers = {1: x}
        value = _product(w, call, powers, max(count // 2, 1))
        factor = _product(w, call, powers, count - count // 2) if count > 1 else None
    code = _BINARY["div" if divides else "mul"]
    if factor is None:
        w.emit("BinaryOp", call, {0: _REVERSED[code], 1: 1, 2: 1.0}, bottoms=[value], everywhere=True)
    else:
        w.emit("BinaryOp", call, {0: code}, bottoms=[factor, value], everywhere=True)


def _product(w: NcnnWriter, call: OpCall, powers: dict[int, str], count: int) -> str:
    """Returns the blob of a power of ``powers[1]``, and adds the products that it is made of."""
    if count not in powers:
        halves = [_product(w, call, powers, n) for n in (count // 2, count - count // 2)]
        powers[count] = w.layer("BinaryOp", halves, w.fresh(call.out.name), {0: _BINARY["mul"]})
    return powers[count]


def _positive_power(w: NcnnWriter, call: OpCall, x: str, exponent: float) -> str:
    """Returns the blob of a power of ``x``, which stands for the smallest number where it is not positive."""
    least = {0: _BINARY["maximum"], 1: 1, 2: _SMALLEST}
    positive = w.layer("BinaryOp", [x], w.fresh(call.out.name), least)
    power = {0: _BINARY["pow"], 1: 1, 2: exponent}
    return w.layer("BinaryOp", [positive], w.fresh(call.out.name), power)


def _operand(w: NcnnWriter, call: OpCall, operand: Any) -> str:
    """Returns a blob with an operand, in as many axes as the result has."""
    own = len(w.dims(call.out))
    value = operand if isinstance(operand, np.ndarray) else w.value(operand)
    shape = tuple(int(n) for n in (operand.shape if value is None else value.shape))
    full = (1,) * (len(call.out.shape) - len(shape)) + shape
    if value is None:
        return w.view(operand, full[len(full) - own :])
    if any(n > 1 and w.samples.holds(call.out, axis) for axis, n in enumerate(full)):
        raise ExportError(
            "a stored operand has a value for each sample of the batch, which ncnn cannot know: "
            "give it 1 in the first axis"
        )
    return w.memory(value.reshape(full[len(full) - own :]), w.fresh(call.out.name))


_REDUCTIONS = {"sum": 0, "mean": 3, "max": 4, "min": 5, "prod": 6}
_NORMS = {1: 7, 2: 8}


def _reduce(operation: int) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        axes = call.attrs["axis"]
        if axes is None:
            raise ExportError("it reduces the batch, which ncnn does not see: name the axes")
        _reduced(w, call, operation, axes, len(call.out.shape) == len(call.inputs[0].shape))

    return emit


def _reduced(w: NcnnWriter, call: OpCall, operation: int, axes: Sequence[int], keeps_axes: bool) -> None:
    x = call.inputs[0]
    places = sorted(w.place(x, a) for a in axes)
    # 5: the axes are counted in a sample.
    params = {0: operation, 1: 0, -23303: places, 4: int(keeps_axes), 5: 1}
    dims = [1 if n in places else size for n, size in enumerate(w.dims(x))]
    kept = dims if keeps_axes else [size for n, size in enumerate(dims) if n not in places] or [1]
    same = tuple(kept) == w.dims(call.out)
    top = call.out.name if same else w.fresh(call.out.name)
    w.put(call.out, w.layer("Reduction", [w.name(x)], top, params), kept)


def _norm_axes(call: OpCall) -> tuple[list[int], int]:
    """Returns the axes of a vector norm and ncnn's number for it."""
    order, axis = call.attrs.get("ord"), call.attrs["axis"]
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    operation = _NORMS.get(2 if order is None else order)
    if operation is None or None in axes:
        raise ExportError("ncnn has norms of order 1 and 2 over named axes: use one of them")
    return axes, operation


def _norm(w: NcnnWriter, call: OpCall) -> None:
    axes, operation = _norm_axes(call)
    _reduced(w, call, operation, axes, bool(call.attrs["keepdims"]))


def _normalize(w: NcnnWriter, call: OpCall) -> None:
    """Divides by the vector norm, which is ``eps`` at least."""
    axes, operation = _norm_axes(call)
    x, base = call.inputs[0], call.out.name
    places = sorted(w.place(x, a) for a in axes)
    source = w.name(x)
    length = w.layer("Reduction", [source], w.fresh(base), {0: operation, 1: 0, -23303: places, 4: 1, 5: 1})
    least = {0: _BINARY["maximum"], 1: 1, 2: float(call.attrs["eps"])}
    divisor = w.layer("BinaryOp", [length], w.fresh(base), least)
    w.emit("BinaryOp", call, {0: _BINARY["div"]}, bottoms=[source, divisor], everywhere=True)


_GATE = {0: 1.0 / 6.0, 1: 0.5}
EMITTERS: dict[str, Emitter] = {
    **LAYERS,
    **MOVES,
    **NORMS,
    **dict.fromkeys(_BINARY, _binary),
    "pow": _pow,
    **dict.fromkeys(_UNARY, _layer("UnaryOp", lambda call: {0: _UNARY[call.kind]})),
    **dict.fromkeys(("relu6", "clip"), _layer("Clip", _bounds)),
    "relu": _layer("ReLU"),
    "leaky_relu": _layer("ReLU", lambda call: {0: float(call.attrs["negative_slope"])}),
    "prelu": _prelu,
    "sigmoid": _layer("Sigmoid"),
    "tanh": _layer("TanH"),
    "silu": _layer("Swish"),
    "gelu": _layer("GELU"),
    "hsigmoid": _layer("HardSigmoid", lambda call: dict(_GATE)),
    "hard_sigmoid": _layer("HardSigmoid", lambda call: {0: call.attrs["slope"], 1: call.attrs["offset"]}),
    "mish": _layer("Mish"),
    "gelu_tanh": _layer("GELU", lambda call: {0: 1}),
    "hswish": _layer("HardSwish", lambda call: dict(_GATE)),
    **{kind: _reduce(operation) for kind, operation in _REDUCTIONS.items()},
    "norm": _norm,
    "normalize": _normalize,
    "pixel_shuffle": _pixel_shuffle,
}
