"""Families: ops of one kind that run in kernels of one sort, and the coordinates that their time grows with.

A runtime has kernels of their own for pointwise, depthwise and dense convolutions, for channels that fill a
vector register and channels that do not, and for operands that are broadcast. Times are interpolated inside a
family only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qtrace.costs.shape import OpShape, numel

__all__ = ["ALIKE", "ALIKE_IN_FLOAT", "Family", "families"]

_BLOCK = 16  # channels in a vector register of AVX-512, and in a block of integer kernels
_PAGE = 1024  # floats: addresses that are pages apart share a line of the nearest cache
_STEM = 8  # fewer input channels than this have kernels that read the image as it is
_CONVS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED = {"conv_transpose2d": 2, "conv_transpose3d": 3}
_ROWS = ("softmax", "logsoftmax", "layer_norm", "rms_norm")
_REDUCTIONS = ("mean", "sum", "max", "min", "adaptive_avg_pool2d", "adaptive_max_pool2d")
_BINARY = (
    "add sub mul div maximum minimum pow floor_div mod less less_equal greater greater_equal equal not_equal"
)

# A kind -> the kind whose kernel computes it in every form.
ALIKE = {
    "conv1d": "conv2d",
    "conv3d": "conv2d",
    "relu6": "clip",
    "hard_sigmoid": "hsigmoid",
    "stack": "concat",
    **dict.fromkeys(("flatten", "expand_dims", "squeeze", "identity", "dropout"), "reshape"),
    **dict.fromkeys(("swapaxes", "channel_shuffle", "space_to_depth", "pixel_shuffle"), "transpose"),
    **dict.fromkeys(("getitem", "gather", "tile", "repeat", "broadcast_to", "roll"), "split"),
    "adaptive_max_pool2d": "max",
}

# A kind -> the kind of another function that takes as long in float.
ALIKE_IN_FLOAT = {
    **dict.fromkeys(("sub", "maximum", "minimum", "scale_and_shift"), "add"),
    **dict.fromkeys(("floor_div", "mod"), "div"),
    **dict.fromkeys(("neg", "abs", "square", "sign", "floor", "ceil"), "relu"),
    **dict.fromkeys(("sqrt", "prelu"), "relu"),
    **dict.fromkeys(("log", "log1p", "expm1", "softplus", "logsigmoid"), "exp"),
    **dict.fromkeys(("sum", "adaptive_avg_pool2d"), "mean"),
    **dict.fromkeys(("max", "min"), "mean"),
    "logsoftmax": "softmax",
    "gelu_tanh": "gelu",
    "rms_norm": "layer_norm",
}


@dataclass(frozen=True)
class Family:
    """A family and a place in it.

    Attributes:
        name: what the kernels have in common; "" where a kind has one family.
        at: the coordinates of the op, each at least 1.
    """

    name: str
    at: tuple[float, ...]


def families(op: OpShape) -> tuple[Family, ...]:
    """Returns the families that give the time of an op, the most exact one first.

    All families of an op have the same number of coordinates. A convolution whose shapes fit none belongs to
    no family: a graph may say anything of them.
    """
    if op.weight and op.kind in (*_CONVS, *_TRANSPOSED) and not _is_layer(op):
        return ()
    if op.kind in _CONVS and op.weight:
        candidates = _conv(op, _CONVS[op.kind])
    elif op.kind in _TRANSPOSED and op.weight:
        candidates = _transposed(op, _TRANSPOSED[op.kind])
    elif op.kind in ("linear", "matmul") and op.inputs[0] and op.outputs[0]:
        candidates = _product(op)
    elif op.kind in _BINARY.split():
        candidates = _binary(op)
    elif op.kind in _REDUCTIONS:
        candidates = _reduction(op)
    elif op.kind in _ROWS:
        length = op.inputs[0][-1] if op.inputs[0] else 1
        candidates = [Family("", (numel(op.inputs[0]) / max(length, 1), length))]
    elif op.kind.startswith(("max_pool2d", "avg_pool2d")):
        window = numel(op.weight) if op.weight else _window(op)
        candidates = [Family("", (_elements(op.outputs), window))]
    elif op.kind == "reorder":
        candidates = _reorder(op)
    elif op.kind in ("concat", "stack"):
        candidates = [Family("", (_elements(op.outputs), len(op.inputs)))]
    else:
        candidates = [Family("", (max(_elements(op.inputs), _elements(op.outputs)),))]
    return tuple(Family(f.name, tuple(max(float(c), 1.0) for c in f.at)) for f in candidates)


def _reorder(op: OpShape) -> list[Family]:
    """Coordinates: elements. Channels that are whole pages apart fall into the same lines of the cache."""
    size = numel(op.outputs[0])
    plane = numel(op.outputs[0][2:])
    plain = Family("", (size,))
    return [Family("whole pages", (size,)), plain] if plane % _PAGE == 0 else [plain]


def _is_layer(op: OpShape) -> bool:
    """Whether the shapes of a convolution have samples and channels, and groups divide these."""
    return op.groups > 0 and all(len(shape) > 1 for shape in (*op.inputs[:1], *op.outputs[:1], op.weight))


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(numel(shape) for shape in shapes)


def _window(op: OpShape) -> int:
    """Returns the window of a pooling, guessed from its stride where the shape does not say it."""
    return numel(op.stride) if op.stride else 4


def _blocks(channels: int) -> int:
    """Returns the number of channels with those that fill up the last block."""
    return math.ceil(channels / _BLOCK) * _BLOCK


def _conv(op: OpShape, axes: int) -> list[Family]:
    """Coordinates: multiplications of one output, output channels, output pixels of all samples."""
    area = numel(op.weight[-axes:])
    outputs = op.outputs[0][1]
    pixels = numel(op.outputs[0]) // max(outputs, 1)
    inputs = op.inputs[0][1] // op.groups
    strided = "" if max(op.stride, default=1) == 1 else ", strided"
    if op.groups > 1 and inputs == 1:
        return _depthwise(f"depthwise{strided}", area, outputs, pixels)
    if op.groups > 1:
        return [Family("grouped", (inputs * area, outputs, pixels))]
    name = "pointwise" if area == 1 else "3x3" if area <= 9 else "larger"
    if inputs < _STEM:
        stem = Family(f"stem {name}", (inputs * area, _blocks(outputs), pixels))
        return [stem, Family("stem 3x3", stem.at), Family(name, stem.at)]
    if name == "pointwise" and pixels == op.outputs[0][0]:
        name = "vector"  # of one pixel a sample, as in squeeze-and-excitation
        return [
            Family(name, (inputs, outputs, pixels)),
            Family("pointwise", (_blocks(inputs), _blocks(outputs), pixels)),
        ]
    narrow = Family(f"{name}, few outputs", (inputs * area, outputs, pixels))
    fits = inputs % _BLOCK == 0 and outputs % _BLOCK == 0
    padded = Family(name, (_blocks(inputs) * area, _blocks(outputs), pixels))
    odd = Family(f"{name}, odd channels", (inputs * area, outputs, pixels))
    candidates = [padded, Family("3x3", padded.at)] if fits else [odd, padded, Family("3x3", padded.at)]
    return [narrow, *candidates] if outputs < _BLOCK else candidates


def _depthwise(name: str, area: int, channels: int, pixels: int) -> list[Family]:
    """Coordinates: multiplications of one output, channels, output pixels of all samples."""
    padded, exact = (area, _blocks(channels), pixels), (area, channels, pixels)
    candidates = [Family(name, padded), Family("depthwise", padded)]
    if channels % _BLOCK == 0:
        return candidates
    return [Family(f"{name}, odd channels", exact), Family("depthwise, odd channels", exact), *candidates]


def _transposed(op: OpShape, axes: int) -> list[Family]:
    """Coordinates: input channels, outputs of one input pixel, input pixels of all samples."""
    channels = op.inputs[0][1]
    pixels = numel(op.inputs[0]) // max(channels, 1)
    each = op.outputs[0][1] // op.groups * numel(op.weight[-axes:])
    return [Family("", (channels // op.groups, each, pixels))]


def _product(op: OpShape) -> list[Family]:
    """Coordinates: length of the products, columns, rows of all samples."""
    length, columns = op.inputs[0][-1], op.outputs[0][-1]
    rows = numel(op.outputs[0]) // max(columns, 1)
    batches = numel(op.outputs[0][:-2]) if op.kind == "matmul" and not op.stored and not op.weight else 1
    name = "batched" if batches > 1 else "computed" if op.kind == "matmul" and not op.stored else ""
    if rows == 1:
        return [Family("vector", (length, columns, 1)), Family("", (length, columns, 1))]
    at = (length, columns, rows)
    return [Family(name, at), Family("computed", at), Family("", at)]


def _binary(op: OpShape) -> list[Family]:
    """Coordinates: elements of the output. A stored operand has kernels of its own in integers."""
    size = numel(op.outputs[0])
    sizes = [numel(shape) for shape in op.inputs]
    smallest = min(sizes) if len(sizes) > 1 else 1
    name = "same" if smallest == size and size > 1 else "scalar" if smallest == 1 else "broadcast"
    if op.stored:
        return [Family(f"stored {n}", (size,)) for n in (name, "scalar", "broadcast")]
    return [Family(n, (size,)) for n in (name, "broadcast", "same")]


def _reduction(op: OpShape) -> list[Family]:
    """Coordinates: elements of the input, which are all read once."""
    return [Family("", (numel(op.inputs[0]),))]
