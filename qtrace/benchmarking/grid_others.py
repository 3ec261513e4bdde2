"""The grid of all ops but convolutions in a cost table, each as the ONNX export writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qtrace.benchmarking import written
from qtrace.benchmarking.cases import Build, Case, alone, between_convs, boundaries
from qtrace.benchmarking.net import MIDDLE
from qtrace.costs import FLOAT, INTEGER, LOOKUP, PLAIN_MAX_POOL, OpShape

__all__ = ["other_cases"]

_MAPS = ((16, 4), (32, 12), (64, 28), (64, 80), (64, 144))  # channels and side
_PAGES = ((16, 32), (64, 32), (64, 64), (64, 128))  # whose channels are pages of memory
_LOOKUPS = ("sigmoid", "leaky_relu", "silu")
_BOTH = (FLOAT, INTEGER)

Shape = tuple[int, ...]


def other_cases() -> Iterator[Case]:
    """Returns ops of every kind, in each form that onnxruntime may have."""
    for channels, side in _MAPS:
        shape = (1, channels, side, side)
        yield boundaries(channels, side)
        yield from _unary(shape)
        yield from _binary(shape)
        yield from _moves(shape)
        yield from _pools(shape)
        yield from _joins(shape)
    for channels, side in _PAGES:
        yield boundaries(channels, side)
    yield from _rows()
    yield from _products()
    yield from _transposed()


def _each(forms: tuple[str, ...], op: OpShape, build: Build, zero: int = MIDDLE) -> Iterator[Case]:
    for form in forms:
        yield between_convs(op, form, build, zero=zero)


def _moved(op: OpShape, build: Build) -> Iterator[Case]:
    """Ops that give integers on unchanged, if the result has the scale and the zero point of the input."""
    return _each(_BOTH, op, build, zero=0)


def _unary(shape: Shape) -> Iterator[Case]:
    for kind, build in written.UNARY.items():
        op = OpShape(kind, (shape,), (shape,))
        yield between_convs(op, FLOAT, build)
        if kind in _LOOKUPS:
            yield between_convs(op, LOOKUP, build)


def _binary(shape: Shape) -> Iterator[Case]:
    per_channel = (1, shape[1], 1, 1)
    for kind, node in (("add", "Add"), ("mul", "Mul"), ("sub", "Sub"), ("div", "Div")):
        forms = _BOTH if kind in ("add", "mul") else (FLOAT,)
        for other in (shape, per_channel):
            yield from _each(forms, OpShape(kind, (shape, other), (shape,)), written.node(node))
        for other in ((), per_channel):
            op = OpShape(kind, (shape, other), (shape,), stored=True)
            yield from _each(forms, op, written.with_stored(node, other))


def _moves(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    matrix = (batch, channels * height * width)
    for form in _BOTH:
        yield alone(OpShape("reshape", (shape,), (matrix,)), form, written.reshape(matrix))
        op = OpShape("transpose", (shape,), ((batch, height, width, channels),))
        yield alone(op, form, written.node("Transpose", perm=[0, 2, 3, 1]))
    half = (batch, channels // 2, height, width)
    yield from _moved(OpShape("split", (shape,), (half,)), written.first_half(channels // 2))


def _pools(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    for window, stride in ((2, 2), (3, 2), (5, 1)):
        out = (batch, channels, -(-height // stride), -(-width // stride))
        sizes, steps = (window, window), (stride, stride)
        op = OpShape("max_pool2d", (shape,), (out,), sizes, steps)
        yield from _moved(op, written.pool("MaxPool", window, stride))
        if height <= 80:  # slow
            plain = replace(op, kind=PLAIN_MAX_POOL)
            yield alone(plain, INTEGER, written.pool("MaxPool", window, stride))
        op = OpShape("avg_pool2d", (shape,), (out,), sizes, steps)
        forms = _BOTH if height <= 28 else (FLOAT,)  # the integer kernel is slow
        yield from _each(forms, op, written.pool("AveragePool", window, stride))
    pooled = (batch, channels, 1, 1)
    yield from _each(
        _BOTH, OpShape("adaptive_avg_pool2d", (shape,), (pooled,)), written.node("GlobalAveragePool")
    )
    mean = written.node("ReduceMean", axes=[2, 3], keepdims=1)
    yield from _each((FLOAT,), OpShape("mean", (shape,), (pooled,)), mean)
    if height < 100:
        doubled = (batch, channels, 2 * height, 2 * width)
        for kind, mode in (("interpolate", "nearest"), ("interpolate, bilinear", "linear")):
            yield from _moved(OpShape(kind, (shape,), (doubled,)), written.resize(mode))


def _joins(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    for count in (2, 4):
        out = (batch, count * channels, height, width)
        yield from _each(_BOTH, OpShape("concat", (shape,) * count, (out,)), written.node("Concat", axis=1))


def _rows() -> Iterator[Case]:
    """Returns ops along the last axis."""
    for rows in (1, 40, 800):
        for length in (10, 200, 6000):
            if rows * length <= 800 * 800:
                shape = (1, rows, length)
                op = OpShape("softmax", (shape,), (shape,))
                for form in _BOTH:
                    yield alone(op, form, written.node("Softmax", axis=2), scale=1 / 256, zero=0)
    for rows in (1, 40, 400):
        for length in (32, 192, 768):
            shape = (1, rows, length)
            yield alone(OpShape("layer_norm", (shape,), (shape,)), FLOAT, written.layer_norm(length))


def _products() -> Iterator[Case]:
    for length in (64, 256, 1024):
        for columns in (64, 256, 1024):
            for rows in (1, 10, 100, 400):
                lead = (1,) if rows == 1 else (1, rows)
                shape, out = (*lead, length), (*lead, columns)
                op = OpShape("linear", (shape,), (out,), weight=(columns, length))
                for form in _BOTH:
                    yield alone(op, form, written.linear(length, columns, len(shape) == 2))
    for batch in (1, 8):
        for rows in (20, 200):
            for length, columns in ((32, rows), (rows, 32)):
                operands = ((batch, rows, length), (batch, length, columns))
                op = OpShape("matmul", operands, ((batch, rows, columns),))
                for form in _BOTH:
                    yield alone(op, form, written.node("MatMul"))


def _transposed() -> Iterator[Case]:
    for inputs, outputs, window in ((16, 16, 2), (24, 1, 2), (64, 24, 2), (64, 64, 4)):
        for side in (5, 20, 80):
            shape, out = (1, inputs, side, side), (1, outputs, 2 * side, 2 * side)
            op = OpShape(
                "conv_transpose2d", (shape,), (out,), weight=(inputs, outputs, window, window), stride=(2, 2)
            )
            yield between_convs(op, FLOAT, written.conv_transpose(inputs, outputs, window))
