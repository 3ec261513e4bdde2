"""The grid of all ops but convolutions in a cost table, each as the ONNX export writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kernels.cases import Case, alone, between_convs, boundaries
from benchmarks.kernels.graphs import FUNCTIONS
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


def _each(op: OpShape, forms: tuple[str, ...] = _BOTH) -> Iterator[Case]:
    for form in forms:
        yield between_convs(op, form)


def _unary(shape: Shape) -> Iterator[Case]:
    for kind in FUNCTIONS:
        yield from _each(OpShape(kind, (shape,), (shape,)), (FLOAT, LOOKUP) if kind in _LOOKUPS else (FLOAT,))


def _binary(shape: Shape) -> Iterator[Case]:
    per_channel = (1, shape[1], 1, 1)
    for kind in ("add", "mul", "sub", "div"):
        forms = _BOTH if kind in ("add", "mul") else (FLOAT,)
        for other in (shape, per_channel):
            yield from _each(OpShape(kind, (shape, other), (shape,)), forms)
        for stored in ((), per_channel):
            yield from _each(OpShape(kind, (shape, stored), (shape,), stored=True), forms)


def _moves(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    for form in _BOTH:
        yield alone(OpShape("reshape", (shape,), ((batch, channels * height * width),)), form)
        yield alone(OpShape("transpose", (shape,), ((batch, height, width, channels),)), form)
    yield from _each(OpShape("split", (shape,), ((batch, channels // 2, height, width),)))


def _pools(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    for window, stride in ((2, 2), (3, 2), (5, 1)):
        out = (batch, channels, -(-height // stride), -(-width // stride))
        op = OpShape("max_pool2d", (shape,), (out,), (window, window), (stride, stride))
        yield from _each(op)
        if height <= 80:  # slow
            yield alone(replace(op, kind=PLAIN_MAX_POOL), INTEGER)
        yield from _each(
            replace(op, kind="avg_pool2d"), _BOTH if height <= 28 else (FLOAT,)
        )  # slow on integers
    pooled = (batch, channels, 1, 1)
    yield from _each(OpShape("adaptive_avg_pool2d", (shape,), (pooled,)))
    yield from _each(OpShape("mean", (shape,), (pooled,)), (FLOAT,))
    if height < 100:
        doubled = (batch, channels, 2 * height, 2 * width)
        for kind in ("interpolate", "interpolate, bilinear"):
            yield from _each(OpShape(kind, (shape,), (doubled,)))


def _joins(shape: Shape) -> Iterator[Case]:
    batch, channels, height, width = shape
    for count in (2, 4):
        yield from _each(OpShape("concat", (shape,) * count, ((batch, count * channels, height, width),)))


def _rows() -> Iterator[Case]:
    """Returns ops along the last axis."""
    for rows in (1, 40, 800):
        for length in (10, 200, 6000):
            if rows * length <= 800 * 800:
                shape = (1, rows, length)
                for form in _BOTH:
                    yield alone(OpShape("softmax", (shape,), (shape,)), form)
    for rows in (1, 40, 400):
        for length in (32, 192, 768):
            shape = (1, rows, length)
            yield alone(OpShape("layer_norm", (shape,), (shape,)), FLOAT)


def _products() -> Iterator[Case]:
    for length in (64, 256, 1024):
        for columns in (64, 256, 1024):
            for rows in (1, 10, 100, 400):
                lead = (1,) if rows == 1 else (1, rows)
                op = OpShape("linear", ((*lead, length),), ((*lead, columns),), weight=(columns, length))
                for form in _BOTH:
                    yield alone(op, form)
    for batch in (1, 8):
        for rows in (20, 200):
            for length, columns in ((32, rows), (rows, 32)):
                operands = ((batch, rows, length), (batch, length, columns))
                op = OpShape("matmul", operands, ((batch, rows, columns),))
                for form in _BOTH:
                    yield alone(op, form)


def _transposed() -> Iterator[Case]:
    for inputs, outputs, window in ((16, 16, 2), (24, 1, 2), (64, 24, 2), (64, 64, 4)):
        for side in (5, 20, 80):
            shape, out = (1, inputs, side, side), (1, outputs, 2 * side, 2 * side)
            weight = (inputs, outputs, window, window)
            op = OpShape("conv_transpose2d", (shape,), (out,), weight=weight, stride=(2, 2))
            yield between_convs(op, FLOAT)
