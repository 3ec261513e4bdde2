"""Ops as the ONNX export writes them: one function for each, which adds the nodes to a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.benchmarking.cases import Build
from qtrace.benchmarking.net import Net

__all__ = [
    "UNARY",
    "conv_transpose",
    "first_half",
    "layer_norm",
    "linear",
    "node",
    "pool",
    "reshape",
    "resize",
    "with_stored",
]


def node(op: str, **attributes: Any) -> Build:
    """Returns a function that adds one node."""
    return lambda net, names, _: net.node(op, names, **attributes)


def with_stored(op: str, shape: Sequence[int]) -> Build:
    """Returns a function that adds a node whose second operand is stored."""

    def build(net: Net, names: list[str], integer: bool) -> str:
        if not integer:
            other = net.store(np.full(tuple(shape), 0.7, np.float32))
        else:
            other = net.stored_integers(tuple(shape))
        return net.node(op, [*names, other])

    return build


def _clip(net: Net, names: list[str], _: bool) -> str:
    return net.node("Clip", [*names, net.store(np.float32(0.5)), net.store(np.float32(5.0))])


def _gated(op: str, **attributes: Any) -> Build:
    def build(net: Net, names: list[str], integer: bool) -> str:
        gate = net.node(op, names, **attributes)
        if integer:
            gate = net.quantize(gate, 1 / 256, 0)
        return net.node("Mul", [*names, gate])

    return build


def _mish(net: Net, names: list[str], _: bool) -> str:
    return net.node("Mul", [*names, net.node("Tanh", [net.node("Softplus", names)])])


def _gelu(net: Net, names: list[str], _: bool) -> str:
    inner = net.node("Erf", [net.node("Div", [*names, net.store(np.float32(math.sqrt(2.0)))])])
    half = net.node("Mul", [*names, net.store(np.float32(0.5))])
    return net.node("Mul", [half, net.node("Add", [inner, net.store(np.float32(1.0))])])


_SIXTH = {"alpha": 1.0 / 6.0, "beta": 0.5}

UNARY: dict[str, Build] = {
    "relu": node("Relu"),
    "clip": _clip,
    "leaky_relu": node("LeakyRelu", alpha=0.1),
    "sigmoid": node("Sigmoid"),
    "tanh": node("Tanh"),
    "hsigmoid": node("HardSigmoid", **_SIXTH),
    "silu": _gated("Sigmoid"),
    "hswish": _gated("HardSigmoid", **_SIXTH),
    "mish": _mish,
    "gelu": _gelu,
    "exp": node("Exp"),
}
"""The kinds with one operand, and how they are written."""


def reshape(shape: Sequence[int]) -> Build:
    """Returns a function that adds a Reshape to ``shape``."""
    return lambda net, names, _: net.node("Reshape", [*names, net.store(np.array(shape, np.int64))])


def first_half(channels: int) -> Build:
    """Returns a function that adds a Slice of the first channels."""

    def build(net: Net, names: list[str], _: bool) -> str:
        places = [net.store(np.array([n], np.int64)) for n in (0, channels, 1)]
        return net.node("Slice", [*names, *places])

    return build


def pool(op: str, window: int, stride: int) -> Build:
    """Returns a function that adds a pooling with as many results as strides fit into the input."""
    pads = [(window - stride) // 2, (window - stride) // 2, (window - 1) // 2, (window - 1) // 2]
    return node(op, kernel_shape=[window] * 2, strides=[stride] * 2, pads=pads)


def resize(mode: str) -> Build:
    """Returns a function that adds a Resize to twice the height and width."""
    settings: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": "half_pixel"}
    if mode == "nearest":
        settings.update(coordinate_transformation_mode="asymmetric", nearest_mode="floor")

    def build(net: Net, names: list[str], _: bool) -> str:
        return net.node("Resize", [*names, "", net.store(np.array([1, 1, 2, 2], np.float32))], **settings)

    return build


def layer_norm(length: int) -> Build:
    """Returns a function that adds LayerNorm over the last axis in its pieces, which onnxruntime fuses."""

    def build(net: Net, names: list[str], _: bool) -> str:
        mean = net.node("ReduceMean", names, axes=[-1], keepdims=1)
        apart = net.node("Sub", [*names, mean])
        square = net.node("Mul", [apart, apart])
        variance = net.node("ReduceMean", [square], axes=[-1], keepdims=1)
        spread = net.node("Sqrt", [net.node("Add", [variance, net.store(np.float32(1e-5))])])
        scaled = net.node("Mul", [net.node("Div", [apart, spread]), net.random((length,))])
        return net.node("Add", [scaled, net.random((length,))])

    return build


def linear(length: int, columns: int, matrix: bool) -> Build:
    """Returns a function that adds a linear layer with a bias: Gemm for a matrix, else MatMul and Add."""

    def build(net: Net, names: list[str], integer: bool) -> str:
        weight = net.weight((length, columns), axis=1) if integer else net.random((length, columns))
        bias = net.bias(columns) if integer else net.random((columns,))
        if matrix:
            return net.node("Gemm", [*names, weight, bias])
        return net.node("Add", [net.node("MatMul", [*names, weight]), bias])

    return build


def conv_transpose(inputs: int, outputs: int, window: int) -> Build:
    """Returns a function that adds a float ConvTranspose that doubles height and width."""
    pad = (window - 2) // 2

    def build(net: Net, names: list[str], _: bool) -> str:
        parameters = [net.random((inputs, outputs, window, window)), net.random((outputs,))]
        sizes: dict[str, Any] = {"kernel_shape": [window] * 2, "strides": [2, 2], "pads": [pad] * 4}
        return net.node("ConvTranspose", [*names, *parameters], **sizes)

    return build
