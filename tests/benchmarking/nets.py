"""Small ONNX files, in float and with integers, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.benchmarking.onnx_net import Net

CHANNELS, SIDE = 16, 8


def conv(net: Net, x: str, integer: bool, relu: bool = True) -> str:
    """A 1x1 convolution of all channels."""
    weight = (CHANNELS, CHANNELS, 1, 1)
    if integer:
        y = net.node("Conv", [x, net.weight(weight), net.bias(CHANNELS)], kernel_shape=[1, 1])
    else:
        y = net.node("Conv", [x, net.random(weight), net.random(weight[:1])], kernel_shape=[1, 1])
    y = net.node("Relu", [y]) if relu else y
    return net.quantize(y, zero_point=0 if relu else 128) if integer else y


def start(integer: bool) -> tuple[Net, str]:
    net = Net()
    x = net.input((1, CHANNELS, SIDE, SIDE))
    return net, net.quantize(x) if integer else x


def plain(integer: bool) -> bytes:
    """Two convolutions."""
    net, x = start(integer)
    return net.serialize(conv(net, conv(net, x, integer), integer))


def gated(integer: bool) -> bytes:
    """x * sigmoid(x) between convolutions."""
    net, x = start(integer)
    x = conv(net, x, integer, relu=False)
    y = net.node("Mul", [x, net.node("Sigmoid", [x])])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def residual(integer: bool) -> bytes:
    """A sum of two branches."""
    net, x = start(integer)
    x = conv(net, x, integer)
    y = net.node("Add", [conv(net, x, integer), x])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def divided(integer: bool) -> bytes:
    """A division, which has no integer kernel, between convolutions."""
    net, x = start(integer)
    y = net.node("Div", [conv(net, x, integer), net.random((1,))])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def excited(integer: bool) -> bytes:
    """Squeeze-and-excitation: a gate of one number for each channel."""
    net, x = start(integer)
    x = conv(net, x, integer)
    gate = net.node("GlobalAveragePool", [x])
    gate = conv(net, net.quantize(gate) if integer else gate, integer)
    gate = net.node("HardSigmoid", [gate])
    y = net.node("Mul", [x, net.quantize(gate, 1 / 256, 0) if integer else gate])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def pooled(integer: bool) -> bytes:
    """A max pool and a reshape, which only move values."""
    net, x = start(integer)
    y = net.node("MaxPool", [conv(net, x, integer)], kernel_shape=[2, 2], strides=[2, 2])
    y = net.quantize(y, zero_point=0) if integer else y
    return net.serialize(conv(net, y, integer))


def scaled(integer: bool) -> bytes:
    """A stored factor as the second operand, which onnxruntime folds into the convolution before it."""
    net, x = start(integer)
    x = conv(net, x, integer, relu=False)
    y = net.node("Mul", [x, net.store(np.float32(0.5))])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def scaled_first(integer: bool) -> bytes:
    """A stored factor as the first operand, which onnxruntime does not fold."""
    net, x = start(integer)
    x = conv(net, x, integer, relu=False)
    y = net.node("Mul", [net.store(np.float32(0.5)), x])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def shifted(integer: bool) -> bytes:
    """One stored summand for each channel."""
    net, x = start(integer)
    x = conv(net, x, integer, relu=False)
    y = net.node("Add", [x, net.random((1, CHANNELS, 1, 1))])
    return net.serialize(conv(net, net.quantize(y) if integer else y, integer))


def flat(integer: bool) -> bytes:
    """A linear layer behind a convolution."""
    net, x = start(integer)
    x = net.node("Flatten", [conv(net, x, integer)])
    x = net.quantize(x, zero_point=0) if integer else x
    size = CHANNELS * SIDE * SIDE
    weight = net.weight((4, size)) if integer else net.random((4, size))
    y = net.node("Gemm", [x, weight, net.bias(4) if integer else net.random((4,))], transB=1)
    return net.serialize(net.quantize(y) if integer else y)


NETS = {
    function.__name__: function
    for function in (plain, gated, residual, divided, excited, pooled, scaled, scaled_first, shifted, flat)
}


def write(path: Path, name: str, integer: bool) -> Path:
    """Writes a network of `NETS` to a file."""
    path.write_bytes(NETS[name](integer))
    return path
