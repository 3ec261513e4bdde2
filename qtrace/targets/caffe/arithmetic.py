"""Caffe layers for arithmetic, activation functions, softmax and BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.caffe.writer import CaffeWriter

__all__ = ["ARITHMETIC"]

Emitter = Callable[[CaffeWriter, OpCall], None]


def _layer(kind: str, **parameters: Callable[[OpCall], dict[str, Any]]) -> Emitter:
    """Emits a layer of one input, with its fields computed from the op."""

    def emit(w: CaffeWriter, call: OpCall) -> None:
        w.emit(kind, call, (), (), **{name: fields(call) for name, fields in parameters.items()})

    return emit


def _power(**fields: float) -> Emitter:
    return _layer("Power", power_param=lambda call: fields)


def _prelu(w: CaffeWriter, call: OpCall) -> None:
    slope = w.stored(call.attrs["slope"], "slope")
    w.emit("PReLU", call, [slope.reshape(-1)], prelu_param={"channel_shared": slope.size == 1})


def _softmax(call: OpCall) -> dict[str, Any]:
    (axis,) = call.attrs["axis"]
    return {"axis": axis % len(call.out.shape)}


def _clip(w: CaffeWriter, call: OpCall) -> None:
    """Clips at any bounds by two ReLUs: Caffe lacks a layer for them."""
    low, high = call.attrs["lower"], call.attrs["upper"]
    name, base = w.name(call.inputs[0]), call.out.name
    if (low, high) == (0.0, 6.0):
        w.emit("ReLU6", call)
        return
    for bound, sign in ((low, 1.0), (high, -1.0)):
        if bound is not None:
            to_zero = {"scale": sign, "shift": -sign * bound}
            shifted = w.layer("Power", [name], w.fresh(base), power_param=to_zero)
            clipped = w.layer("ReLU", [shifted], w.fresh(base))
            back = {"scale": sign, "shift": bound}
            name = w.layer("Power", [clipped], w.fresh(base), power_param=back)
    w.names[call.out] = w.layer("Power", [name], base, power_param={"scale": 1.0})


def _hard_gate(w: CaffeWriter, x: str, top: str) -> str:
    """Adds relu6(x + 3) / 6."""
    moved = w.layer("Power", [x], w.fresh(top), power_param={"shift": 3.0})
    clipped = w.layer("ReLU6", [moved], w.fresh(top))
    return w.layer("Power", [clipped], top, power_param={"scale": 1.0 / 6.0})


def _hsigmoid(w: CaffeWriter, call: OpCall) -> None:
    w.names[call.out] = _hard_gate(w, w.name(call.inputs[0]), call.out.name)


def _gated(gate: Callable[[CaffeWriter, str, str], str]) -> Emitter:
    """Emits x * gate(x)."""

    def emit(w: CaffeWriter, call: OpCall) -> None:
        x = w.name(call.inputs[0])
        factor = gate(w, x, w.fresh(call.out.name))
        w.emit("Eltwise", call, bottoms=[x, factor], eltwise_param={"operation": "PROD"})

    return emit


def _batch_norm(w: CaffeWriter, call: OpCall) -> None:
    """Writes a BatchNorm as a factor and an offset for each channel."""
    gamma, beta, mean, var = w.batch_norm(call).values()
    assert mean is not None
    assert var is not None
    factor = 1.0 / np.sqrt(var.astype(np.float64) + call.attrs["eps"]) * (1.0 if gamma is None else gamma)
    offset = -mean * factor if beta is None else beta - mean * factor
    w.emit("Scale", call, [factor, offset], scale_param={"axis": 1, "bias_term": True})


def _binary(w: CaffeWriter, call: OpCall) -> None:
    operands = call.attrs["operands"]
    if "scalar" in call.attrs:
        _with_scalar(w, call)
        return
    values = [w.value(v) if isinstance(v, TensorNode) else np.asarray(v) for v in operands]
    if any(v is not None for v in values):
        _with_parameter(w, call, values)
        return
    left, right = operands
    if tuple(left.shape) != tuple(right.shape):
        _broadcast(w, call, left, right)
        return
    fields: dict[str, Any] = {"operation": {"mul": "PROD", "maximum": "MAX"}.get(call.kind, "SUM")}
    if call.kind == "sub":
        fields["coeff"] = [1.0, -1.0]
    elif call.kind not in ("add", "mul", "maximum"):
        raise ExportError(f"Caffe lacks {call.kind} of two tensors: end the graph before it")
    w.emit("Eltwise", call, bottoms=[w.name(left), w.name(right)], eltwise_param=fields)


def _with_scalar(w: CaffeWriter, call: OpCall) -> None:
    number, front = call.attrs["scalar"], call.attrs["side"] == "left"
    fields: dict[str, float] | None = {
        "add": {"shift": number},
        "sub": {"scale": -1.0, "shift": number} if front else {"shift": -number},
        "mul": {"scale": number},
        "div": {"power": -1.0, "scale": 1.0 / number} if front else {"scale": 1.0 / number},
    }.get(call.kind)
    if fields is None:
        raise ExportError(f"Caffe lacks {call.kind} with a number: end the graph before it")
    w.emit("Power", call, power_param=fields)


def _with_parameter(w: CaffeWriter, call: OpCall, values: list[np.ndarray | None]) -> None:
    """Writes x * value or x + value, with a stored number for each channel."""
    value = next(v for v in values if v is not None)
    x, shape = call.inputs[0] if values[0] is None else call.inputs[-1], tuple(call.out.shape)
    channels = int(shape[1]) if len(shape) > 1 else 0
    if value.size == 1 and value.ndim <= len(shape):
        value = np.full((1, channels, *(1,) * (len(shape) - 2)), value.reshape(()))
    full = (1,) * (len(shape) - value.ndim) + value.shape
    if call.kind not in ("add", "mul") or full != (1, channels, *(1,) * (len(shape) - 2)):
        raise ExportError(
            "Caffe adds and multiplies by a stored number for each channel only: give it the shape "
            "(1, C, 1, 1), or let a layer absorb it (ptq: [fuse_bn, absorb])"
        )
    ones, flat = np.ones(channels, np.float32), value.reshape(-1)
    blobs = [ones, flat] if call.kind == "add" else [flat]
    fields = {"axis": 1, "bias_term": call.kind == "add"}
    w.emit("Scale", call, blobs, [w.name(x)], scale_param=fields)


def _broadcast(w: CaffeWriter, call: OpCall, left: TensorNode, right: TensorNode) -> None:
    """Writes an image times a computed factor for each channel, as in squeeze and excitation."""
    image, factor = (left, right) if tuple(left.shape) == tuple(call.out.shape) else (right, left)
    same = len(factor.shape) == 4 and tuple(factor.shape) == (*tuple(image.shape)[:2], 1, 1)
    if call.kind != "mul" or not same:
        raise ExportError(
            f"Caffe cannot {call.kind} {tuple(left.shape)} and {tuple(right.shape)}: give them one shape, or "
            "multiply by one number for each channel"
        )
    flat = w.layer("Flatten", [w.name(factor)], w.fresh(call.out.name), flatten_param={"axis": 1})
    w.emit("Scale", call, bottoms=[w.name(image), flat], scale_param={"axis": 0})


ARITHMETIC: dict[str, Emitter] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum"), _binary),
    "neg": _power(scale=-1.0),
    "square": _power(power=2.0),
    "sqrt": _power(power=0.5),
    "abs": _layer("AbsVal"),
    "exp": _layer("Exp"),
    "relu": _layer("ReLU"),
    "relu6": _layer("ReLU6"),
    "sigmoid": _layer("Sigmoid"),
    "tanh": _layer("TanH"),
    "leaky_relu": _layer("ReLU", relu_param=lambda call: {"negative_slope": call.attrs["negative_slope"]}),
    "prelu": _prelu,
    "clip": _clip,
    "hsigmoid": _hsigmoid,
    "hswish": _gated(_hard_gate),
    "silu": _gated(lambda w, x, top: w.layer("Sigmoid", [x], top)),
    "softmax": _layer("Softmax", softmax_param=_softmax),
    "batch_norm": _batch_norm,
}
