"""ONNX for hard sigmoid and hard swish: a ``HardSigmoid`` node, or its pieces for a target without a kernel.

OpenVINO computes ``HardSigmoid`` by a reference, value by value in the plain layout, with a change of layout
before and after it. From ``clip(x + 3, 0, 6) / 6`` it makes an operation of its own, which becomes part of
the convolution before it, also where it is multiplied by ``x``. Other slopes join the ops next to them.
"""

from __future__ import annotations

from qtrace.export.onnx.types import Emitter
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.ops import OpCall

__all__ = ["HARD_SIGMOIDS"]

_SLOPE, _OFFSET = 1.0 / 6.0, 0.5  # of hsigmoid and hswish


def _add(w: OnnxWriter, x: str, result: str, slope: float, offset: float) -> str:
    """Adds ``clip(slope * x + offset, 0, 1)`` and returns the name of its result."""
    if "HardSigmoid" not in w.in_pieces or not slope > 0:
        return w.node("HardSigmoid", [x], result, alpha=slope, beta=offset)
    height, shift = w.scalar(_rounded(1.0 / slope)), w.scalar(_rounded(offset / slope))
    line = w.node("Add", [x, shift], w.fresh(result))
    clipped = w.node("Clip", [line, w.scalar(0.0), height], w.fresh(result))
    return w.node("Div", [clipped, height], result)


def _rounded(value: float) -> float:
    """Returns the whole number that a value misses by rounding errors: OpenVINO compares exactly."""
    return float(round(value)) if abs(value - round(value)) < 1e-6 * abs(value) else value


def _hsigmoid(w: OnnxWriter, call: OpCall) -> None:
    w.names[call.out] = _add(w, w.name(call.inputs[0]), call.out.name, _SLOPE, _OFFSET)


def _hard_sigmoid(w: OnnxWriter, call: OpCall) -> None:
    slope, offset = call.attrs["slope"], call.attrs["offset"]
    w.names[call.out] = _add(w, w.name(call.inputs[0]), call.out.name, slope, offset)


def _hswish(w: OnnxWriter, call: OpCall) -> None:
    x = w.name(call.inputs[0])
    w.emit("Mul", [x, _add(w, x, w.fresh(call.out.name), _SLOPE, _OFFSET)], call.out)


HARD_SIGMOIDS: dict[str, Emitter] = {
    "hsigmoid": _hsigmoid,
    "hard_sigmoid": _hard_sigmoid,
    "hswish": _hswish,
}
