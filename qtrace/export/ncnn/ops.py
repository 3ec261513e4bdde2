"""ncnn layers without weights: arithmetic, activation functions, reductions and moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.ncnn.layers import LAYERS
from qtrace.export.ncnn.writer import NcnnWriter, floats
from qtrace.graph.types import TensorNode
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
        w.emit(kind, call, params(call))

    return emit


def _prelu(w: NcnnWriter, call: OpCall) -> None:
    slope = w.stored(call.attrs["slope"], "slope").reshape(-1)
    w.emit("PReLU", call, {0: slope.size}, [floats(slope)])


def _bounds(call: OpCall) -> dict[int, Any]:
    low, high = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    return {0: -_LARGEST if low is None else float(low), 1: _LARGEST if high is None else float(high)}


def _axis(call: OpCall, axis: int) -> int:
    """Returns the axis of a sample that is ``axis`` of the batch."""
    place = axis % len(call.inputs[0].shape) - 1
    if place < 0:
        raise ExportError("it works along the batch, which ncnn does not see: use another axis")
    return place


def _softmax(call: OpCall) -> dict[int, Any]:
    (axis,) = call.attrs["axis"]
    return {0: _axis(call, axis), 1: 1}


def _batch_norm(w: NcnnWriter, call: OpCall) -> None:
    parameters = w.batch_norm(call)
    mean = parameters["running_mean"]
    assert mean is not None
    defaults = {"weight": np.ones_like(mean), "bias": np.zeros_like(mean)}
    names = ("weight", "running_mean", "running_var", "bias")
    vectors = [defaults[n] if parameters[n] is None else parameters[n] for n in names]
    w.emit("BatchNorm", call, {0: mean.size, 1: float(call.attrs["eps"])}, [floats(v) for v in vectors])


def _binary(w: NcnnWriter, call: OpCall) -> None:
    code, base = _BINARY[call.kind], call.out.name
    if "scalar" in call.attrs:
        code = _REVERSED[code] if call.attrs["side"] == "left" else code
        w.emit("BinaryOp", call, {0: code, 1: 1, 2: float(call.attrs["scalar"])})
        return
    names = []
    for operand in call.attrs["operands"]:
        value = operand if isinstance(operand, np.ndarray) else w.value(operand)
        if value is None:
            names.append(_same_rank(w, operand, call))
        else:
            names.append(w.memory(_sample(value, call), w.fresh(base)))
    w.emit("BinaryOp", call, {0: code}, bottoms=names)


def _sample(value: np.ndarray, call: OpCall) -> np.ndarray:
    """Returns a stored operand without the batch, with as many axes as a sample of the result."""
    rank = len(call.out.shape)
    full = value.reshape((1,) * (rank - value.ndim) + value.shape)
    if len(full) != 1:
        raise ExportError(
            "a stored operand has a value for each sample of the batch, which ncnn cannot know: "
            "give it 1 in the first axis"
        )
    return full[0]


def _same_rank(w: NcnnWriter, node: TensorNode, call: OpCall) -> str:
    if len(node.shape) != len(call.out.shape):
        raise ExportError(
            f"ncnn cannot {call.kind} tensors with {len(node.shape)} and {len(call.out.shape)} axes: give "
            "both the same number"
        )
    return w.name(node)


def _reduce(operation: int) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        x, axes = call.inputs[0], call.attrs["axis"]
        if axes is None:
            raise ExportError("it reduces the batch, which ncnn does not see: name the axes")
        places = sorted(_axis(call, a) for a in axes)
        keeps_axes = int(len(call.out.shape) == len(x.shape))
        # 5: the axes are counted in a sample.
        params = {0: operation, 1: 0, -23303: places, 4: keeps_axes, 5: 1}
        w.emit("Reduction", call, params)

    return emit


def _concat(w: NcnnWriter, call: OpCall) -> None:
    names = [w.name(n) for n in call.attrs["parts"]]
    w.emit("Concat", call, {0: _axis(call, call.attrs["axis"])}, bottoms=names)


def _split(w: NcnnWriter, call: OpCall) -> None:
    axis = _axis(call, call.attrs["axis"])
    sizes = [w.shape(n)[axis] for n in call.outputs]
    w.slice(w.name(call.inputs[0]), [n.name for n in call.outputs], sizes, axis)
    w.names.update((n, n.name) for n in call.outputs)


def _reshape(w: NcnnWriter, call: OpCall) -> None:
    """Reshapes to the traced shape, last axis first."""
    w.shape(call.inputs[0])
    shape = w.shape(call.out)
    if len(shape) > 4:
        raise ExportError(f"ncnn has blobs of 1 to 4 axes, not {len(shape)}: join some axes")
    keys = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 11, 2)}[len(shape)]
    w.emit("Reshape", call, dict(zip(keys, reversed(shape), strict=True)))


# The order of the axes of a sample -> ncnn's number for it.
_ORDERS = {order: n for rank in (2, 3) for n, order in enumerate(itertools.permutations(range(rank)))}


def _transpose(w: NcnnWriter, call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    pattern = call.attrs["pattern"] or tuple(reversed(range(rank)))
    places = tuple(p % rank - 1 for p in pattern) if all(isinstance(p, int) for p in pattern) else ()
    if len(places) != rank or places[0] != -1 or places[1:] not in _ORDERS:
        raise ExportError(f"ncnn cannot transpose by {pattern!r}: keep the batch, and use up to 3 other axes")
    w.emit("Permute", call, {0: _ORDERS[places[1:]]})


def _pad(w: NcnnWriter, call: OpCall) -> None:
    width = [*call.attrs["width"], *[(0, 0)] * (len(call.out.shape) - len(call.attrs["width"]))]
    modes = {"constant": 0, "replicate": 1, "reflect": 2}
    if len(width) != 4 or any(any(pair) for pair in width[:2]):
        raise ExportError("ncnn pads the height and width of images only: leave the other axes")
    (top, bottom), (left, right) = width[2:]
    params = {0: top, 1: bottom, 2: left, 3: right, 4: modes[call.attrs["mode"]]}
    value = min(max(float(call.attrs["value"]), -_LARGEST), _LARGEST)  # ncnn reads no infinity
    w.emit("Padding", call, {**params, 5: value})


def _identity(w: NcnnWriter, call: OpCall) -> None:
    w.names[call.out] = w.name(call.inputs[0])


_GATE = {0: 1.0 / 6.0, 1: 0.5}
EMITTERS: dict[str, Emitter] = {
    **LAYERS,
    **dict.fromkeys(_BINARY, _binary),
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
    "softmax": _layer("Softmax", _softmax),
    "batch_norm": _batch_norm,
    "sum": _reduce(0),
    "mean": _reduce(3),
    "concat": _concat,
    "split": _split,
    **dict.fromkeys(("reshape", "flatten", "expand_dims", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("identity", "dropout"), _identity),
    "pad": _pad,
    "pixel_shuffle": _layer("PixelShuffle", lambda call: {0: call.attrs["factor"]}),
}
