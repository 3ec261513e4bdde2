"""Restores the names and types of the inputs and outputs of a graph that was imported from a file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper

from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.interface import Interface, TensorInfo
from qtrace.graph.names import unused_name
from qtrace.onnxfile.bodies import read_names

__all__ = ["restore_interface"]


def restore_interface(
    writer: OnnxWriter,
    interface: Interface,
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
) -> None:
    """Gives the inputs and outputs of a model the names and types of the file that it was imported from.

    A tensor inside that has one of these names is renamed. A type that MegEngine carries in another, such as
    int64 or float16, is converted after the input and before the output; bfloat16 stays float32, with a
    note.

    Args:
        writer: the writer of the model, which is complete; its tensors are renamed.
        interface: the interface of the graph.
        inputs: the inputs of the model, in the order of the interface; they are changed.
        outputs: the outputs of the model, in the order of the interface; they are changed.
    """
    given = {tensor.name: info for info, tensor in zip(inputs, interface.inputs, strict=True)}
    passed = {
        tensor.name: info
        for info, tensor in zip(outputs, interface.outputs, strict=True)
        if tensor.name in given and _take_copy(writer, info.name, given[tensor.name].name)
    }
    # ONNX gives every tensor one name: another output that has the name of an input gets another one.
    results = [
        (info, _without(tensor, given))
        for info, tensor in zip(outputs, interface.outputs, strict=True)
        if tensor.name not in passed
    ]
    ends = [*zip(inputs, interface.inputs, strict=True), *results]
    names = {info.name: tensor.name for info, tensor in ends if not _converts(tensor)}
    taken = {tensor.name for _, tensor in ends}
    used = taken | set(_tensors(writer, inputs))
    for name in dict.fromkeys(_tensors(writer, inputs)):
        if name in taken and name not in names:
            names[name] = unused_name(f"{name}_inner", used.__contains__)
            used.add(names[name])
    writer.rename(names)
    casts = [_cast(names.get(i.name, i.name), t) for i, t in zip(inputs, interface.inputs, strict=True)]
    writer.nodes[:0] = [node for node in casts if node is not None]
    for info, tensor in results:
        if _converts(tensor):
            inner = names.get(info.name, info.name)
            writer.nodes.append(_node(inner, tensor.name, tensor.exported_dtype))
    for info, tensor in ends:
        _declare(info, tensor)
    for name, info in passed.items():
        info.CopyFrom(given[name])


def _take_copy(writer: OnnxWriter, output: str, source: str) -> bool:
    """Removes the copy of an input that is an output, as the input itself may be one; whether it was one."""
    copies = [node for node in writer.nodes if output in node.output]
    if not copies or copies[0].op_type != "Identity" or copies[0].input[0] != source:
        return False
    if any(output in read_names(node) for node in writer.nodes):
        return False
    writer.nodes.remove(copies[0])
    return True


def _without(tensor: TensorInfo, names: Collection[str]) -> TensorInfo:
    if tensor.name not in names:
        return tensor
    return TensorInfo(unused_name(f"{tensor.name}_output", names.__contains__), tensor.dtype)


def _converts(tensor: TensorInfo) -> bool:
    """Whether the file's type differs from the type of the node that carries the tensor."""
    return tensor.exported_dtype != tensor.carried_dtype


def _tensors(writer: OnnxWriter, inputs: Sequence[ValueInfoProto]) -> Iterator[str]:
    yield from (info.name for info in inputs)
    yield from writer.initializers
    yield from (name for node in writer.nodes for name in node.output if name)


def _cast(inner: str, tensor: TensorInfo) -> NodeProto | None:
    return _node(tensor.name, inner, tensor.carried_dtype) if _converts(tensor) else None


def _node(source: str, output: str, dtype: str) -> NodeProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_node("Cast", [source], [output], name=f"{output}_Cast", to=kind)


def _declare(info: ValueInfoProto, tensor: TensorInfo) -> None:
    info.name = tensor.name
    info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.exported_dtype))
    if tensor.dtype != tensor.exported_dtype:
        info.doc_string = f"{tensor.dtype} in the file that the model was imported from"
