"""ONNX for opaque nodes: the nodes of the imported file, copied unchanged but for what a runtime refuses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qtrace.export.onnx.types import Emitter, cast
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.opaque import OpaqueOp, carried_dtype
from qtrace.graph.walk import owner
from qtrace.onnxfile.model import rename_tensors
from qtrace.ops import OpCall

__all__ = ["OPAQUE"]


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
