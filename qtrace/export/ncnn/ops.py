"""ncnn layers without weights: arithmetic, activation functions, and what moves values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.ncnn.layers import LAYERS
from qtrace.export.ncnn.writer import NcnnWriter, floats, stored
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall

__all__ = ["EMITTERS"]

Emitter = Callable[[NcnnWriter, OpCall], None]

_BINARY = {"add": 0, "sub": 1, "mul": 2, "div": 3, "maximum": 4, "minimum": 5, "pow": 6}
# The same with the operands exchanged.
_REVERSED = {0: 0, 1: 7, 2: 2, 3: 8, 4: 4, 5: 5, 6: 9}
_UNARY = {"abs": 0, "neg": 1, "floor": 2, "ceil": 3, "square": 4, "sqrt": 5, "exp": 7, "log": 8, "sin": 9}
_UNARY.update({"cos": 10})
# The largest float32 stands for no bound.
_LARGEST = float(np.finfo(np.float32).max)


def _plain(kind: str, params: dict[int, Any] | None = None) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        w.emit(kind, [w.name(call.inputs[0])], call.out, dict(params or {}))

    return emit


def _leaky_relu(w: NcnnWriter, call: OpCall) -> None:
    w.emit("ReLU", [w.name(call.inputs[0])], call.out, {0: float(call.attrs["negative_slope"])})


def _prelu(w: NcnnWriter, call: OpCall) -> None:
    slope = stored(w, call.attrs["slope"], "slope").reshape(-1)
    w.emit("PReLU", [w.name(call.inputs[0])], call.out, {0: slope.size}, [floats(slope)])


def _clip(w: NcnnWriter, call: OpCall) -> None:
    low, high = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    bounds = {0: -_LARGEST if low is None else float(low), 1: _LARGEST if high is None else float(high)}
    w.emit("Clip", [w.name(call.inputs[0])], call.out, bounds)


def _softmax(w: NcnnWriter, call: OpCall) -> None:
    (axis,) = call.attrs["axis"]
    w.emit("Softmax", [w.name(call.inputs[0])], call.out, {0: _axis(call, axis), 1: 1})


def _axis(call: OpCall, axis: int) -> int:
    """An axis of a sample."""
    found = axis % len(call.inputs[0].shape) - 1
    if found < 0:
        raise ExportError("it works along the batch, which ncnn does not see: use another axis")
    return found


def _batch_norm(w: NcnnWriter, call: OpCall) -> None:
    a, module = call.attrs, owner(call.expr)
    names = ("weight", "running_mean", "running_var", "bias")
    raw = {n: getattr(module, n) if module is not None else a[n] for n in names}
    found = {n: w.value(v) if isinstance(v, TensorNode) else v for n, v in raw.items()}
    if found["running_mean"] is None or found["running_var"] is None:
        raise ExportError(
            "its statistics are computed, and ncnn stores them in the file: end the graph before it"
        )
    mean = np.asarray(found["running_mean"]).reshape(-1)
    fallback = {"weight": np.ones_like(mean), "bias": np.zeros_like(mean)}
    parts = [fallback[n] if found[n] is None else np.asarray(found[n]).reshape(-1) for n in names]
    params = {0: mean.size, 1: float(a["eps"])}
    w.emit("BatchNorm", [w.name(call.inputs[0])], call.out, params, [floats(p) for p in parts])


def _binary(w: NcnnWriter, call: OpCall) -> None:
    code, base = _BINARY[call.kind], call.out.name
    if "scalar" in call.attrs:
        code = _REVERSED[code] if call.attrs["side"] == "left" else code
        params = {0: code, 1: 1, 2: float(call.attrs["scalar"])}
        w.emit("BinaryOp", [w.name(call.inputs[0])], call.out, params)
        return
    names = []
    for operand in call.attrs["operands"]:
        value = operand if isinstance(operand, np.ndarray) else w.value(operand)
        if value is None:
            names.append(_same_rank(w, operand, call))
        else:
            names.append(w.memory(_sample(value, call), w.fresh(base)))
    w.emit("BinaryOp", names, call.out, {0: code})


def _sample(value: np.ndarray, call: OpCall) -> np.ndarray:
    """A stored operand without the batch, with as many axes as a sample of the result."""
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


def _unary(w: NcnnWriter, call: OpCall) -> None:
    w.emit("UnaryOp", [w.name(call.inputs[0])], call.out, {0: _UNARY[call.kind]})


def _reduce(operation: int) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        x, axes = call.inputs[0], call.attrs["axis"]
        if axes is None:
            raise ExportError("it reduces the batch, which ncnn does not see: name the axes")
        places = sorted(_axis(call, a) for a in axes)
        kept = int(len(call.out.shape) == len(x.shape))
        # 5: the axes are those of a sample, as written here.
        params = {0: operation, 1: 0, -23303: places, 4: kept, 5: 1}
        w.emit("Reduction", [w.name(x)], call.out, params)

    return emit


def _concat(w: NcnnWriter, call: OpCall) -> None:
    names = [w.name(n) for n in call.attrs["parts"]]
    w.emit("Concat", names, call.out, {0: _axis(call, call.attrs["axis"])})


def _split(w: NcnnWriter, call: OpCall) -> None:
    axis = _axis(call, call.attrs["axis"])
    sizes = [w.shape(n)[axis] for n in call.outputs]
    w.layer("Slice", [w.name(call.inputs[0])], call.outputs[0].name, {-23300: sizes, 1: axis})
    w.layers[-1].tops = [n.name for n in call.outputs]
    w.names.update((n, n.name) for n in call.outputs)


def _reshape(w: NcnnWriter, call: OpCall) -> None:
    """By the shapes of the trace, last axis first."""
    w.shape(call.inputs[0])
    shape = w.shape(call.out)
    if len(shape) > 4:
        raise ExportError(f"ncnn has blobs of 1 to 4 axes, not {len(shape)}: join some axes")
    keys = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 11, 2)}[len(shape)]
    params = dict(zip(keys, reversed(shape), strict=True))
    w.emit("Reshape", [w.name(call.inputs[0])], call.out, params)


# The order of the axes of a sample -> ncnn's number for it.
_ORDERS: dict[tuple[int, ...], int] = {
    (0, 1): 0,
    (1, 0): 1,
    (0, 1, 2): 0,
    (0, 2, 1): 1,
    (1, 0, 2): 2,
    (1, 2, 0): 3,
    (2, 0, 1): 4,
    (2, 1, 0): 5,
}


def _transpose(w: NcnnWriter, call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    pattern = call.attrs["pattern"] or tuple(reversed(range(rank)))
    places = tuple(p % rank - 1 for p in pattern) if all(isinstance(p, int) for p in pattern) else ()
    if len(places) != rank or places[0] != -1 or places[1:] not in _ORDERS:
        raise ExportError(f"ncnn cannot transpose by {pattern!r}: keep the batch, and use up to 3 other axes")
    w.emit("Permute", [w.name(call.inputs[0])], call.out, {0: _ORDERS[places[1:]]})


def _pad(w: NcnnWriter, call: OpCall) -> None:
    width = [*call.attrs["width"], *[(0, 0)] * (len(call.out.shape) - len(call.attrs["width"]))]
    modes = {"constant": 0, "replicate": 1, "reflect": 2}
    if len(width) != 4 or any(any(pair) for pair in width[:2]):
        raise ExportError("ncnn pads the height and width of images only: leave the other axes")
    (top, bottom), (left, right) = width[2:]
    params = {0: top, 1: bottom, 2: left, 3: right, 4: modes[call.attrs["mode"]]}
    w.emit("Padding", [w.name(call.inputs[0])], call.out, {**params, 5: float(call.attrs["value"])})


def _identity(w: NcnnWriter, call: OpCall) -> None:
    w.names[call.out] = w.name(call.inputs[0])


def _pixel_shuffle(w: NcnnWriter, call: OpCall) -> None:
    w.emit("PixelShuffle", [w.name(call.inputs[0])], call.out, {0: call.attrs["factor"]})


EMITTERS: dict[str, Emitter] = {
    **LAYERS,
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    "relu": _plain("ReLU"),
    "relu6": _clip,
    "clip": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "sigmoid": _plain("Sigmoid"),
    "tanh": _plain("TanH"),
    "silu": _plain("Swish"),
    "gelu": _plain("GELU"),
    "hsigmoid": _plain("HardSigmoid", {0: 1.0 / 6.0, 1: 0.5}),
    "hswish": _plain("HardSwish", {0: 1.0 / 6.0, 1: 0.5}),
    "softmax": _softmax,
    "batch_norm": _batch_norm,
    "sum": _reduce(0),
    "mean": _reduce(3),
    "concat": _concat,
    "split": _split,
    "reshape": _reshape,
    "flatten": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "pad": _pad,
    "identity": _identity,
    "dropout": _identity,
    "pixel_shuffle": _pixel_shuffle,
}
