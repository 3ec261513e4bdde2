"""TFLite for layers with weights, and for matrix products.

The biases of a TFLite file: int32, or int64 next to activations of 16 bits.

The scale of a bias, input scale times weight scale, and its rounding are the same in every format:
`QuantizedSite.bias_scale` and `QuantizedSite.integers` in ``preparation/model.py`` compute them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert.schema_py_generated import Padding

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.targets.tflite.build import Builder, Emitter, StoredLayer
from qtrace.targets.tflite.layout import (
    CHANNELS_LAST,
    FusedOp,
    Order,
    channels_last,
    file_shape,
    natural,
    window_pads,
)
from qtrace.targets.tflite.writer import FileTensor, Grid

__all__ = [
    "FLOAT_LAYERS",
    "INEXACT",
    "LAYERS",
    "float_bias",
    "integer_bias",
    "padded",
    "record_bias",
    "windows",
    "zero_bias",
]

# XNNPACK multiplies no two affine operands. LiteRT's own kernel rounds twice: one off in 0.3 % of the values.
INEXACT = frozenset({"matmul"})


def padded(b: Builder, x: FileTensor, pads: list[tuple[int, int]], lowest: bool = False) -> FileTensor:
    """Pads an image (N, H, W, C), or a volume (N, D, H, W, C).

    Args:
        b: the file.
        x: the image.
        pads: the number of places added before and after along each axis between N and C.
        lowest: whether to pad with the lowest number of the type, as a maximum needs, instead of zeros.
    """
    widths = [(0, 0), *pads, (0, 0)]
    stored_widths = b.writer.constant("pads", np.array(widths, np.int32))
    result = b.like(x, f"{x.name}_padded", [n + sum(w) for n, w in zip(x.shape, widths, strict=True)])
    zero = x.grid is not None and x.grid.zero_point[0] == np.iinfo(x.dtype).min
    if not lowest or zero:  # integers are padded with their zero point
        b.writer.op("PAD", [x, stored_widths], [result])
        return result
    low = np.finfo(np.float32).min if x.grid is None else np.iinfo(x.dtype).min
    fill = b.writer.constant("lowest", np.array([low], x.dtype), x.grid)
    b.writer.op("PADV2", [x, stored_widths, fill], [result])
    return result


class _Layer:
    """A layer with weights, computed on integers or in float; float weights are the rounded ones."""

    def __init__(self, b: Builder, op: FusedOp) -> None:
        self.b, self.call, self.ints = b, op.call, op.site is not None
        self.source = op.call.inputs[0]
        assert op.call.weight is not None
        self.weight_node: TensorNode = op.call.weight
        self.base = b.plan.graph.site_name(self.weight_node)

    def read(self, order: Order) -> FileTensor:
        """Returns the layer's input in ``order``, as integers or floats."""
        return self.use(self.b.ordered(self.source, order))

    def use(self, tensor: FileTensor) -> FileTensor:
        """Makes ``tensor`` the layer's input, as integers or floats."""
        self.input = tensor if self.ints else self.b.as_floats(tensor)
        return self.input

    def window(self, kernel: tuple[int, ...], axes: str = "HW") -> dict[str, Any]:
        """Pads the input unless the operator does; returns the options of its window.

        Args:
            kernel: the sizes of the window; a sequence is an image of one row.
            axes: the letters of the operator's axes.
        """
        padding, pads = windows(self.b, self.call, kernel)
        row = (1,) * (len(axes) - len(kernel))
        if pads:
            self.input, padding = padded(self.b, self.input, [*[(0, 0)] * len(row), *pads]), "VALID"
        stride, dilation = ((*row, *self.call.attrs[name]) for name in ("stride", "dilation"))
        return {
            "padding": getattr(Padding, padding),
            **{f"stride{axis}": n for axis, n in zip(axes, stride, strict=True)},
            **{f"dilation{axis}Factor": n for axis, n in zip(axes, dilation, strict=True)},
        }

    def weight(self) -> np.ndarray:
        """Returns the weight, integers or floats, in MegEngine's layout."""
        weight = self.b.integers[self.weight_node][0] if self.ints else self.b.value(self.weight_node)
        if weight is None:
            raise ExportError(
                f"{self.call.out.name}: its weight is computed from the model's input, which TFLite cannot "
                "express: use matmul, or end the graph before it"
            )
        return weight.astype(np.int8) if self.ints else weight

    def stored_weight(self, laid: np.ndarray, axis: int) -> FileTensor:
        """Writes the weight ``laid``, which is in the operator's layout; ``axis`` counts output channels."""
        if self.ints:
            grid = self.b.integers[self.weight_node][1]
            stored = self.b.writer.constant(f"{self.base}_int", laid, grid, axis)
        else:
            stored = self.b.writer.constant(self.base, laid)
        self.b.layers[self.call.out] = StoredLayer(stored, axis)
        return stored

    def bias(self, count: int) -> FileTensor:
        """Writes the bias as a vector of ``count`` numbers, zeros if the graph lacks one.

        The weight is written before.
        """
        stored = self._bias(count)
        self.b.layers[self.call.out].bias = stored
        return stored

    def _bias(self, count: int) -> FileTensor:
        if not self.ints:
            return float_bias(self.b, self.call, f"{self.base}_bias", count)
        if self.call.bias is None:
            return zero_bias(self.b, self.base, count, self.input, self.weight_scales())
        return integer_bias(self.b, self.call.bias, self.input)

    def weight_scales(self) -> np.ndarray:
        """Returns the scales of an integer weight."""
        return np.array(self.b.integers[self.weight_node][1].scale, np.float32)


def windows(b: Builder, call: OpCall, kernel: tuple[int, ...]) -> tuple[str, list[tuple[int, int]]]:
    """Returns TFLite's padding mode, or "" with the padding of each axis that an operator must add."""
    a, shapes = call.attrs, (b.shape(call.inputs[0])[2:], b.shape(call.out)[2:])
    dilation = a.get("dilation", (1,) * len(kernel))
    sides = (*shapes, kernel, a["stride"], a["padding"], dilation)
    axes = [window_pads(*numbers) for numbers in zip(*sides, strict=True)]
    names = {name for name, _ in axes}
    # An axis without padding may be SAME as well, where SAME adds nothing.
    if names == {"VALID"} or names == {"SAME"}:
        return names.pop(), []
    return "", [pads for _, pads in axes]


def _conv(b: Builder, op: FusedOp) -> None:
    layer, groups = _Layer(b, op), op.call.attrs["groups"]
    layer.read(CHANNELS_LAST)
    weight = layer.weight()
    weight = weight.reshape(-1, *weight.shape[-3:])  # (out, in / groups, height, width)
    count, inside, *kernel = weight.shape
    options = layer.window(tuple(kernel))
    target = b.target(op, CHANNELS_LAST)
    options["fusedActivationFunction"] = target.activation
    if groups > 1 and inside == 1:
        stored = layer.stored_weight(weight[:, 0].transpose(1, 2, 0)[None], 3)
        options["depthMultiplier"] = count // groups
        code, version = "DEPTHWISE_CONV_2D", 0
    else:
        stored = layer.stored_weight(weight.transpose(0, 2, 3, 1), 0)
        code, version = "CONV_2D", 6 if groups > 1 else 0
    b.writer.op(code, [layer.input, stored, layer.bias(count)], [target.tensor], version, **options)
    b.finish(op, target)


def _conv1d(b: Builder, op: FusedOp) -> None:
    """Writes a convolution of sequences as one of images of one row."""
    layer, order = _Layer(b, op), channels_last(3)
    x = layer.read(order)
    count, length, channels = x.shape
    layer.use(b.reshaped(x, (count, 1, length, channels), 0))
    weight = layer.weight()[:, :, None]
    options = layer.window(weight.shape[3:])
    target = b.target(op, order)
    options["fusedActivationFunction"] = target.activation
    stored = layer.stored_weight(weight.transpose(0, 2, 3, 1), 0)
    _, steps, outside = target.tensor.shape
    row = b.like(target.tensor, f"{op.call.out.name}_row", (count, 1, steps, outside))
    b.writer.op("CONV_2D", [layer.input, stored, layer.bias(outside)], [row], **options)
    shape = [-1, steps, outside]
    b.writer.op("RESHAPE", [row, shape], [target.tensor], newShape=np.array(shape, np.int32))
    b.finish(op, target)


def _conv3d(b: Builder, op: FusedOp) -> None:
    """Writes a convolution of volumes in float; CONV_3D lacks groups."""
    layer, order = _Layer(b, op), channels_last(5)
    if op.call.attrs["groups"] > 1:
        raise ExportError(
            f"{op.call.out.name}: a grouped convolution of volumes cannot become TFLite: use groups=1, or "
            "end the graph before it"
        )
    layer.read(order)
    weight = layer.weight()
    options = layer.window(weight.shape[2:], "DHW")
    target = b.target(op, order)
    options["fusedActivationFunction"] = target.activation
    stored = layer.stored_weight(weight.transpose(2, 3, 4, 1, 0), 4)
    inputs = [layer.input, stored, layer.bias(len(weight))]
    b.writer.op("CONV_3D", inputs, [target.tensor], **options)
    b.finish(op, target)


def _conv_transpose(b: Builder, op: FusedOp) -> None:
    """Writes TRANSPOSE_CONV, and a slice where neither SAME nor VALID cuts off what the graph does."""
    layer, call, a = _Layer(b, op), op.call, op.call.attrs
    x = layer.read(CHANNELS_LAST)
    weight = _dilated(_dense(layer.weight(), call), a["dilation"])
    count, *kernel, _ = weight.shape
    target = b.target(op, CHANNELS_LAST, fuses=False)
    batch, *size, _ = target.tensor.shape
    whole = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], a["stride"], kernel, strict=True)]
    same = all(
        o == n * s and (full - o) // 2 == p and full >= o
        for n, o, s, full, p in zip(x.shape[1:3], size, a["stride"], whole, a["padding"], strict=True)
    )
    result, sizes = target.tensor, size
    cut = not same and (whole != size or a["padding"] != (0, 0))
    if cut:
        # No input value reaches what output_padding adds at the end: there is only the bias.
        sizes = [max(f, p + o) for f, p, o in zip(whole, a["padding"], size, strict=True)]
        result = b.like(target.tensor, f"{call.out.name}_whole", (batch, *sizes, count))
    inputs = [b.writer.ints([batch, *sizes, count]), layer.stored_weight(weight, 0), x, layer.bias(count)]
    options = dict(zip(("strideH", "strideW"), a["stride"], strict=True))
    padding = Padding.SAME if same else Padding.VALID
    b.writer.op("TRANSPOSE_CONV", inputs, [result], padding=padding, **options)
    if cut:
        places = zip((1, 2), a["padding"], size, strict=True)
        b.cut(result, target.tensor, {i: (p, p + n, 1) for i, p, n in places})
    b.fixed = b.fixed or call.out.name  # the shape of the result is part of the file
    b.finish(op, target)


def _dense(weight: np.ndarray, call: OpCall) -> np.ndarray:
    """Lays a transposed convolution's weight out as (out, height, width, in); groups become blocks."""
    if weight.ndim == 4:
        return weight.transpose(1, 2, 3, 0)
    groups, inside, outside, height, width = weight.shape
    laid = np.zeros((groups * outside, height, width, groups * inside), weight.dtype)
    for g in range(groups):
        block = weight[g].transpose(1, 2, 3, 0)
        laid[g * outside : (g + 1) * outside, :, :, g * inside : (g + 1) * inside] = block
    return laid


def _dilated(weight: np.ndarray, dilation: tuple[int, int]) -> np.ndarray:
    """Expresses dilation by zeros between the values of the kernel."""
    if tuple(dilation) == (1, 1):
        return weight
    count, height, width, inside = weight.shape
    rows, columns = ((n - 1) * d + 1 for n, d in zip((height, width), dilation, strict=True))
    laid = np.zeros((count, rows, columns, inside), weight.dtype)
    laid[:, :: dilation[0], :: dilation[1]] = weight
    return laid


def _linear(b: Builder, op: FusedOp) -> None:
    layer = _Layer(b, op)
    weight, (source, moved) = layer.weight(), b.moved_from(layer.source)
    shuffle = moved.shuffle()
    if (
        shuffle is not None
    ):  # the features stand in the order in which the file joins them: the weight follows
        order, places = shuffle
        weight = weight[:, places]
        free = next((i for i, a in enumerate(order) if moved.batch in moved.axes[a]), None)
        x = layer.use(b.reshaped(source.tensor, file_shape(moved.shape, order), free))
    else:
        last = len(moved.axes) - 1
        order = (*(a for a in moved.nearest() if a != last), last)
        x = layer.read(order)
    target = b.target(op, order)
    inputs = [x, layer.stored_weight(weight, 0), layer.bias(weight.shape[0])]
    version = 12 if layer.ints and len(layer.weight_scales()) > 1 else 0
    options: dict[str, Any] = {"keepNumDims": True, "fusedActivationFunction": target.activation}
    b.writer.op("FULLY_CONNECTED", inputs, [target.tensor], version, **options)
    b.finish(op, target)


def _matmul(b: Builder, op: FusedOp) -> None:
    call, rank = op.call, b.rank(op.call.out)
    if any(b.rank(n) < 2 for n in call.inputs):
        raise ExportError(
            f"{call.out.name}: a product with a vector cannot become TFLite: give it an axis of size 1"
        )
    factors, flips = [], []
    for node, flip in zip(call.inputs, (call.attrs["transpose_a"], call.attrs["transpose_b"]), strict=True):
        source = b.get(node) if op.site is not None else b.floats(b.get(node))
        source, order = b.widened(source, rank), natural(rank)
        turned = (*order[:-2], order[-1], order[-2])
        if source.order == turned:  # the operator reads the transpose as it stands
            order, flip = turned, not flip
        factors.append(b.arrange(source, order))
        flips.append(bool(flip))
    options = {"adjX": flips[0], "adjY": flips[1]}
    b.compute(op, natural(rank), "BATCH_MATMUL", factors, False, **options)


# On integers where the result has a site, else in float.
LAYERS: dict[str, Emitter] = {
    "conv1d": _conv1d,
    "conv2d": _conv,
    "conv_transpose2d": _conv_transpose,
    "linear": _linear,
    "matmul": _matmul,
}
# CONV_3D reads only floats.
FLOAT_LAYERS: dict[str, Emitter] = {"conv3d": _conv3d}


def record_bias(b: Builder, site: QuantizedSite, value: np.ndarray | None) -> None:
    """Records the integers of a bias, for the layers that read it.

    Args:
        b: the file.
        site: the bias.
        value: the bias in float; None where it is computed from the model's input.

    Raises:
        ExportError: when the bias is computed.
    """
    if value is None:
        raise ExportError(
            f"site {site.name}: its bias is computed, which int32 storage cannot express: "
            "set quantize: false for its layer."
        )
    b.integers[site.value] = (site.integers(value), Grid.symmetric(site.bias_scale))
    b.lazy[site.value] = lambda: site.rounded_bias(value)


def integer_bias(b: Builder, node: TensorNode, x: FileTensor) -> FileTensor:
    """Writes the integers of the bias ``node`` of a layer that reads ``x``, as a vector."""
    integers, grid = b.integers[node]
    name = f"{b.plan.graph.site_name(node)}_int"
    return b.writer.constant(name, integers.reshape(-1).astype(_bias_type(x)), grid)


def zero_bias(b: Builder, name: str, count: int, x: FileTensor, weight_scale: np.ndarray) -> FileTensor:
    """Writes a bias of zeros: integer kernels require a bias even if the graph lacks one."""
    assert x.grid is not None
    grid = Grid.symmetric(np.float32(x.grid.scale[0]) * weight_scale)
    return b.writer.constant(f"{name}_zeros", np.zeros(count, _bias_type(x)), grid)


def float_bias(b: Builder, call: OpCall, name: str, count: int) -> FileTensor:
    """Writes the bias of a layer that computes in float; zeros called ``name`` if the graph lacks one."""
    value = np.zeros(count, np.float32) if call.bias is None else b.value(call.bias)
    if value is None:
        raise ExportError(
            f"{call.out.name}: its bias is computed, which TFLite cannot express: "
            "add it after the layer, or set quantize: false"
        )
    return b.writer.constant(name if call.bias is None else call.bias.name, value.reshape(-1))


def _bias_type(x: FileTensor) -> type[np.integer]:
    return np.int64 if x.dtype == np.int16 else np.int32
