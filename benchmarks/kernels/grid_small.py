"""The grid of a cost table for runtimes that show no profile as fine as onnxruntime's: ops and forms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

from qtrace.costs import FLOAT, INTEGER, OpShape

__all__ = ["small_grid"]

_CHANNELS, _SIDES, _ODD_CHANNELS = (16, 64, 256), (5, 20, 80), (24, 120)
_MOST_MACS = 500_000_000  # of one layer: about 10 ms in float
_MAPS = ((16, 6), (32, 24), (64, 80))  # channels and side
_UNARY = "relu clip leaky_relu sigmoid tanh hsigmoid silu hswish exp"

Shape = tuple[int, ...]


def small_grid() -> Iterator[tuple[OpShape, str]]:
    """Returns ops of every kind, in float and on integers; a runtime leaves out ops without a kernel."""
    for form in (FLOAT, INTEGER):
        for op in (*_convs(), *_products(), *_rows()):
            yield op, form
        for channels, side in _MAPS:
            shape = (1, channels, side, side)
            for op in (*_elementwise(shape), *_windows(shape)):
                yield op, form
    for channels, side in _MAPS:
        shape = (1, channels, side, side)
        yield OpShape("quantize", (shape,), (shape,)), FLOAT
        yield OpShape("dequantize", (shape,), (shape,)), FLOAT


def _convs() -> Iterator[OpShape]:
    for kernel in (1, 3):
        for channels in (_CHANNELS, _ODD_CHANNELS):
            for inputs, outputs in combinations_with_replacement(channels, 2):
                for side in _SIDES:
                    if inputs * outputs * kernel**2 * side**2 <= _MOST_MACS:
                        yield _conv(inputs, outputs, kernel, side)
    yield _conv(512, 512, 3, 5)
    for inputs, outputs in combinations_with_replacement((16, 256), 2):
        yield _conv(inputs, outputs, 1, 1)
    for kernel in (3, 5):
        for count in (*_CHANNELS, 120):
            for side in _SIDES:
                yield _conv(count, count, kernel, side, groups=count)
    for count in _CHANNELS:
        for side in _SIDES:
            yield _conv(count, count, 3, side, groups=count, stride=2)
    for outputs in (16, 64):
        for side in (12, 48, 160):
            yield _conv(3, outputs, 3, side, stride=2)


def _conv(inputs: int, outputs: int, kernel: int, side: int, groups: int = 1, stride: int = 1) -> OpShape:
    shape, out = (1, inputs, side * stride, side * stride), (1, outputs, side, side)
    weight = (outputs, inputs // groups, kernel, kernel)
    return OpShape("conv2d", (shape,), (out,), weight, (stride, stride), groups)


def _products() -> Iterator[OpShape]:
    for length in (64, 512):
        for columns in (64, 512):
            for rows in (1, 40):
                yield OpShape("linear", ((rows, length),), ((rows, columns),), weight=(columns, length))
    for rows in (20, 100):
        for length, columns in ((32, rows), (rows, 32)):
            yield OpShape("matmul", ((8, rows, length), (8, length, columns)), ((8, rows, columns),))


def _rows() -> Iterator[OpShape]:
    for rows, length in ((1, 10), (40, 200), (400, 200), (40, 6000)):
        yield OpShape("softmax", ((1, rows, length),), ((1, rows, length),))


def _elementwise(shape: Shape) -> Iterator[OpShape]:
    for kind in _UNARY.split():
        yield OpShape(kind, (shape,), (shape,))
    per_channel = (1, shape[1], 1, 1)
    for kind in ("add", "mul", "sub", "div"):
        for other in (shape, per_channel):
            yield OpShape(kind, (shape, other), (shape,))
        yield OpShape(kind, (shape, per_channel), (shape,), stored=True)


def _windows(shape: Shape) -> Iterator[OpShape]:
    batch, channels, height, width = shape
    for window, stride in ((2, 2), (3, 2), (5, 1)):
        out = (batch, channels, -(-height // stride), -(-width // stride))
        for kind in ("max_pool2d", "avg_pool2d"):
            yield OpShape(kind, (shape,), (out,), (window, window), (stride, stride))
    for kind in ("adaptive_avg_pool2d", "mean"):
        yield OpShape(kind, (shape,), ((batch, channels, 1, 1),))
    for count in (2, 4):
        yield OpShape("concat", (shape,) * count, ((batch, count * channels, height, width),))
    doubled = (batch, channels, 2 * height, 2 * width)
    for kind in ("interpolate", "interpolate, bilinear"):
        yield OpShape(kind, (shape,), (doubled,))
    matrix = (batch, channels * height * width)
    yield OpShape("reshape", (shape,), (matrix,))
    yield OpShape("transpose", (shape,), ((batch, height, width, channels),))
    yield OpShape("split", (shape,), ((batch, channels // 2, height, width),))
    yield OpShape("conv_transpose2d", (shape,), (doubled,), (channels, channels, 2, 2), (2, 2))
