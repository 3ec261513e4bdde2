"""ONNX for pooling, resizing, RoiAlign and GridSample, and for recurrent layers.

Each layer of a recurrent stack is an LSTM, GRU or RNN node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.writer import (
    Emitter,
    OnnxWriter,
    array,
    cast,
    operand,
    parameter_source,
    shape_vector,
)
from qtrace.graph.recurrent import DIRECTIONS
from qtrace.graph.types import CallFunction, TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.ops.arguments import arguments, integers

_OPS = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}
_TURNED = {"lstm": ["ifgo".index(gate) for gate in "iofg"], "rnn": [0]}  # MegEngine's gates in ONNX's order


def _pool(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        a = call.attrs
        ph, pw = a["padding"]
        extra = {"count_include_pad": int(a["count_include_pad"])} if op == "AveragePool" else {}
        window = {"kernel_shape": list(a["kernel"]), "strides": list(a["stride"]), "pads": [ph, pw, ph, pw]}
        w.emit(op, [w.name(call.inputs[0])], call.out, **window, **extra)

    return emit


def _adaptive(everything: str, window: str) -> Emitter:
    """Emits adaptive pooling: windows of one size, which overlap if the sizes do not divide."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        size, shape = call.attrs["output_size"], call.inputs[0].shape[-2:]
        x = [w.name(call.inputs[0])]
        if size == (1, 1):
            w.emit(everything, x, call.out)
            return
        strides = [int(n) // s for n, s in zip(shape, size, strict=True)]
        kernel = [int(n) - (s - 1) * t for n, s, t in zip(shape, size, strides, strict=True)]
        w.emit(window, x, call.out, kernel_shape=kernel, strides=strides)

    return emit


def _interpolate(w: OnnxWriter, call: OpCall) -> None:
    a, shape, out = call.attrs, call.inputs[0].shape, call.out.shape
    mode = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "bicubic": "cubic"}.get(a["mode"])
    if mode is None:
        raise ExportError(
            f"{call.out.name}: interpolate mode {a['mode']!r} cannot become ONNX: use nearest, bilinear "
            "or bicubic"
        )
    place = "align_corners" if a["align_corners"] else "half_pixel"
    settings = {"mode": mode, "coordinate_transformation_mode": place}
    if mode == "nearest":
        settings = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if any(isinstance(n, TensorNode) for n in _several(a["size"])):
        _emit_resize(w, call, shape_vector(w, a["size"]), settings)
        return
    inside, outside = ([int(n) for n in s[2:]] for s in (shape, out))
    source, base = w.name(call.inputs[0]), call.out.name
    if all(o % i == 0 for o, i in zip(outside, inside, strict=True)):
        scales = [1.0, 1.0, *(float(o // i) for o, i in zip(outside, inside, strict=True))]
        factors = w.constant(f"{base}_scales", np.array(scales, np.float32))
        w.emit("Resize", [source, "", factors], call.out, **settings)
        return
    # A fractional factor would be rounded twice; sizes are exact.
    _emit_resize(w, call, w.ints(outside), settings)


def _several(size: Any) -> Sequence[Any]:
    return size if isinstance(size, (tuple, list)) else (size,)


def _emit_resize(w: OnnxWriter, call: OpCall, image: str, settings: Mapping[str, Any]) -> None:
    """Resizes to the height and width in the vector ``image``."""
    source, base = w.name(call.inputs[0]), call.out.name
    front = w.node(
        "Slice", [w.node("Shape", [source], w.fresh(base)), w.ints([0]), w.ints([2])], w.fresh(base)
    )
    sizes = w.node("Concat", [front, image], w.fresh(base), axis=0)
    w.emit("Resize", [source, "", "", sizes], call.out, **settings)


WINDOWS: dict[str, Emitter] = {
    "max_pool2d": _pool("MaxPool"),
    "avg_pool2d": _pool("AveragePool"),
    "adaptive_avg_pool2d": _adaptive("GlobalAveragePool", "AveragePool"),
    "adaptive_max_pool2d": _adaptive("GlobalMaxPool", "MaxPool"),
    "interpolate": _interpolate,
}


_BORDERS = {"replicate": "border", "constant": "zeros"}


def _roi_align(w: OnnxWriter, call: OpCall) -> None:
    """Writes RoiAlign; MegEngine's regions are the number of the image, then two corners."""
    a, base = call.attrs, call.out.name
    high, wide = a["samples"]
    if a["mode"] != "average":
        raise ExportError(
            "roi_align takes the largest sample, which onnxruntime computes in another way: "
            "use mode='average'"
        )
    if high != wide:
        raise ExportError(
            f"roi_align has {high} x {wide} samples, and ONNX as many in both directions: "
            "make sample_points one number"
        )
    rois = operand(w, a["rois"], np.float32)
    numbers = w.node("Slice", [rois, w.ints([0]), w.ints([1]), w.ints([1])], w.fresh(base))
    numbers = cast(w, w.node("Reshape", [numbers, w.ints([-1])], w.fresh(base)), np.int64)
    corners = w.node("Slice", [rois, w.ints([1]), w.ints([5]), w.ints([1])], w.fresh(base))
    # Around the image MegEngine reads zeros, ONNX repeats the edge: with a frame of zeros both read the
    # same. Regions are shifted by the frame's width, and by half a pixel if MegEngine does not subtract it:
    # ONNX's mode without it widens regions of less than one pixel.
    moved = (1.0 if a["aligned"] else 1.5) / a["scale"]
    corners = w.node("Add", [corners, w.constant(f"{base}_frame", np.float32(moved))], w.fresh(base))
    frame = w.ints([0, 0, 1, 1, 0, 0, 1, 1])
    image = w.node("Pad", [w.name(call.inputs[0]), frame, w.scalar(0.0)], w.fresh(base), mode="constant")
    size = dict(zip(("output_height", "output_width"), a["output_size"], strict=True))
    settings = {"coordinate_transformation_mode": "half_pixel", "mode": "avg", "sampling_ratio": int(high)}
    w.emit(
        "RoiAlign", [image, corners, numbers], call.out, **size, **settings, spatial_scale=float(a["scale"])
    )


def _call_arguments(call: OpCall) -> dict[str, Any]:
    assert isinstance(call.expr, CallFunction)
    return arguments(call.expr)


def _sample(w: OnnxWriter, call: OpCall, places: str, settings: dict[str, Any], border: float) -> None:
    """Reads the input at ``places``, N x H x W x 2 pixels (x, y)."""
    mode, way = settings["border_mode"].lower(), settings["interp_mode"].lower()
    if mode not in _BORDERS or (mode == "constant" and border != 0):
        raise ExportError(
            f"{call.kind} with border_mode={mode!r} and the value {border} cannot become ONNX: "
            "use 'replicate', or 'constant' with 0"
        )
    if way != "linear":
        raise ExportError(f"{call.kind} with interp_mode={way!r} cannot become ONNX: use 'linear'")
    settings = {"mode": "bilinear", "padding_mode": _BORDERS[mode], "align_corners": 0}
    w.emit("GridSample", [w.name(call.inputs[0]), _grid(w, call, places)], call.out, **settings)


def _grid(w: OnnxWriter, call: OpCall, places: str) -> str:
    """Converts pixels (x, y) of the input to ONNX's coordinates from -1 to 1."""
    base, shape = call.out.name, call.inputs[0].shape
    sizes = np.array([int(shape[3]), int(shape[2])], np.float32)
    factor = w.constant(f"{base}_factor", 2 / sizes)
    shift = w.constant(f"{base}_shift", 1 / sizes - 1)
    return w.node("Add", [w.node("Mul", [places, factor], w.fresh(base)), shift], w.fresh(base))


def _remap(w: OnnxWriter, call: OpCall) -> None:
    a = _call_arguments(call)
    _sample(w, call, operand(w, a["map_xy"], np.float32), a, float(a["scalar"]))


def _warp(w: OnnxWriter, call: OpCall) -> None:
    """Samples at ``mat @ (x, y, 1)`` for every output pixel; the third row divides the others."""
    a, base = _call_arguments(call), call.out.name
    if a["format"] != "NCHW":
        raise ExportError(f"{call.kind} has an ONNX form only with format='NCHW': transpose its input")
    if a.get("mat_idx") is not None:
        raise ExportError(f"{call.kind} with mat_idx cannot become ONNX: give each image its matrix")
    if isinstance(a["out_shape"], TensorNode):
        raise ExportError(f"{call.kind} has an ONNX form only where out_shape is fixed: give numbers")
    high, wide = (int(n) for n in call.out.shape[2:])
    y, x = np.mgrid[:high, :wide].astype(np.float32)
    pixels = w.constant(f"{base}_pixels", np.stack([x, y, np.ones_like(x)], -1).reshape(1, -1, 3))
    matrix = w.node("Transpose", [operand(w, a["mat"], np.float32)], w.fresh(base), perm=[0, 2, 1])
    places = w.node("MatMul", [pixels, matrix], w.fresh(base))
    if call.kind == "warp_perspective":
        depth = w.node("Slice", [places, w.ints([2]), w.ints([3]), w.ints([2])], w.fresh(base))
        places = w.node("Slice", [places, w.ints([0]), w.ints([2]), w.ints([2])], w.fresh(base))
        places = w.node("Div", [places, depth], w.fresh(base))
    places = w.node("Reshape", [places, w.ints([0, high, wide, 2])], w.fresh(base))
    _sample(w, call, places, a, float(a["border_val"]))


def _deformable(w: OnnxWriter, call: OpCall) -> None:
    """Writes GridSample for the taps, times the mask, and a convolution of single pixels.

    Deformable Convolutional Networks v2, equation 1: offsets come as (y, x) for each tap. onnxruntime lacks a
    kernel for ONNX's DeformConv.
    """
    a, base = _deformable_arguments(w, call), call.out.name
    weight = a["weight"]
    offset, mask = (w.name(a[n]) for n in ("offset", "mask"))
    high, wide = (int(n) for n in call.out.shape[2:])
    if (
        integers("groups", a["groups"], 2) != (1, 1)
        or weight.ndim != 4
        or int(a["offset"].shape[1]) != 2 * weight[0, 0].size
    ):
        raise ExportError(f"{call.kind} with groups cannot become ONNX: use one group")
    rows, columns = weight.shape[2:]
    taps = rows * columns
    fixed = w.constant(f"{base}_places", _tap_places(a, (rows, columns), (high, wide)))
    offset = w.node("Reshape", [offset, w.ints([0, taps, 2, high, wide])], w.fresh(base))
    turned = w.constant("const_ints_1_0", np.array([1, 0], np.int64))
    offset = w.node("Gather", [offset, turned], w.fresh(base), axis=2)
    offset = w.node("Transpose", [offset], w.fresh(base), perm=[0, 1, 3, 4, 2])
    places = w.node("Add", [offset, fixed], w.fresh(base))
    places = w.node("Reshape", [places, w.ints([0, taps * high, wide, 2])], w.fresh(base))
    inputs = [w.name(call.inputs[0]), _grid(w, call, places)]
    settings = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": 0}
    read = w.node("GridSample", inputs, w.fresh(base), **settings)
    read = w.node("Reshape", [read, w.ints([0, weight.shape[1], taps, high, wide])], w.fresh(base))
    mask = w.node("Reshape", [mask, w.ints([0, 1, taps, high, wide])], w.fresh(base))
    read = w.node("Mul", [read, mask], w.fresh(base))
    read = w.node("Reshape", [read, w.ints([0, weight.shape[1] * taps, high, wide])], w.fresh(base))
    parts = [read, w.constant(f"{base}_weight", weight.reshape(len(weight), -1, 1, 1))]
    if a["bias"] is not None:
        parts.append(w.constant(f"{base}_bias", a["bias"].reshape(-1)))
    w.emit("Conv", parts, call.out, kernel_shape=[1, 1])


def _deformable_arguments(w: OnnxWriter, call: OpCall) -> dict[str, Any]:
    """Returns the arguments of the module or function by the function's names, parameters as arrays."""
    values, module = arguments(call.expr), owner(call.expr)
    if module is not None:
        names = ("weight", "bias", "stride", "padding", "dilation", "groups")
        values.update((n, getattr(module, n)) for n in names)
    for name in ("weight", "bias"):
        value = values[name]
        if isinstance(value, TensorNode) and w.value(value) is None:
            raise ExportError(
                f"{call.kind} has an ONNX form only where its {name} is stored: make it a parameter"
            )
        stored = w.value(value) if isinstance(value, TensorNode) else value
        values[name] = None if stored is None else array(stored)
    return values


def _tap_places(a: dict[str, Any], window: tuple[int, ...], size: tuple[int, int]) -> np.ndarray:
    """Returns the pixels (x, y) that the taps read without offset, of shape (1, taps * H, W, 2)."""
    lines = []
    for axis in (0, 1):
        step, pad, apart = (integers(n, a[n], 2)[axis] for n in ("stride", "padding", "dilation"))
        lines.append(step * np.arange(size[axis]) - pad + apart * np.arange(window[axis])[:, None])
    form = (window[0], window[1], size[0], size[1])
    y = np.broadcast_to(lines[0][:, None, :, None], form)
    x = np.broadcast_to(lines[1][None, :, None, :], form)
    return np.stack([x, y], -1).reshape(1, -1, *size, 2).astype(np.float32)


SAMPLING: dict[str, Emitter] = {
    "deformable_conv2d": _deformable,
    "roi_align": _roi_align,
    "remap": _remap,
    "warp_affine": _warp,
    "warp_perspective": _warp,
}


def _recurrent(w: OnnxWriter, call: OpCall) -> None:
    if "weights" in call.attrs:
        _Stack(w, call).write()
    elif "recurrence" in call.attrs:
        _layer(w, call)
    else:
        raise ExportError(
            f"{call.out.name}: {call.kind} cannot become ONNX with a projected hidden state, or as a "
            "constant: end the graph before it, or write it with linear layers"
        )


def _layer(w: OnnxWriter, call: OpCall) -> None:
    """Writes a layer of an imported graph as the node that it was."""
    a = call.attrs
    inputs = [w.name(a["x"]), w.name(a["weight"]), w.name(a["recurrence"])]
    inputs += ["" if node is None else w.name(node) for node in (a["bias"], None, a["hidden"], a.get("cell"))]
    names = _add(w, call, inputs, a["direction"], int(a["recurrence"].shape[2]), _read(call.outputs))
    w.names.update((node, name) for node, name in zip(call.outputs, names, strict=True) if name)


def _read(nodes: Iterable[TensorNode]) -> list[str]:
    """Returns the names of the results, "" for those that nothing reads."""
    return [node.name if node.users or node in node.top_graph._outputs else "" for node in nodes]


def _add(
    w: OnnxWriter, call: OpCall, inputs: list[str], direction: str, size: int, outputs: Sequence[str]
) -> list[str]:
    """Adds a node; results and inputs that are not there are "", and left out at the end."""
    attributes: dict[str, Any] = {"hidden_size": size}
    if direction != "forward":
        attributes["direction"] = direction
    if call.attrs.get("linear_before_reset"):
        attributes["linear_before_reset"] = 1
    if call.attrs.get("nonlinearity", "tanh") != "tanh":
        attributes["activations"] = ["Relu"] * len(DIRECTIONS[direction])
    while not inputs[-1]:
        inputs.pop()
    count = max((i + 1 for i, name in enumerate(outputs) if name), default=1)
    if not any(outputs):
        outputs = [call.out.name]
    names = w.add(_OPS[call.kind], inputs, outputs[:count], **attributes)
    return [*names, *[""] * (len(outputs) - count)]


class _Stack:
    """Writes MegEngine's LSTM or RNN, whose layers are nodes that read each other."""

    def __init__(self, w: OnnxWriter, call: OpCall) -> None:
        self.w, self.call, self.a, self.base = w, call, call.attrs, call.out.name
        self.count, self.size = int(self.a["num_layers"]), int(self.a["hidden_size"])
        self.direction = "bidirectional" if self.a["bidirectional"] else "forward"
        self.ways = len(DIRECTIONS[self.direction])

    def write(self) -> None:
        """Writes all layers, and the results in the order of axes that MegEngine has."""
        w, batch_first = self.w, bool(self.a["batch_first"])
        source = self.a["x"]
        name = w.name(source)
        if batch_first:
            name = w.node("Transpose", [name], w.fresh(source.name), perm=[1, 0, 2])
        kinds = ("hidden", "cell") if self.call.kind == "lstm" else ("hidden",)
        starts = [self._starts(self.a[kind]) for kind in kinds]
        read = _read(self.call.outputs)
        ends: list[list[str]] = [[] for _ in kinds]
        for layer, tensors in enumerate(self._weights(int(source.shape[2]))):
            inputs = [name, *tensors, "", *(start[layer] for start in starts)]
            names = [w.fresh(self.base)] + [w.fresh(self.base) if wanted else "" for wanted in read[1:]]
            y, *last = _add(w, self.call, inputs, self.direction, self.size, names)
            for states, end in zip(ends, last, strict=True):
                states.append(end)
            final = layer == self.count - 1
            name = self._joined(y, batch_first and final, self.base if final else w.fresh(self.base))
        w.names[self.call.outputs[0]] = name
        for node, states, wanted in zip(self.call.outputs[1:], ends, read[1:], strict=True):
            if wanted and len(states) == 1:
                w.names[node] = states[0]
            elif wanted:
                w.emit("Concat", states, node, axis=0)

    def _joined(self, y: str, batch_first: bool, output: str) -> str:
        """Joins directions and values of (steps, directions, samples, values)."""
        w = self.w
        if self.ways == 1 and not batch_first:
            return w.node("Squeeze", [y, w.ints([1])], output)
        turned = w.node(
            "Transpose", [y], w.fresh(self.base), perm=[2, 0, 1, 3] if batch_first else [0, 2, 1, 3]
        )
        if self.ways == 1:
            return w.node("Squeeze", [turned, w.ints([2])], output)
        return w.node("Reshape", [turned, w.ints([0, 0, self.ways * self.size])], output)

    def _starts(self, node: TensorNode | None) -> list[str]:
        """Returns the first states of each layer; "" for zeros."""
        if node is None:
            return [""] * self.count
        name = self.w.name(node)
        if self.count == 1:
            return [name]
        parts = [self.w.fresh(node.name) for _ in range(self.count)]
        return self.w.add("Split", [name, self.w.ints([self.ways] * self.count)], parts, axis=0)

    def _weights(self, values: int) -> list[list[str]]:
        """Returns the weights and biases of each layer, cut from the parameter of all."""
        node = self.a["weights"]
        array = self.w.value(node)
        if array is None:
            raise ExportError(
                f"{self.base}: {self.call.kind} cannot become ONNX with computed weights: store them."
            )
        flat, place = array.reshape(-1), 0
        gates = len(_TURNED[self.call.kind])
        path = str(parameter_source(self.call, "weights").expr.name).rpartition(".")[0]  # type: ignore[union-attr]
        layers = []

        def take(*shape: int) -> np.ndarray:
            nonlocal place
            begin, place = place, place + int(np.prod(shape))
            part = flat[begin:place].reshape(gates, self.size, *shape[1:])
            return part[_TURNED[self.call.kind]].reshape(shape)

        for layer in range(self.count):
            inputs = values if layer == 0 else self.ways * self.size
            shapes: list[tuple[int, ...]] = [(gates * self.size, inputs), (gates * self.size, self.size)]
            shapes += [(gates * self.size,)] * 2 if self.a["bias"] else []
            parts = [[take(*shape) for shape in shapes] for _ in range(self.ways)]
            arrays = [np.stack(several) for several in zip(*parts, strict=True)]
            named = {"W": arrays[0], "R": arrays[1]}
            if self.a["bias"]:
                named["B"] = np.concatenate(arrays[2:], axis=1)
            names = [self.w.constant(f"{path}.{key}_l{layer}", value) for key, value in named.items()]
            layers.append([*names, *[""] * (3 - len(names))])
        return layers


RECURRENT: dict[str, Emitter] = dict.fromkeys(_OPS, _recurrent)
