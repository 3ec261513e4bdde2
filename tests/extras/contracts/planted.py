"""A network in the QDQ form of each target, written by hand, and edits that break the target's contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

CHANNELS = 16


@dataclass(frozen=True)
class Form:
    """How a target wants a file.

    Attributes:
        target: the name of the target.
        kind: the type of the activations.
        zero_point: their zero point.
        scale: their scale.
        int32_bias: whether biases are int32; else they are floats.
        rounds_summand: whether the result of a convolution is rounded before a sum.
        opset: the opset.
        powers_of_two: whether scales are powers of two and biases int8.
    """

    target: str
    kind: Any = np.int8
    zero_point: int = 0
    scale: float = 0.05
    int32_bias: bool = True
    rounds_summand: bool = True
    opset: int = 17
    powers_of_two: bool = False


FORMS = {
    "tensorrt": Form("tensorrt", int32_bias=False, rounds_summand=False),
    "qnn": Form("qnn", np.uint8, 120),
    "qnn_a16": Form("qnn", np.uint16, 30000, 0.05 / 256, opset=21),
    "ryzenai": Form("ryzenai"),
    "ryzenai_a16w8": Form("ryzenai", np.int16, 0, 0.05 / 256, opset=21),
    "ryzenai_xint8": Form("ryzenai_xint8", scale=1 / 16, powers_of_two=True),
    "onnxruntime": Form("onnxruntime", np.uint8, 120),
}
FIXED = {"s": (1 / 65536, 0), "t": (1 / 32768, 32768)}  # results of sigmoid and tanh in uint16


class Writer:
    """Writes the network node by node."""

    def __init__(self, form: Form) -> None:
        self.form, self.rng = form, np.random.default_rng(0)
        self.nodes: list[NodeProto] = []
        self.stored: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def rounded(self, name: str) -> str:
        """Q and DQ behind ``name``."""
        form = self.form
        wide = form.kind == np.uint16
        scale, zero_point = (
            FIXED.get(name, (form.scale, form.zero_point)) if wide else (form.scale, form.zero_point)
        )
        if name in "ab" and not np.issubdtype(form.kind, np.signedinteger):
            zero_point = 0  # the results of Relu
        parts = [f"{name}_scale", f"{name}_zero_point"]
        self.stored.update(zip(parts, (np.float32(scale), form.kind(zero_point)), strict=True))
        self.node("QuantizeLinear", [name, *parts], f"{name}_q")
        return self.node("DequantizeLinear", [f"{name}_q", *parts], f"{name}_dq")

    def layer(
        self, op: str, source: str, name: str, shape: tuple[int, ...], axis: int | None, **more: Any
    ) -> str:
        """A layer with an int8 weight; ``axis`` has its channels, None for one scale."""
        values = self.rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[1])
        others = None if axis is None else tuple(i for i in range(len(shape)) if i != axis)
        scale = (np.abs(values).max(others) / 127).astype(np.float32)
        if self.form.powers_of_two:
            scale = np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
        spread = scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        self.stored[f"{name}_w"] = np.rint(values / spread).astype(np.int8)
        self._dequantized(f"{name}_w", scale, np.zeros(scale.shape, np.int8), axis)
        inputs = [source, f"{name}_w_dq"]
        if op != "MatMul":
            inputs.append(self._bias(name, shape[0 if op in ("Conv", "Gemm") else 1], scale))
        return self.node(op, inputs, name, **more)

    def _bias(self, name: str, count: int, weight_scale: np.ndarray) -> str:
        values = self.rng.normal(size=count).astype(np.float32)
        if not self.form.int32_bias:
            self.stored[f"{name}_b"] = values
            return f"{name}_b"
        if self.form.powers_of_two:
            self.stored[f"{name}_b"] = np.rint(values * 16).astype(np.int8)
            return self._dequantized(f"{name}_b", np.float32(1 / 16), np.int8(0), None)
        scale = (np.float32(self.form.scale) * weight_scale).astype(np.float32)
        self.stored[f"{name}_b"] = np.rint(values / scale).astype(np.int32)
        return self._dequantized(
            f"{name}_b", scale, np.zeros(scale.shape, np.int32), 0 if scale.ndim else None
        )

    def _dequantized(self, name: str, scale: np.ndarray, zero: np.ndarray, axis: int | None) -> str:
        self.stored.update({f"{name}_scale": scale, f"{name}_zero_point": zero})
        extra = {} if axis is None else {"axis": axis}
        inputs = [name, f"{name}_scale", f"{name}_zero_point"]
        return self.node("DequantizeLinear", inputs, f"{name}_dq", **extra)


def build(form: Form) -> onnx.ModelProto:
    """Convolutions, a residual sum, a concatenation, functions, products and a norm."""
    w, c = Writer(form), CHANNELS
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    w.layer("Conv", w.rounded("x"), "conv1", (c, 8, 3, 3), 0, **same)
    a = w.rounded(w.node("Relu", ["conv1"], "a"))
    w.layer("Conv", a, "conv2", (c, c, 3, 3), 0, **same)
    w.node("Add", [w.rounded("conv2") if form.rounds_summand else "conv2", a], "sum")
    b = w.rounded(w.node("Relu", ["sum"], "b"))
    first = w.rounded(w.layer("Conv", b, "c1", (c, c, 1, 1), 0, kernel_shape=[1, 1]))
    second = w.rounded(w.layer("ConvTranspose", b, "c2", (c, c, 1, 1), 1, kernel_shape=[1, 1]))
    d = w.rounded(w.node("Concat", [first, second], "d", axis=1))
    s = w.rounded(w.node("Sigmoid", [d], "s"))
    t = w.rounded(w.node("Tanh", [s], "t"))
    p = w.rounded(w.node("GlobalAveragePool", [t], "p"))
    f = w.rounded(w.node("Flatten", [p], "f"))
    g = w.rounded(w.layer("Gemm", f, "g", (c, 2 * c), None, transB=1))
    w.stored["gain"] = np.ones(c, np.float32)
    w.stored["shift"] = w.rng.normal(size=c).astype(np.float32)
    n = w.rounded(w.node("LayerNormalization", [g, "gain", "shift"], "n"))
    w.rounded(w.layer("MatMul", n, "y", (c, c), None))
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in w.stored.items()]
    ends = [("x", [1, 8, 6, 6]), ("y_dq", [1, c])]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    graph = helper.make_graph(w.nodes, "net", infos[:1], infos[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", form.opset)])
    model.ir_version = 10
    return model


# -- edits --------------------------------------------------------------------------------------------

Edit = Callable[[onnx.ModelProto], None]


def node(model: onnx.ModelProto, name: str) -> NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def value(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def store(model: onnx.ModelProto, name: str, array: Any) -> None:
    """Gives an initializer another value, or adds it."""
    tensor = numpy_helper.from_array(np.asarray(array), name)
    for old in model.graph.initializer:
        if old.name == name:
            old.CopyFrom(tensor)
            return
    model.graph.initializer.append(tensor)


def attribute(n: NodeProto, name: str, number: int | None) -> None:
    kept = [a for a in n.attribute if a.name != name]
    del n.attribute[:]
    n.attribute.extend(kept)
    if number is not None:
        n.attribute.append(helper.make_attribute(name, number))


def insert(model: onnx.ModelProto, before: str, *nodes: NodeProto) -> None:
    index = next(i for i, n in enumerate(model.graph.node) if n.name == before)
    for offset, new in enumerate(nodes):
        model.graph.node.insert(index + offset, new)


def regrid(tensor: str, kind: Any, zero_point: int, factor: float = 1.0) -> Edit:
    """Other integers for an activation."""

    def edit(model: onnx.ModelProto) -> None:
        scale = value(model, f"{tensor}_scale") * np.float32(factor)
        store(model, f"{tensor}_scale", scale.astype(np.float32))
        store(model, f"{tensor}_zero_point", kind(zero_point))

    return edit


def without_zero_points(model: onnx.ModelProto) -> None:
    for name in ("a_q", "a_dq"):
        del node(model, name).input[2]


def needless_axis(model: onnx.ModelProto) -> None:
    for name in ("a_q", "a_dq"):
        attribute(node(model, name), "axis", 1)


def per_channel_activation(model: onnx.ModelProto) -> None:
    scale, zero = value(model, "a_scale"), value(model, "a_zero_point")
    store(model, "a_scale", np.linspace(0.5, 1, CHANNELS).astype(np.float32) * scale)
    store(model, "a_zero_point", np.full(CHANNELS, zero))
    for name in ("a_q", "a_dq"):
        attribute(node(model, name), "axis", 1)


def unequal_lengths(model: onnx.ModelProto) -> None:
    store(model, "conv1_w_zero_point", np.zeros((), np.int8))


def computed_scale(model: onnx.ModelProto) -> None:
    insert(model, "a_q", helper.make_node("Abs", ["a_scale"], ["a_abs"], name="a_abs"))
    for name in ("a_q", "a_dq"):
        node(model, name).input[1] = "a_abs"


def zero_scale(model: onnx.ModelProto) -> None:
    store(model, "a_scale", np.float32(0))


def too_few_scales(model: onnx.ModelProto) -> None:
    store(model, "conv1_w_scale", value(model, "conv1_w_scale")[:-1])
    store(model, "conv1_w_zero_point", np.zeros(CHANNELS - 1, np.int8))


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 12


def other_domain(name: str, domain: str = "com.microsoft") -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        node(model, name).domain = domain
        model.opset_import.append(helper.make_opsetid(domain, 1))

    return edit


def idle_import(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def foreign_op(model: onnx.ModelProto) -> None:
    gelu = node(model, "t")
    gelu.op_type, gelu.domain = "Gelu", "com.microsoft"
    idle_import(model)


def integer_op(model: onnx.ModelProto) -> None:
    relu = node(model, "t")
    relu.op_type = "DynamicQuantizeLinear"


def int32_bias(model: onnx.ModelProto) -> None:
    scale = (value(model, "x_scale") * value(model, "conv1_w_scale")).astype(np.float32)
    store(model, "conv1_b_scale", scale)
    store(model, "conv1_b_zero_point", np.zeros(CHANNELS, np.int32))
    store(model, "conv1_b", np.rint(value(model, "conv1_b") / scale).astype(np.int32))
    inputs = ["conv1_b", "conv1_b_scale", "conv1_b_zero_point"]
    insert(
        model,
        "conv1",
        helper.make_node("DequantizeLinear", inputs, ["conv1_b_dq"], name="conv1_b_dq", axis=0),
    )
    node(model, "conv1").input[2] = "conv1_b_dq"


def rounded_bias(model: onnx.ModelProto) -> None:
    store(model, "conv1_b_scale", np.float32(4 / 127))
    store(model, "conv1_b_zero_point", np.int8(0))
    parts = ["conv1_b_scale", "conv1_b_zero_point"]
    quantize = helper.make_node("QuantizeLinear", ["conv1_b", *parts], ["conv1_b_q"], name="conv1_b_q")
    dequantize = helper.make_node(
        "DequantizeLinear", ["conv1_b_q", *parts], ["conv1_b_dq"], name="conv1_b_dq"
    )
    insert(model, "conv1", quantize, dequantize)
    node(model, "conv1").input[2] = "conv1_b_dq"


def weight_axis(name: str, axis: int) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        attribute(node(model, f"{name}_w_dq"), "axis", axis)

    return edit


def unsigned_weight(model: onnx.ModelProto) -> None:
    store(model, "conv2_w", (value(model, "conv2_w").astype(np.int32) + 128).astype(np.uint8))
    store(model, "conv2_w_zero_point", np.full(CHANNELS, 128, np.uint8))


def shifted_weight(model: onnx.ModelProto) -> None:
    store(model, "conv2_w_zero_point", np.full(CHANNELS, 3, np.int8))


def float_weight(name: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        layer = node(model, name)
        scale = value(model, f"{name}_w_scale")
        axis = 1 if layer.op_type == "ConvTranspose" else 0
        ints = value(model, f"{name}_w")
        spread = scale.reshape([-1 if i == axis else 1 for i in range(ints.ndim)]) if scale.ndim else scale
        store(model, f"{name}_float", (ints * spread).astype(np.float32))
        layer.input[1] = f"{name}_float"

    return edit


def wide_weight(model: onnx.ModelProto) -> None:
    store(model, "y_w", (value(model, "y_w").astype(np.int16) * 256).astype(np.int16))
    store(model, "y_w_scale", (value(model, "y_w_scale") / 256).astype(np.float32))
    store(model, "y_w_zero_point", np.int16(0))


def channel_weight(name: str, axis: int) -> Edit:
    """A scale per channel for a weight that had one; its bias follows."""

    def edit(model: onnx.ModelProto) -> None:
        scale = np.full(CHANNELS, value(model, f"{name}_w_scale"), np.float32)
        store(model, f"{name}_w_scale", scale)
        store(model, f"{name}_w_zero_point", np.zeros(CHANNELS, np.int8))
        attribute(node(model, f"{name}_w_dq"), "axis", axis)

    return edit


def rounded_summand(model: onnx.ModelProto) -> None:
    _round_before(model, "conv2", "sum", 0)


def rounded_function(model: onnx.ModelProto) -> None:
    _round_before(model, "conv1", "a", 0)


def _round_before(model: onnx.ModelProto, name: str, reader: str, index: int) -> None:
    store(model, f"{name}_scale", np.float32(0.05))
    store(model, f"{name}_zero_point", np.int8(0))
    parts = [f"{name}_scale", f"{name}_zero_point"]
    quantize = helper.make_node("QuantizeLinear", [name, *parts], [f"{name}_q"], name=f"{name}_q")
    dequantize = helper.make_node(
        "DequantizeLinear", [f"{name}_q", *parts], [f"{name}_dq"], name=f"{name}_dq"
    )
    insert(model, reader, quantize, dequantize)
    node(model, reader).input[index] = f"{name}_dq"


def unequal_concat(model: onnx.ModelProto) -> None:
    store(model, "c2_scale", np.float32(value(model, "c2_scale") / 2))


def float_summand(model: onnx.ModelProto) -> None:
    node(model, "sum").input[0] = "conv2"


def float_bias(model: onnx.ModelProto) -> None:
    values = value(model, "conv1_b") * value(model, "conv1_b_scale")
    store(model, "conv1_float", values.astype(np.float32))
    node(model, "conv1").input[2] = "conv1_float"


def int8_bias(model: onnx.ModelProto) -> None:
    values = value(model, "conv1_b") * value(model, "conv1_b_scale")
    scale = np.float32(np.abs(values).max() / 127)
    store(model, "conv1_b", np.rint(values / scale).astype(np.int8))
    store(model, "conv1_b_scale", scale)
    store(model, "conv1_b_zero_point", np.int8(0))
    attribute(node(model, "conv1_b_dq"), "axis", None)


def bias_scale(model: onnx.ModelProto) -> None:
    store(model, "conv1_b_scale", value(model, "conv1_b_scale") * np.float32(2))
    store(model, "conv1_b", np.rint(value(model, "conv1_b") / 2).astype(np.int32))


def bias_of_one_scale(model: onnx.ModelProto) -> None:
    values = value(model, "conv1_b") * value(model, "conv1_b_scale")
    scale = np.float32(value(model, "conv1_b_scale").min())
    store(model, "conv1_b", np.rint(values / scale).astype(np.int32))
    store(model, "conv1_b_scale", scale)
    store(model, "conv1_b_zero_point", np.int32(0))
    attribute(node(model, "conv1_b_dq"), "axis", None)


def bias_zero_point(model: onnx.ModelProto) -> None:
    store(model, "conv1_b", value(model, "conv1_b") + np.int32(5))
    store(model, "conv1_b_zero_point", np.full(CHANNELS, 5, np.int32))


def norm_bias(model: onnx.ModelProto) -> None:
    values = value(model, "shift")
    scale = (np.abs(values) / 1000).astype(np.float32)
    store(model, "shift_int", np.rint(values / scale).astype(np.int32))
    store(model, "shift_scale", scale)
    store(model, "shift_zero_point", np.zeros(CHANNELS, np.int32))
    inputs = ["shift_int", "shift_scale", "shift_zero_point"]
    insert(model, "n", helper.make_node("DequantizeLinear", inputs, ["shift_dq"], name="shift_dq", axis=0))
    node(model, "n").input[2] = "shift_dq"


def tiny_range(model: onnx.ModelProto) -> None:
    store(model, "p_scale", np.float32(1e-7))


def odd_weight_scale(model: onnx.ModelProto) -> None:
    store(model, "g_w_scale", value(model, "g_w_scale") * np.float32(0.7))
