"""A float Caffe net, ``.prototxt`` and ``.caffemodel``, and next to them a file of quantization parameters.

Layers and blobs have the names of the graph's nodes. Caffe lacks integers: tools that read the net quantize
it themselves, by the parameters in the file. A layer's parameters are unnamed in Caffe; the file calls them
``LAYER.weight`` and ``LAYER.bias``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.export.converted import ConvertedGraph, ConvertedOp, float_graph, refusal
from qtrace.export.format import Format
from qtrace.export.parameters import Names, ParameterLayer, beside, parameter_file, site_table
from qtrace.graph.interpreter import needed_nodes
from qtrace.graph.opaque import cure_for_opaque
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import is_float_tensor, op_label, unused_name
from qtrace.ops import OpCall
from qtrace.storage.outputs import WRITTEN
from qtrace.targets.caffe.writer import CaffeWriter

Emitter = Callable[[CaffeWriter, OpCall], None]


def _layer(kind: str, **parameters: Callable[[OpCall], dict[str, Any]]) -> Emitter:
    """Emits a layer of one input, with its fields computed from the op."""

    def emit(w: CaffeWriter, call: OpCall) -> None:
        w.emit(kind, call, (), (), **{name: fields(call) for name, fields in parameters.items()})

    return emit


def _power(**fields: float) -> Emitter:
    return _layer("Power", power_param=lambda call: fields)


def _prelu(w: CaffeWriter, call: OpCall) -> None:
    slope = w.stored(call.attrs["slope"], "slope")
    w.emit("PReLU", call, [slope.reshape(-1)], prelu_param={"channel_shared": slope.size == 1})


def _softmax(call: OpCall) -> dict[str, Any]:
    (axis,) = call.attrs["axis"]
    return {"axis": axis % len(call.out.shape)}


def _clip(w: CaffeWriter, call: OpCall) -> None:
    """Clips at any bounds by two ReLUs: Caffe lacks a layer for them."""
    low, high = call.attrs["lower"], call.attrs["upper"]
    name, base = w.name(call.inputs[0]), call.out.name
    if (low, high) == (0.0, 6.0):
        w.emit("ReLU6", call)
        return
    for bound, sign in ((low, 1.0), (high, -1.0)):
        if bound is not None:
            to_zero = {"scale": sign, "shift": -sign * bound}
            shifted = w.layer("Power", [name], w.fresh(base), power_param=to_zero)
            clipped = w.layer("ReLU", [shifted], w.fresh(base))
            back = {"scale": sign, "shift": bound}
            name = w.layer("Power", [clipped], w.fresh(base), power_param=back)
    w.names[call.out] = w.layer("Power", [name], base, power_param={"scale": 1.0})


def _hard_gate(w: CaffeWriter, x: str, top: str) -> str:
    """Adds relu6(x + 3) / 6."""
    moved = w.layer("Power", [x], w.fresh(top), power_param={"shift": 3.0})
    clipped = w.layer("ReLU6", [moved], w.fresh(top))
    return w.layer("Power", [clipped], top, power_param={"scale": 1.0 / 6.0})


def _hsigmoid(w: CaffeWriter, call: OpCall) -> None:
    w.names[call.out] = _hard_gate(w, w.name(call.inputs[0]), call.out.name)


def _gated(gate: Callable[[CaffeWriter, str, str], str]) -> Emitter:
    """Emits x * gate(x)."""

    def emit(w: CaffeWriter, call: OpCall) -> None:
        x = w.name(call.inputs[0])
        factor = gate(w, x, w.fresh(call.out.name))
        w.emit("Eltwise", call, bottoms=[x, factor], eltwise_param={"operation": "PROD"})

    return emit


def _batch_norm(w: CaffeWriter, call: OpCall) -> None:
    """Writes a BatchNorm as a factor and an offset for each channel."""
    gamma, beta, mean, var = w.batch_norm(call).values()
    assert mean is not None
    assert var is not None
    factor = 1.0 / np.sqrt(var.astype(np.float64) + call.attrs["eps"]) * (1.0 if gamma is None else gamma)
    offset = -mean * factor if beta is None else beta - mean * factor
    w.emit("Scale", call, [factor, offset], scale_param={"axis": 1, "bias_term": True})


def _binary(w: CaffeWriter, call: OpCall) -> None:
    operands = call.attrs["operands"]
    if "scalar" in call.attrs:
        _with_scalar(w, call)
        return
    values = [w.value(v) if isinstance(v, TensorNode) else np.asarray(v) for v in operands]
    if any(v is not None for v in values):
        _with_parameter(w, call, values)
        return
    left, right = operands
    if tuple(left.shape) != tuple(right.shape):
        _broadcast(w, call, left, right)
        return
    fields: dict[str, Any] = {"operation": {"mul": "PROD", "maximum": "MAX"}.get(call.kind, "SUM")}
    if call.kind == "sub":
        fields["coeff"] = [1.0, -1.0]
    elif call.kind not in ("add", "mul", "maximum"):
        raise ExportError(f"Caffe lacks {call.kind} of two tensors: end the graph before it")
    w.emit("Eltwise", call, bottoms=[w.name(left), w.name(right)], eltwise_param=fields)


def _with_scalar(w: CaffeWriter, call: OpCall) -> None:
    number, front = call.attrs["scalar"], call.attrs["side"] == "left"
    fields: dict[str, float] | None = {
        "add": {"shift": number},
        "sub": {"scale": -1.0, "shift": number} if front else {"shift": -number},
        "mul": {"scale": number},
        "div": {"power": -1.0, "scale": 1.0 / number} if front else {"scale": 1.0 / number},
    }.get(call.kind)
    if fields is None:
        raise ExportError(f"Caffe lacks {call.kind} with a number: end the graph before it")
    w.emit("Power", call, power_param=fields)


def _with_parameter(w: CaffeWriter, call: OpCall, values: list[np.ndarray | None]) -> None:
    """Writes x * value or x + value, with a stored number for each channel."""
    value = next(v for v in values if v is not None)
    x, shape = call.inputs[0] if values[0] is None else call.inputs[-1], tuple(call.out.shape)
    channels = int(shape[1]) if len(shape) > 1 else 0
    if value.size == 1 and value.ndim <= len(shape):
        value = np.full((1, channels, *(1,) * (len(shape) - 2)), value.reshape(()))
    full = (1,) * (len(shape) - value.ndim) + value.shape
    if call.kind not in ("add", "mul") or full != (1, channels, *(1,) * (len(shape) - 2)):
        raise ExportError(
            "Caffe adds and multiplies by a stored number for each channel only: give it shape "
            "(1, C, 1, 1), or set ptq: [fuse_bn, absorb]"
        )
    ones, flat = np.ones(channels, np.float32), value.reshape(-1)
    blobs = [ones, flat] if call.kind == "add" else [flat]
    fields = {"axis": 1, "bias_term": call.kind == "add"}
    w.emit("Scale", call, blobs, [w.name(x)], scale_param=fields)


def _broadcast(w: CaffeWriter, call: OpCall, left: TensorNode, right: TensorNode) -> None:
    """Writes an image times a computed factor for each channel, as in squeeze and excitation."""
    image, factor = (left, right) if tuple(left.shape) == tuple(call.out.shape) else (right, left)
    same = len(factor.shape) == 4 and tuple(factor.shape) == (*tuple(image.shape)[:2], 1, 1)
    if call.kind != "mul" or not same:
        raise ExportError(
            f"Caffe cannot {call.kind} {tuple(left.shape)} and {tuple(right.shape)}: give them one shape, or "
            "multiply by one number for each channel"
        )
    flat = w.layer("Flatten", [w.name(factor)], w.fresh(call.out.name), flatten_param={"axis": 1})
    w.emit("Scale", call, bottoms=[w.name(image), flat], scale_param={"axis": 0})


ARITHMETIC: dict[str, Emitter] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum"), _binary),
    "neg": _power(scale=-1.0),
    "square": _power(power=2.0),
    "sqrt": _power(power=0.5),
    "abs": _layer("AbsVal"),
    "exp": _layer("Exp"),
    "relu": _layer("ReLU"),
    "relu6": _layer("ReLU6"),
    "sigmoid": _layer("Sigmoid"),
    "tanh": _layer("TanH"),
    "leaky_relu": _layer("ReLU", relu_param=lambda call: {"negative_slope": call.attrs["negative_slope"]}),
    "prelu": _prelu,
    "clip": _clip,
    "hsigmoid": _hsigmoid,
    "hswish": _gated(_hard_gate),
    "silu": _gated(lambda w, x, top: w.layer("Sigmoid", [x], top)),
    "softmax": _layer("Softmax", softmax_param=_softmax),
    "batch_norm": _batch_norm,
}


def _blobs(w: CaffeWriter, call: OpCall) -> list[np.ndarray]:
    """Returns weight and bias of a layer."""
    bias = [] if call.bias is None else [w.stored(call.bias, "bias").reshape(-1)]
    return [w.stored(call.weight, "weight"), *bias]


def _conv(w: CaffeWriter, call: OpCall) -> None:
    a, transposed = call.attrs, call.kind == "conv_transpose2d"
    weight, *bias = _blobs(w, call)
    weight = weight.reshape(-1, *weight.shape[-3:])  # without the axis of groups
    if transposed and any(a["output_padding"]):
        raise ExportError("Caffe's Deconvolution lacks output_padding: give the transposed convolution none")
    fields = {
        "num_output": weight.shape[1] * a["groups"] if transposed else weight.shape[0],
        "bias_term": call.bias is not None,
        "group": a["groups"],
        "dilation": a["dilation"],
        **_window(weight.shape[-2:], a["stride"], a["padding"]),
    }
    w.emit("Deconvolution" if transposed else "Convolution", call, [weight, *bias], convolution_param=fields)


def _window(kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    sides = {"kernel": kernel, "stride": stride, "pad": padding}
    return {
        f"{name}_{axis}": int(n) for name, pair in sides.items() for axis, n in zip("hw", pair, strict=True)
    }


def _linear(w: CaffeWriter, call: OpCall) -> None:
    blobs, axis = _blobs(w, call), len(call.inputs[0].shape) - 1
    fields = {"num_output": len(blobs[0]), "bias_term": call.bias is not None, "axis": axis}
    w.emit("InnerProduct", call, blobs, inner_product_param=fields)


def _pool(method: str) -> Emitter:
    def emit(w: CaffeWriter, call: OpCall) -> None:
        a, x = call.attrs, call.inputs[0]
        if method == "AVE" and any(a["padding"]) and not a["count_include_pad"]:
            raise ExportError("Caffe's average counts the padding: use mode='average', or no padding")
        fields = {"pool": method, **_window(a["kernel"], a["stride"], a["padding"])}
        sizes = zip(x.shape[-2:], a["kernel"], a["stride"], a["padding"], strict=True)
        if any((int(n) + 2 * p - k) % s for n, k, s, p in sizes):
            # Caffe rounds the size up by default. OpenCV and many others call the field that changes this
            # ceil_mode. It is left out where both sizes agree, so that any Caffe reads the file.
            fields["ceil_mode"] = False
        w.emit("Pooling", call, pooling_param=fields)

    return emit


def _adaptive(method: str) -> Emitter:
    def emit(w: CaffeWriter, call: OpCall) -> None:
        size, shape = call.attrs["output_size"], [int(n) for n in call.inputs[0].shape[-2:]]
        if size == (1, 1):
            w.emit("Pooling", call, pooling_param={"pool": method, "global_pooling": True})
            return
        if any(n % s for n, s in zip(shape, size, strict=True)):
            raise ExportError(
                f"adaptive pooling of {tuple(shape)} to {size} has windows of unequal size, which Caffe "
                "cannot express: use a size that divides the input"
            )
        kernel = [n // s for n, s in zip(shape, size, strict=True)]
        w.emit("Pooling", call, pooling_param={"pool": method, **_window(kernel, kernel, (0, 0))})

    return emit


def _mean(w: CaffeWriter, call: OpCall) -> None:
    x, rank = call.inputs[0], len(call.inputs[0].shape)
    axes = call.attrs["axis"]
    if rank != 4 or axes is None or sorted(a % 4 for a in axes) != [2, 3]:
        raise ExportError("Caffe has a mean over the whole image only: take it over axes 2 and 3")
    fields = {"pool": "AVE", "global_pooling": True}
    if len(call.out.shape) == 4:
        w.emit("Pooling", call, pooling_param=fields)
        return
    pooled = w.layer("Pooling", [w.name(x)], w.fresh(call.out.name), pooling_param=fields)
    w.emit("Flatten", call, bottoms=[pooled], flatten_param={"axis": 1})


def _interpolate(w: CaffeWriter, call: OpCall) -> None:
    """Repeats pixels by whole factors: a transposed convolution of each channel with ones."""
    inside, outside = ([int(n) for n in node.shape[-2:]] for node in (call.inputs[0], call.out))
    if call.attrs["mode"] != "nearest" or any(o % i for o, i in zip(outside, inside, strict=True)):
        raise ExportError("Caffe resizes by whole factors and nearest values only: use mode='nearest'")
    factor = [o // i for o, i in zip(outside, inside, strict=True)]
    channels = int(call.out.shape[1])
    fields = {"num_output": channels, "bias_term": False, "group": channels}
    fields.update(_window(factor, factor, (0, 0)))
    ones = np.ones((channels, 1, *factor), np.float32)
    w.emit("Deconvolution", call, [ones], convolution_param=fields)


def _concat(w: CaffeWriter, call: OpCall) -> None:
    names = [w.name(n) for n in call.attrs["parts"]]
    axis = call.attrs["axis"] % len(call.out.shape)
    w.emit("Concat", call, bottoms=names, concat_param={"axis": axis})


def _split(w: CaffeWriter, call: OpCall) -> None:
    axis = call.attrs["axis"] % len(call.inputs[0].shape)
    places = np.cumsum([int(n.shape[axis]) for n in call.outputs])[:-1].tolist()
    tops, fields = [n.name for n in call.outputs], {"axis": axis, "slice_point": places}
    w.layers("Slice", [w.name(call.inputs[0])], call.out.name, tops, slice_param=fields)
    w.names.update((n, n.name) for n in call.outputs)


def _flatten(w: CaffeWriter, call: OpCall) -> None:
    rank = max(len(call.inputs[0].shape), 1)
    fields = {"axis": call.attrs["start"] % rank, "end_axis": call.attrs["end"] % rank}
    w.emit("Flatten", call, flatten_param=fields)


def _reshape(w: CaffeWriter, call: OpCall) -> None:
    """Reshapes to the traced shape; 0 copies the batch."""
    before, after = ([int(n) for n in node.shape] for node in (call.inputs[0], call.out))
    if not before or not after or before[0] != after[0]:
        raise ExportError("it changes the batch, which Caffe keeps in front: leave axis 0 as it is")
    w.emit("Reshape", call, reshape_param={"shape": {"dim": [0, *after[1:]]}})


def _transpose(w: CaffeWriter, call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    pattern = call.attrs["pattern"] or tuple(reversed(range(rank)))
    if not all(isinstance(p, int) for p in pattern) or len(pattern) != rank:
        raise ExportError(f"Caffe cannot transpose by {pattern!r}: use all axes")
    w.emit("Permute", call, permute_param={"order": [p % rank for p in pattern]})


def _identity(w: CaffeWriter, call: OpCall) -> None:
    w.names[call.out] = w.name(call.inputs[0])


EMITTERS: dict[str, Emitter] = {
    **ARITHMETIC,
    "conv2d": _conv,
    "conv_transpose2d": _conv,
    "linear": _linear,
    "max_pool2d": _pool("MAX"),
    "avg_pool2d": _pool("AVE"),
    "adaptive_avg_pool2d": _adaptive("AVE"),
    "adaptive_max_pool2d": _adaptive("MAX"),
    "mean": _mean,
    "interpolate": _interpolate,
    "concat": _concat,
    "split": _split,
    "flatten": _flatten,
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("identity", "dropout"), _identity),
}


def files(converted: ConvertedGraph, path: Path, *, params: str | None = None) -> dict[Path, bytes]:
    """Returns the net, its weights and its parameter file.

    Args:
        converted: the graph of a converted module.
        path: the path of the net; the weights get the suffix ``.caffemodel``.
        params: the kind of parameter file, such as ``ncnn``; None for none.

    Raises:
        ExportError: when Caffe cannot express a node, or the kind of file cannot express a site, naming it.
    """
    kind = None if params is None else parameter_file(params)
    if importlib.util.find_spec("google.protobuf") is None:
        raise ExportError(f"Caffe export needs the package protobuf: run {install('caffe')}.")
    from google.protobuf import text_format

    exporter = CaffeExporter(float_graph(converted))
    exporter.run()
    writer = exporter.writer
    contents: dict[Path, bytes] = {}
    if kind is not None:
        contents[beside(path, kind)] = kind.write(site_table(converted, exporter.names())).encode()
    contents[path.with_suffix(".caffemodel")] = writer.weights.SerializeToString()
    contents[path] = f"# {WRITTEN}.\n{text_format.MessageToString(writer.net)}".encode()
    if len(contents) < 2 + (kind is not None):
        raise ExportError(f"{path.name} is the name of the weights: name the net with the suffix .prototxt.")
    return contents


FORMAT = Format(
    "caffe",
    files,
    suffixes=(".prototxt",),
    companions=(".caffemodel",),
    options=("params",),
    float_options=(),
    fixes_sizes=True,
)


class CaffeExporter:
    """Writes a float graph as one Caffe net."""

    def __init__(self, flat: ConvertedGraph) -> None:
        self.graph = flat
        self.writer = CaffeWriter(flat.module.graph.name or "qtrace")
        self.writer.values.update(self.graph.values)

    def run(self) -> None:
        """Fills the writer."""
        for node, name in self.graph.inputs.items():
            self.writer.names[node] = name
            # One sample; a deployment sets its batch size.
            shape = {"dim": [1, *(int(n) for n in node.shape[1:])]}
            self.writer.layer("Input", [], name, input_param={"shape": [shape]})
        needed = needed_nodes(self.graph.module)
        for op in self.graph.ops:
            if any(node in needed for node in op.expr.outputs):
                self._emit(op)
        self._silence_unread(self._outputs())

    def _outputs(self) -> set[str]:
        """Gives each output a blob that nothing reads, in the order of the graph; returns the blobs' names.

        Caffe takes a blob for an output if no layer reads it. An output that an inner layer reads, that is an
        input, or that stands before an earlier output of the graph is copied to the end.
        """
        w, last = self.writer, -1
        outputs: set[str] = set()
        for index, node in enumerate(self.graph.outputs):
            if node not in w.names:
                raise refusal(
                    f"output {index}, {node.name}, is {_describe(node)}, and a Caffe net gives only "
                    "floats that it computes: end the graph before it",
                    node.expr,
                )
            blob, layers = w.names[node], list(w.net.layer)
            place = next(i for i, layer in enumerate(layers) if blob in layer.top)
            read = any(blob in layer.bottom for layer in layers)
            if read or place <= last or layers[place].type == "Input":
                tops = {top for layer in layers for top in layer.top}
                name = unused_name(f"{blob}_output", tops.__contains__)
                blob, place = w.layer("Power", [blob], name, power_param={"power": 1.0}), len(layers)
            outputs.add(blob)
            last = place
        return outputs

    def _silence_unread(self, outputs: set[str]) -> None:
        """Adds Silence layers for unread inputs and parts of splits, which Caffe would take for outputs.

        Each follows the layer of its blob, because OpenCV returns the last layer of a file by default.
        """
        w = self.writer
        layers = list(w.net.layer)
        read = {blob for layer in layers for blob in layer.bottom} | outputs
        del w.net.layer[:]
        for layer in layers:
            w.net.layer.append(layer)
            if unread := [top for top in layer.top if top not in read]:
                w.layers("Silence", unread, f"{layer.name}_unused", [])

    def _emit(self, op: ConvertedOp) -> None:
        expr, call = op.expr, op.call
        name, label = expr.outputs[0].name, op_label(expr)
        if not any(is_float_tensor(n) for n in expr.outputs):
            return  # shapes: layers take them from the trace
        if call is None or call.kind not in EMITTERS:
            cure = cure_for_opaque(expr) or "end the graph before it, or write it with ops that have one"
            raise refusal(f"{name}: {label} cannot become Caffe: {cure}", expr)
        try:
            EMITTERS[call.kind](self.writer, call)
        except ExportError as error:
            raise refusal(f"{name}: {error}", expr) from error

    def names(self) -> Names:
        """Returns the net's names of the graph's nodes and layers."""
        w = self.writer
        nodes = list(self.graph.nodes.values())
        tensors = {n.name: n.name for n in nodes if n in w.values}
        tensors.update((n.name, w.names[n]) for n in nodes if n in w.names)
        blobs = {layer.name: layer.blobs[0] for layer in w.weights.layer}
        layers: dict[str, ParameterLayer] = {}
        for call in (op.call for op in self.graph.ops):
            if call is not None and call.out in w.names and call.weight is not None:
                name, value = call.out.name, w.values[call.weight]
                value = value.reshape(tuple(blobs[name].shape.dim))
                axis = 1 if call.kind == "conv_transpose2d" else 0
                ends = (name, f"{name}.weight", f"{name}.bias")
                layers[name] = ParameterLayer(*ends, value, axis, int(call.attrs.get("groups", 1)))
        return Names(tensors, layers)


def _describe(node: TensorNode) -> str:
    """Says why a node lacks a blob."""
    return "a constant" if is_float_tensor(node) else f"of type {np.dtype(node.dtype).name}"
