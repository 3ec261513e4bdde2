"""TFLite for layers with weights, and for matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.bias import float_bias, integer_bias, zero_bias
from qtrace.export.tflite.build import Build, Emitter
from qtrace.export.tflite.layout import CHANNELS_LAST, Order, file_shape, natural, window_pads
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["INEXACT", "LAYERS", "PADDING", "padded", "windows"]

# XNNPACK multiplies no two affine operands. LiteRT's own kernel rounds twice: one off in 0.3 % of the values.
INEXACT = frozenset({"matmul"})

PADDING = {"SAME": 0, "VALID": 1}


def padded(b: Build, x: Stored, pads: list[tuple[int, int]], lowest: bool = False) -> Stored:
    """An image (N, H, W, C) with more around it.

    Args:
        b: the file.
        x: the image.
        pads: rows and columns before and behind.
        lowest: whether to add the lowest number there is, as for a maximum, instead of zeros.
    """
    every = [(0, 0), *pads, (0, 0)]
    widths = b.writer.constant("pads", np.array(every, np.int32))
    made = b.like(x, f"{x.name}_padded", [n + sum(w) for n, w in zip(x.shape, every, strict=True)])
    zero = x.grid is not None and x.grid.zero_point[0] == np.iinfo(x.dtype).min
    if not lowest or zero:  # integers are padded with their zero point
        b.writer.op("PAD", [x, widths], [made], "PadOptions")
        return made
    low = np.finfo(np.float32).min if x.grid is None else np.iinfo(x.dtype).min
    fill = b.writer.constant("lowest", np.array([low], x.dtype), x.grid)
    b.writer.op("PADV2", [x, widths, fill], [made], "PadV2Options")
    return made


class _Layer:
    """A layer as it is computed: on integers, or in float with the weights that the integers stand for."""

    def __init__(self, b: Build, job: Job) -> None:
        self.b, self.call, self.ints = b, job.call, job.site is not None
        self.source = job.call.inputs[0]
        assert job.call.weight is not None
        self.weight_node: TensorNode = job.call.weight
        self.base = b.plan.graph.site_name(self.weight_node)

    def read(self, order: Order) -> Stored:
        """The layer's input with its axes in an order."""
        return self.taken(self.b.ordered(self.source, order))

    def taken(self, stored: Stored) -> Stored:
        """The input as integers or floats."""
        self.input = stored if self.ints else self.b.as_floats(stored)
        return self.input

    def weight(self) -> np.ndarray:
        """Integers or floats, in MegEngine's layout."""
        weight = self.b.integers[self.weight_node][0] if self.ints else self.b.value(self.weight_node)
        if weight is None:
            raise ExportError(
                f"{self.call.out.name}: its weight is computed from the model's input, which TFLite has no "
                "form for: use matmul, or end the graph before it"
            )
        return weight.astype(np.int8) if self.ints else weight

    def stored_weight(self, laid: np.ndarray, axis: int) -> Stored:
        """The weight in the layout of the operator."""
        if not self.ints:
            return self.b.writer.constant(self.base, laid)
        return self.b.writer.constant(f"{self.base}_int", laid, self.b.integers[self.weight_node][1], axis)

    def bias(self, count: int) -> Stored:
        """The bias as a vector, zeros where the graph has none."""
        if not self.ints:
            return float_bias(self.b, self.call, f"{self.base}_bias", count)
        if self.call.bias is None:
            return zero_bias(self.b, self.base, count, self.input, self.weight_scales())
        return integer_bias(self.b, self.call.bias, self.input)

    def weight_scales(self) -> np.ndarray:
        """The scales of an integer weight."""
        return np.array(self.b.integers[self.weight_node][1].scale, np.float32)


def windows(b: Build, call: OpCall, kernel: tuple[int, ...]) -> tuple[str, list[tuple[int, int]]]:
    """TFLite's name of the padding, or "" and what has to be added."""
    a, shapes = call.attrs, (b.shape(call.inputs[0])[2:], b.shape(call.out)[2:])
    sides = (*shapes, kernel, a["stride"], a["padding"], a.get("dilation", (1, 1)))
    axes = [window_pads(*numbers) for numbers in zip(*sides, strict=True)]
    names = {name for name, _ in axes}
    # Nothing is added along an axis without padding by SAME either, if its rule says so.
    if names == {"VALID"} or names == {"SAME"}:
        return names.pop(), []
    return "", [pads for _, pads in axes]


def _conv(b: Build, job: Job) -> None:
    layer, call, a = _Layer(b, job), job.call, job.call.attrs
    x = layer.read(CHANNELS_LAST)
    weight = layer.weight()
    weight = weight.reshape(-1, *weight.shape[-3:])  # (out, in / groups, height, width)
    count, inside, *kernel = weight.shape
    padding, pads = windows(b, call, tuple(kernel))
    if pads:
        x, padding = padded(b, x, pads), "VALID"
    options: dict[str, Any] = {
        "padding": PADDING[padding],
        **dict(zip(("strideH", "strideW"), a["stride"], strict=True)),
        **dict(zip(("dilationHFactor", "dilationWFactor"), a["dilation"], strict=True)),
    }
    target = b.target(job, CHANNELS_LAST)
    options["fusedActivationFunction"] = target.activation
    if a["groups"] > 1 and inside == 1:
        stored = layer.stored_weight(weight[:, 0].transpose(1, 2, 0)[None], 3)
        options["depthMultiplier"] = count // a["groups"]
        code, kind, version = "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", 0
    else:
        stored = layer.stored_weight(weight.transpose(0, 2, 3, 1), 0)
        code, kind, version = "CONV_2D", "Conv2DOptions", 6 if a["groups"] > 1 else 0
    b.writer.op(code, [x, stored, layer.bias(count)], [target.stored], kind, version, **options)
    b.done(job, target)


def _conv_transpose(b: Build, job: Job) -> None:
    """TRANSPOSE_CONV, and a slice where its own rules of padding do not cut off what the graph does."""
    layer, call, a = _Layer(b, job), job.call, job.call.attrs
    x = layer.read(CHANNELS_LAST)
    weight = _dilated(_dense(layer.weight(), call), a["dilation"])
    count, *kernel, _ = weight.shape
    target = b.target(job, CHANNELS_LAST, fuses=False)
    batch, *wanted, _ = target.stored.shape
    whole = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], a["stride"], kernel, strict=True)]
    same = all(
        o == n * s and (full - o) // 2 == p and full >= o
        for n, o, s, full, p in zip(x.shape[1:3], wanted, a["stride"], whole, a["padding"], strict=True)
    )
    result, sizes = target.stored, wanted
    cut = not same and (whole != wanted or a["padding"] != (0, 0))
    if cut:
        # What output_padding adds behind is out of reach of every value: zeros and the bias.
        sizes = [max(f, p + o) for f, p, o in zip(whole, a["padding"], wanted, strict=True)]
        result = b.like(target.stored, f"{call.out.name}_whole", (batch, *sizes, count))
    inputs = [b.writer.ints([batch, *sizes, count]), layer.stored_weight(weight, 0), x, layer.bias(count)]
    options = dict(zip(("strideH", "strideW"), a["stride"], strict=True))
    padding = PADDING["SAME" if same else "VALID"]
    b.writer.op("TRANSPOSE_CONV", inputs, [result], "TransposeConvOptions", padding=padding, **options)
    if cut:
        places = zip((1, 2), a["padding"], wanted, strict=True)
        b.cut(result, target.stored, {i: (p, p + n, 1) for i, p, n in places})
    b.fixed = b.fixed or call.out.name  # the shape of the result is part of the file
    b.done(job, target)


def _dense(weight: np.ndarray, call: OpCall) -> np.ndarray:
    """A transposed convolution's weight as (out, height, width, in); groups become blocks between zeros."""
    if weight.ndim == 4:
        return weight.transpose(1, 2, 3, 0)
    groups, inside, outside, height, width = weight.shape
    laid = np.zeros((groups * outside, height, width, groups * inside), weight.dtype)
    for g in range(groups):
        block = weight[g].transpose(1, 2, 3, 0)
        laid[g * outside : (g + 1) * outside, :, :, g * inside : (g + 1) * inside] = block
    return laid


def _dilated(weight: np.ndarray, dilation: tuple[int, int]) -> np.ndarray:
    """The kernel with zeros between its values."""
    if tuple(dilation) == (1, 1):
        return weight
    count, height, width, inside = weight.shape
    rows, columns = ((n - 1) * d + 1 for n, d in zip((height, width), dilation, strict=True))
    laid = np.zeros((count, rows, columns, inside), weight.dtype)
    laid[:, :: dilation[0], :: dilation[1]] = weight
    return laid


def _linear(b: Build, job: Job) -> None:
    layer = _Layer(b, job)
    weight, (held, moved) = layer.weight(), b.moved_from(layer.source)
    shuffle = moved.shuffle()
    if (
        shuffle is not None
    ):  # the features stand in the order in which the file joins them: the weight follows
        order, places = shuffle
        weight = weight[:, places]
        free = next((i for i, a in enumerate(order) if (0, 0) in moved.axes[a]), None)
        x = layer.taken(b.reshaped(held.stored, file_shape(moved.shape, order), free))
    else:
        last = len(moved.axes) - 1
        order = (*(a for a in moved.nearest() if a != last), last)
        x = layer.read(order)
    target = b.target(job, order)
    inputs = [x, layer.stored_weight(weight, 0), layer.bias(weight.shape[0])]
    version = 12 if layer.ints and len(layer.weight_scales()) > 1 else 0
    options = {"keepNumDims": True, "fusedActivationFunction": target.activation}
    b.writer.op("FULLY_CONNECTED", inputs, [target.stored], "FullyConnectedOptions", version, **options)
    b.done(job, target)


def _matmul(b: Build, job: Job) -> None:
    call, rank = job.call, b.rank(job.call.out)
    if any(b.rank(n) < 2 for n in call.inputs):
        raise ExportError(
            f"{call.out.name}: a product with a vector has no TFLite form: give it an axis of size 1"
        )
    factors, flips = [], []
    for node, flip in zip(call.inputs, (call.attrs["transpose_a"], call.attrs["transpose_b"]), strict=True):
        held = b.get(node) if job.site is not None else b.floats(b.get(node))
        held, order = b.widened(held, rank), natural(rank)
        turned = (*order[:-2], order[-1], order[-2])
        if held.order == turned:  # the operator reads the transpose as it stands
            order, flip = turned, not flip
        factors.append(b.arrange(held, order))
        flips.append(bool(flip))
    options = {"adjX": flips[0], "adjY": flips[1]}
    b.compute(job, natural(rank), "BATCH_MATMUL", factors, "BatchMatMulOptions", False, **options)


# On integers where the result has a site, else in float.
LAYERS: dict[str, Emitter] = {
    "conv2d": _conv,
    "conv_transpose2d": _conv_transpose,
    "linear": _linear,
    "matmul": _matmul,
}
