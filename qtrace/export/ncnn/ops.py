"""ncnn layers without weights: arithmetic, activation functions and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.ncnn.layers import LAYERS
from qtrace.export.ncnn.moves import MOVES
from qtrace.export.ncnn.norms import NORMS
from qtrace.export.ncnn.writer import NcnnWriter, floats
from qtrace.ops import OpCall

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


# Powers that are written as products; the others are for positive numbers.
_MOST_FACTORS = 8
_SMALLEST = float(np.finfo(np.float32).tiny)


def _pow(w: NcnnWriter, call: OpCall) -> None:
    """Writes a power as products where it has a whole exponent.

    ncnn's own is that of a logarithm: infinite for 0 and for negative numbers (1.0.20261020, measured).
    """
    if call.attrs.get("side") == "left" and call.attrs["scalar"] > 0:
        _binary(w, call)
        return
    exponent = call.attrs.get("scalar")
    if exponent is None or call.attrs["side"] == "left":
        raise ExportError(
            "ncnn raises positive numbers alone to computed powers: write it as exp(log(x) * y)"
        )
    x, base, count = w.name(call.inputs[0]), call.out.name, abs(int(exponent))
    if exponent != int(exponent) or not 1 <= count <= _MOST_FACTORS:
        positive = w.layer("BinaryOp", [x], w.fresh(base), {0: _BINARY["maximum"], 1: 1, 2: _SMALLEST})
        power = {0: _BINARY["pow"], 1: 1, 2: float(exponent)}
        w.emit("BinaryOp", call, power, bottoms=[positive], everywhere=True)
        return
    product = x
    for _ in range(count - 1):
        product = w.layer("BinaryOp", [product, x], w.fresh(base), {0: _BINARY["mul"]})
    last = {0: _REVERSED[_BINARY["div"]], 1: 1, 2: 1.0} if exponent < 0 else {0: _BINARY["mul"], 1: 1, 2: 1.0}
    w.emit("BinaryOp", call, last, bottoms=[product], everywhere=True)


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
