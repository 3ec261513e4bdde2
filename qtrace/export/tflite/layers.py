"""TFLite for layers with weights, and for matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import NONE, Build, Emitter, Target
from qtrace.export.tflite.layout import CHANNELS_LAST, Order, file_shape, natural, window_pads
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Grid, Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["FLOAT_LAYERS", "INEXACT", "INTEGER_LAYERS", "padded"]

# XNNPACK multiplies no two affine operands. LiteRT's own kernel rounds twice: one off in 0.3 % of the values.
INEXACT = frozenset({"matmul"})

_PADDING = {"SAME": 0, "VALID": 1}


def padded(b: Build, x: Stored, pads: list[tuple[int, int]], lowest: bool = False) -> Stored:
    """An image (N, H, W, C) with more around it.

    Args:
        b: the file.
        x: the image.
        pads: rows and columns before and behind.
        lowest: whether to add the lowest number there is, as for a maximum, instead of zeros.
    """
    widths = b.writer.constant("pads", np.array([(0, 0), *pads, (0, 0)], np.int32))
    made = b.like(
        x, f"{x.name}_padded", [n + sum(w) for n, w in zip(x.shape, ((0, 0), *pads, (0, 0)), strict=True)]
    )
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

    def __init__(self, b: Build, job: Job, integers: bool) -> None:
        self.b, self.job, self.call, self.ints = b, job, job.call, integers
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
        found = self.b.integers[self.weight_node][0] if self.ints else self.b.value(self.weight_node)
        if found is None:
            raise ExportError(
                f"{self.call.out.name}: its weight is computed from the model's input, which TFLite has no "
                "form for: use matmul, or end the graph before it"
            )
        return found.astype(np.int8) if self.ints else found

    def stored_weight(self, laid: np.ndarray, axis: int) -> Stored:
        """The weight in the layout of the operator."""
        if not self.ints:
            return self.b.writer.constant(self.base, laid)
        return self.b.writer.constant(f"{self.base}_int", laid, self.b.integers[self.weight_node][1], axis)

    def bias(self, count: int) -> Stored:
        """The bias as a vector; zeros where the graph has none, since kernels on integers ask for one."""
        node, b = self.call.bias, self.b
        if not self.ints:
            value = np.zeros(count, np.float32) if node is None else b.value(node)
            if value is None:
                raise ExportError(
                    f"{self.call.out.name}: its bias is computed, which TFLite has no form for: "
                    "add it behind the layer, or set quantize: false"
                )
            return b.writer.constant(self.base + "_bias" if node is None else node.name, value.reshape(-1))
        kind = np.int64 if self.input.dtype == np.int16 else np.int32
        assert self.input.grid is not None
        if node is not None:
            integers, grid = b.integers[node]
            name = f"{b.plan.graph.site_name(node)}_int"
            return b.writer.constant(name, integers.reshape(-1).astype(kind), grid)
        scale = np.float32(self.input.grid.scale[0]) * self._weight_scales()
        return b.writer.constant(f"{self.base}_zeros", np.zeros(count, kind), Grid.symmetric(scale))

    def _weight_scales(self) -> np.ndarray:
        return np.array(self.b.integers[self.weight_node][1].scale, np.float32)

    def target(self, order: Order, fuses: bool = True) -> Target:
        """Where the operator writes."""
        if self.ints:
            return self.b.target(self.job, order, fuses)
        return Target(self.b.result(self.call.out, order), order, NONE)

    def done(self, target: Target) -> None:
        """Takes the result."""
        if self.ints:
            self.b.done(self.job, target)
        else:
            self.b.put(self.call.out, target.stored, target.order)


def _windows(b: Build, call: OpCall, kernel: tuple[int, ...]) -> tuple[str, list[tuple[int, int]]]:
    """TFLite's name of the padding, or "" and what has to be added."""
    a, shapes = call.attrs, (b.shape(call.inputs[0])[2:], b.shape(call.out)[2:])
    found = [
        window_pads(i, o, k, s, p, d)
        for i, o, k, s, p, d in zip(*shapes, kernel, a["stride"], a["padding"], a["dilation"], strict=True)
    ]
    names = {name for name, _ in found}
    # Nothing is added along an axis without padding by SAME either, if its rule says so.
    if names == {"VALID"} or names == {"SAME"}:
        return names.pop(), []
    return "", [pads for _, pads in found]


def _conv(b: Build, job: Job, integers: bool) -> None:
    layer, call = _Layer(b, job, integers), job.call
    x = layer.read(CHANNELS_LAST)
    weight = layer.weight()
    weight = weight.reshape(-1, *weight.shape[-3:])  # (out, in / groups, height, width)
    count, inside, *kernel = weight.shape
    padding, pads = _windows(b, call, tuple(kernel))
    if pads:
        x, padding = padded(b, x, pads), "VALID"
    a = call.attrs
    options: dict[str, Any] = {
        "padding": _PADDING[padding],
        **dict(zip(("strideH", "strideW"), a["stride"], strict=True)),
        **dict(zip(("dilationHFactor", "dilationWFactor"), a["dilation"], strict=True)),
    }
    target = layer.target(CHANNELS_LAST)
    options["fusedActivationFunction"] = target.activation
    if a["groups"] > 1 and inside == 1:
        laid = layer.stored_weight(weight[:, 0].transpose(1, 2, 0)[None], 3)
        options["depthMultiplier"] = count // a["groups"]
        code, kind, version = "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", 0
    else:
        laid = layer.stored_weight(weight.transpose(0, 2, 3, 1), 0)
        code, kind, version = "CONV_2D", "Conv2DOptions", 6 if a["groups"] > 1 else 0
    b.writer.op(code, [x, laid, layer.bias(count)], [target.stored], kind, version, **options)
    layer.done(target)


def _conv_transpose(b: Build, job: Job, integers: bool) -> None:
    """TRANSPOSE_CONV, and a slice where its own rules of padding do not cut off what the graph does."""
    layer, call = _Layer(b, job, integers), job.call
    x = layer.read(CHANNELS_LAST)
    weight = _dense(layer.weight(), call)
    weight = _dilated(weight, call.attrs["dilation"])
    count, *kernel, _ = weight.shape
    a, target = call.attrs, layer.target(CHANNELS_LAST, fuses=False)
    wanted = target.stored.shape
    whole = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], a["stride"], kernel, strict=True)]
    same = all(
        o == n * s and (full - o) // 2 == p and full >= o
        for n, o, s, full, p in zip(x.shape[1:3], wanted[1:3], a["stride"], whole, a["padding"], strict=True)
    )
    fits = same or (tuple(whole) == wanted[1:3] and a["padding"] == (0, 0))
    made, size = target.stored, list(wanted)
    if not fits:
        # What output_padding adds behind is out of reach of every value: zeros and the bias.
        size = [
            wanted[0],
            *(max(f, p + o) for f, p, o in zip(whole, a["padding"], wanted[1:3], strict=True)),
            count,
        ]
        made = b.like(target.stored, f"{call.out.name}_whole", size)
    inputs = [b.writer.ints(size), layer.stored_weight(weight, 0), x, layer.bias(count)]
    options = dict(zip(("strideH", "strideW"), a["stride"], strict=True))
    padding = _PADDING["SAME" if same else "VALID"]
    b.writer.op("TRANSPOSE_CONV", inputs, [made], "TransposeConvOptions", padding=padding, **options)
    if not fits:
        places = zip((1, 2), a["padding"], wanted[1:3], strict=True)
        b.cut(made, target.stored, {i: (p, p + n, 1) for i, p, n in places})
    b.fixed = b.fixed or call.out.name  # the shape of the result is part of the file
    layer.done(target)


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


def _linear(b: Build, job: Job, integers: bool) -> None:
    layer = _Layer(b, job, integers)
    weight, (held, moved) = layer.weight(), b.moved_from(layer.source)
    found = moved.shuffle()
    if found is not None:  # the features stand in the order in which the file joins them: the weight follows
        order, places = found
        weight = weight[:, places]
        free = next((i for i, a in enumerate(order) if (0, 0) in moved.axes[a]), None)
        x = layer.taken(b.reshaped(held.stored, file_shape(moved.shape, order), free))
    else:
        last = len(moved.axes) - 1
        order = (*(a for a in moved.nearest() if a != last), last)
        x = layer.read(order)
    target = layer.target(order)
    inputs = [x, layer.stored_weight(weight, 0), layer.bias(weight.shape[0])]
    version = 12 if integers and len(layer._weight_scales()) > 1 else 0
    b.writer.op(
        "FULLY_CONNECTED",
        inputs,
        [target.stored],
        "FullyConnectedOptions",
        version,
        keepNumDims=True,
        fusedActivationFunction=target.activation,
    )
    layer.done(target)


def _matmul(b: Build, job: Job, integers: bool) -> None:
    call, rank = job.call, b.rank(job.call.out)
    if any(b.rank(n) < 2 for n in call.inputs):
        raise ExportError(
            f"{call.out.name}: a product with a vector has no TFLite form: give it an axis of size 1"
        )
    parts, flips = [], []
    for node, flip in zip(call.inputs, (call.attrs["transpose_a"], call.attrs["transpose_b"]), strict=True):
        held = b.widened(b.get(node) if integers else b.floats(b.get(node)), rank)
        order = natural(rank)
        turned = (*order[:-2], order[-1], order[-2])
        if held.order == turned:  # the operator reads the transpose as it stands
            order, flip = turned, not flip
        parts.append(b.arrange(held, order))
        flips.append(bool(flip))
    order = natural(rank)
    if integers:
        target = b.target(job, order, fuses=False)
    else:
        target = Target(b.result(call.out, order), order, NONE)
    options = {"adjX": flips[0], "adjY": flips[1]}
    b.writer.op("BATCH_MATMUL", parts, [target.stored], "BatchMatMulOptions", **options)
    if integers:
        b.done(job, target)
    else:
        b.put(call.out, target.stored, order)


def _both(emit: Any) -> tuple[Emitter, Emitter]:
    return (lambda b, job: emit(b, job, True)), (lambda b, job: emit(b, job, False))


_FORMS = {
    "conv2d": _both(_conv),
    "conv_transpose2d": _both(_conv_transpose),
    "linear": _both(_linear),
    "matmul": _both(_matmul),
}

INTEGER_LAYERS: dict[str, Emitter] = {kind: forms[0] for kind, forms in _FORMS.items()}
FLOAT_LAYERS: dict[str, Emitter] = {kind: forms[1] for kind, forms in _FORMS.items()}
