"""ONNX for each op kind. An emitter reads an `OpCall` and writes the nodes that compute its output.

The nodes of an opaque op are copied unchanged but for what a runtime refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.export.onnx.arithmetic import ARITHMETIC, REDUCTIONS
from qtrace.export.onnx.layers import RECURRENT, SAMPLING, WINDOWS
from qtrace.export.onnx.moves import INDEXING, SHAPES
from qtrace.export.onnx.norms import COMPOSITES, HARD_SIGMOIDS, NORMS
from qtrace.export.onnx.sites import (
    CONTRIB,
    CONVS,
    DYNAMIC,
    TRANSPOSED,
    emit_dynamic_product,
    emit_product,
    has_blocks,
    is_dynamic,
    keeps_rows,
    weight_layout,
)
from qtrace.export.onnx.writer import Emitter, OnnxWriter, cast, operand, unary
from qtrace.graph.opaque import OpaqueOp, carried_dtype
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner, shape_of
from qtrace.onnxfile.model import rename_tensors
from qtrace.ops import OpCall

__all__ = [
    "EMITTERS",
    "OPAQUE",
    "WITHOUT",
    "Emitter",
]


def _opaque(w: OnnxWriter, call: OpCall) -> None:
    op = owner(call.expr)
    assert isinstance(op, OpaqueOp)
    model = w.versions.converted(op.fragment.model, op.operators)
    names: dict[str, str] = {}
    for value, node in zip(model.graph.input, call.inputs, strict=True):
        kind = value.type.tensor_type.elem_type
        own = w.name(node)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
        names[value.name] = own if dtype == np.dtype(node.dtype) else _in_type(w, own, dtype)
    for tensor in model.graph.initializer:
        names[tensor.name] = w.constant(tensor.name, numpy_helper.to_array(tensor))
    for proto in model.graph.node:
        _copy(w, proto, names)
    for value, node in zip(model.graph.output, call.outputs, strict=True):
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        own = names[value.name]
        if dtype == carried_dtype(dtype):
            w.names[node] = own
        else:
            w.names[node] = cast(w, own, node.dtype, node.name)
            w.wider[w.names[node]] = own, dtype.name


def _in_type(w: OnnxWriter, name: str, dtype: np.dtype) -> str:
    """Returns a tensor in the type of the file, which is that before the conversion if there was one."""
    source, kind = w.wider.get(name, ("", ""))
    return source if kind == dtype.name else cast(w, name, dtype)


def _copy(w: OnnxWriter, proto: onnx.NodeProto, names: dict[str, str]) -> None:
    """Adds a node, unless an equal one is there already, as nodes that several opaque nodes begin with."""
    copied = onnx.NodeProto()
    copied.CopyFrom(proto)
    for index, name in enumerate(copied.output):
        copied.output[index] = f"\0{index}" if name else ""
    rename_tensors(copied, _outer(names))
    key = copied.SerializeToString(deterministic=True)
    known = w.copies.get(key)
    if known is None:
        wanted = [name for name in proto.output if name]
        unique = iter(w.outputs(wanted))
        known = [next(unique) if name else "" for name in proto.output]
        rename_tensors(copied, {f"\0{i}": name for i, name in enumerate(known) if name})
        if not copied.name:
            copied.name = w.naming.node(copied.op_type, next(name for name in known if name))
        w.copies[key] = known
        _without_dilations(w, copied)
        w.nodes.append(copied)
    names.update((old, new) for old, new in zip(proto.output, known, strict=True) if old)


def _without_dilations(w: OnnxWriter, proto: onnx.NodeProto) -> None:
    """Keeps onnxruntime from running an average pooling between roundings as one without dilations.

    It puts QLinearAveragePool in its place, with all attributes, and then refuses the file.
    """
    places = [i for i, attribute in enumerate(proto.attribute) if attribute.name == "dilations"]
    if proto.op_type != "AveragePool" or proto.domain not in ("", "ai.onnx") or not places:
        return
    if all(d == 1 for d in proto.attribute[places[0]].ints):
        del proto.attribute[places[0]]
        return
    (apart,) = w.outputs([f"{proto.input[0]}_sum"])
    w.nodes.append(helper.make_node("Sum", [proto.input[0]], [apart], name=apart))
    proto.input[0] = apart


def _outer(names: Mapping[str, str]) -> dict[str, str]:
    return {old: new for old, new in names.items() if old != new}


OPAQUE: dict[str, Emitter] = {"opaque": _opaque}


def _weight(w: OnnxWriter, call: OpCall) -> str:
    """Returns the tensor of a layer's weight in ONNX's layout: stored integers, floats, or computed."""
    node = call.weight
    assert node is not None
    value = w.value(node)
    if value is not None:  # a layer that stays in float
        laid = weight_layout(call, value)[0]
        same = laid.shape == value.shape and np.array_equal(laid, value)
        return w.name(node) if same else w.parameter(node, f"{node.name}_{call.kind}", laid)
    if node in w.laid_out:
        return w.name(node)
    shape = [int(n) for n in node.shape]
    if call.kind in (*CONVS, *TRANSPOSED) and len(shape) > len(shape_of(call.inputs[0])):
        return w.node("Reshape", [w.name(node), w.ints([-1, *shape[2:]])], w.fresh(node.name))
    if call.kind == "linear" and not keeps_rows(call):
        return w.node("Transpose", [w.name(node)], w.fresh(node.name), perm=[1, 0])
    return w.name(node)


def _conv(w: OnnxWriter, call: OpCall) -> None:
    a, weight = call.attrs, call.weight
    assert weight is not None
    axes = len(shape_of(call.inputs[0])) - 2  # of the window
    attributes: dict[str, Any] = {
        "kernel_shape": [int(n) for n in weight.shape[-axes:]],
        "strides": list(a["stride"]),
        "dilations": list(a["dilation"]),
        "group": a["groups"],
        "pads": [*a["padding"], *a["padding"]],
    }
    if call.kind in TRANSPOSED:
        attributes["output_padding"] = list(a["output_padding"])
    inputs = [w.name(call.inputs[0]), _weight(w, call)]
    if call.bias is not None:
        inputs.append(_flat(w, call.bias))
    w.emit("ConvTranspose" if call.kind in TRANSPOSED else "Conv", inputs, call.out, **attributes)


def _flat(w: OnnxWriter, bias: TensorNode) -> str:
    """Returns the tensor of a bias as a vector; a quantized bias is stored as a vector."""
    value = w.value(bias)
    if value is not None and value.ndim > 1:
        return w.parameter(bias, f"{bias.name}_flat", value.reshape(-1))
    if len(bias.shape) > 1 and bias not in w.laid_out:  # a computed one
        return w.node("Reshape", [w.name(bias), w.ints([-1])], w.fresh(bias.name))
    return w.name(bias)


def _linear(w: OnnxWriter, call: OpCall) -> None:
    if is_dynamic(w, call):
        emit_dynamic_product(w, call)
        return
    x, blocked = call.inputs[0], w.blocked.get(call.weight)
    if blocked is not None:
        product = emit_product(w, call, blocked, w.fresh(call.out.name) if call.bias else call.out.name)
        if call.bias is None:
            w.names[call.out] = product
        else:
            w.emit("Add", [product, w.name(call.bias)], call.out)
        return
    inputs = [w.name(x), _weight(w, call)]
    if len(x.shape) == 2 and not has_blocks(call):
        if call.bias is not None:
            inputs.append(w.name(call.bias))
        w.emit("Gemm", inputs, call.out, transB=int(keeps_rows(call)))
        return
    if keeps_rows(call):  # something else reads it, too: runtimes fold this when they load the file
        inputs[1] = w.node("Transpose", inputs[1:], w.fresh(f"{call.out.name}_weight"), perm=[1, 0])
    if call.bias is None:
        w.emit("MatMul", inputs, call.out)
    else:
        product = w.node("MatMul", inputs, w.fresh(call.out.name))
        w.emit("Add", [product, w.name(call.bias)], call.out)


def _matmul(w: OnnxWriter, call: OpCall) -> None:
    names = []
    for node, flip in zip(call.inputs, (call.attrs["transpose_a"], call.attrs["transpose_b"]), strict=True):
        name = w.name(node)
        if flip:
            rank = len(node.shape)
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = w.node("Transpose", [name], w.fresh(node.name), perm=order)
        names.append(name)
    w.emit("MatMul", names, call.out)


def _leaky_relu(w: OnnxWriter, call: OpCall) -> None:
    w.emit("LeakyRelu", [w.name(call.inputs[0])], call.out, alpha=call.attrs["negative_slope"])


def _clip(w: OnnxWriter, call: OpCall) -> None:
    lower, upper = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    name, kind = w.name(call.inputs[0]), call.out.dtype
    if not any(isinstance(b, TensorNode) for b in (lower, upper)):
        names = ["" if b is None else operand(w, b, kind) for b in (lower, upper)]
        w.emit("Clip", [name, *names], call.out)
        return
    # Clip takes numbers only; a computed bound may have axes.
    if upper is not None:
        name = w.node("Min", [name, operand(w, upper, kind)], w.fresh(call.out.name))
    if lower is not None:
        name = w.node("Max", [name, operand(w, lower, kind)], w.fresh(call.out.name))
    w.names[call.out] = name


def _silu(w: OnnxWriter, call: OpCall) -> None:
    x = w.name(call.inputs[0])
    w.emit("Mul", [x, w.node("Sigmoid", [x], w.fresh(call.out.name))], call.out)


def _join(w: OnnxWriter, call: OpCall) -> None:
    axis, out = call.attrs["axis"], call.out
    names = [operand(w, n, out.dtype) for n in call.attrs["parts"]]
    if call.kind == "stack":
        names = [w.node("Unsqueeze", [n, w.ints([axis])], w.fresh(n)) for n in names]
    else:  # MegEngine joins numbers without axes as vectors
        parts = zip(names, call.attrs["parts"], strict=True)
        names = [n if np.shape(p) else w.node("Reshape", [n, w.ints([1])], w.fresh(n)) for n, p in parts]
    w.emit("Concat", names, out, axis=axis)


def _prelu(w: OnnxWriter, call: OpCall) -> None:
    """Writes a slope for the tensor or for each channel along axis 1; ONNX aligns the last axes."""
    slope, x = call.attrs["slope"], call.inputs[0]
    name = operand(w, slope, np.float32)
    size = int(np.prod(slope.shape))
    if size > 1 and len(slope.shape) == 1:
        name = w.node("Reshape", [name, w.ints([size, *[1] * (len(x.shape) - 2)])], w.fresh(call.out.name))
    w.emit("PRelu", [w.name(x), name], call.out)


def _inverse(w: OnnxWriter, call: OpCall) -> None:
    """Writes onnxruntime's own op: ONNX lacks it, and other ops choose no pivots."""
    if "Inverse" in w.in_pieces:
        raise ExportError(
            f"{call.out.name}: {call.kind} cannot become ONNX: {_OLD}, and the target does not know that "
            "of onnxruntime; end the graph before it"
        )
    w.versions.use(CONTRIB, 1)
    w.emit("Inverse", [w.name(call.inputs[0])], call.out, domain=CONTRIB)


_OLD = "ONNX has no op for it"
_LAYER = "its weights have an order of MegEngine's own (linear layers have a form)"

# Kinds that ONNX cannot express, and why.
WITHOUT: dict[str, str] = {
    "atan2": _OLD,
    "correlation": _OLD,
    "cvt_color": _OLD,
    "deformable_psroi_pooling": _OLD,
    "diag": _OLD,
    "local_conv2d": _OLD,
    "multi_head_attention": _LAYER,
    "nvof": _OLD,
    "region_restricted_conv": _OLD,
    "roi_pooling": "ONNX rounds the borders of regions in another way",
    "sliding_window_transpose": _OLD,
    "svd": _OLD,
    **dict.fromkeys(
        ("l1_loss", "square_loss", "cross_entropy", "binary_cross_entropy", "hinge_loss", "ctc_loss"),
        "a loss belongs to training",
    ),
}


def _refuse(reason: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        raise ExportError(
            f"{call.out.name}: {call.kind} cannot become ONNX: {reason}; end the graph before it"
        )

    return emit


EMITTERS: dict[str, Emitter] = {
    **ARITHMETIC,
    **NORMS,
    **COMPOSITES,
    **HARD_SIGMOIDS,
    **REDUCTIONS,
    **INDEXING,
    **SHAPES,
    **WINDOWS,
    **OPAQUE,
    **SAMPLING,
    **DYNAMIC,
    **RECURRENT,
    **dict.fromkeys((*CONVS, *TRANSPOSED), _conv),
    "linear": _linear,
    "matmul": _matmul,
    "relu": unary("Relu"),
    "relu6": _clip,
    "clip": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "matinv": _inverse,
    "sigmoid": unary("Sigmoid"),
    "tanh": unary("Tanh"),
    "silu": _silu,
    "concat": _join,
    "stack": _join,
    **{kind: _refuse(reason) for kind, reason in WITHOUT.items()},
}
