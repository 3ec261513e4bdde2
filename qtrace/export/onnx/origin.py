"""Gives a model back what the file that it was imported from says of itself, and the names of that file.

Restores the names and types of the inputs and outputs of a graph that was imported from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.interface import Interface, TensorInfo
from qtrace.graph.origin import Facts, FileOrigin, FileParameter, FileRemark, FileResult
from qtrace.graph.walk import unused_name
from qtrace.onnxfile.model import read_names

PRODUCER = "qtrace.producer"
"""The metadata property of exported files that has the tool which wrote the imported file."""


@dataclass(frozen=True)
class OwnNames:
    """The nodes of a model whose names in the imported file are known, before any of them is renamed.

    Attributes:
        results: a node of the model, the position of a result, and the result in the file.
        parameters: a stored tensor of the model, and the file's tensor.
        remarks: name of a node of the file -> what the file says of it.
    """

    results: tuple[tuple[NodeProto, int, FileResult], ...]
    parameters: tuple[tuple[str, FileParameter], ...]
    remarks: Mapping[str, FileRemark]

    @classmethod
    def find(cls, writer: OnnxWriter, origin: FileOrigin, paths: Mapping[str, str]) -> OwnNames:
        """Finds them in a model that is complete.

        Args:
            writer: the writer of the model, whose tensors have the names of the nodes of the graph.
            origin: the origin of the graph.
            paths: stored tensor -> path of its parameter.
        """
        results = tuple(
            (node, place, origin.results[name])
            for node in writer.nodes
            for place, name in enumerate(node.output)
            if name in origin.results
        )
        pairs = ((name, origin.parameters.get(path)) for name, path in paths.items())
        parameters = tuple((name, known) for name, known in pairs if known is not None)
        return cls(results, parameters, origin.node_remarks)

    def restore(self, writer: OnnxWriter, ends: Iterable[str]) -> None:
        """Renames the nodes and tensors; a name that another tensor has stays with that one.

        A node gets its name back, and what the file says of it, if it is of the type that it was in the file.
        A weight that is stored as integers gives its name to the tensor that is dequantized from them.

        Args:
            writer: the writer of the model.
            ends: the names of inputs and outputs, which stay.
        """
        outputs = {name for node in writer.nodes for name in node.output}
        fixed, taken = set(ends), {*ends, *writer.initializers, *outputs}
        names: dict[str, str] = {}
        wanted = [(node.output[place], result.tensor) for node, place, result in self.results]
        wanted += self._parameter_names(writer)
        for old, new in wanted:
            if old not in fixed and old not in names and new and new not in taken:
                names[old] = new
                taken.add(new)
        writer.rename(names)
        used = {node.name for node in writer.nodes}
        for node, place, result in self.results:
            free = result.node == node.name or result.node not in used
            if place == 0 and result.node and node.op_type == result.op and free:
                node.name = result.node
                used.add(result.node)
                remark = self.remarks.get(result.node, FileRemark())
                if remark.doc:
                    node.doc_string = remark.doc
                _add_facts(node, remark.facts)

    def _parameter_names(self, writer: OnnxWriter) -> list[tuple[str, str]]:
        readers = {node.input[0]: node for node in writer.nodes if node.op_type == "DequantizeLinear"}
        return [
            (readers[name].output[0] if name in readers else name, known.tensor)
            for name, known in self.parameters
            if name in writer.initializers and tuple(writer.initializers[name].dims) == known.shape
        ]


def describe(model: ModelProto, origin: FileOrigin) -> None:
    """Gives a model what its origin says of it: document strings, metadata, versions, the graph's name."""
    model.doc_string, model.graph.doc_string = origin.doc, origin.graph_doc
    model.domain, model.model_version = origin.domain, origin.model_version
    if origin.graph:
        model.graph.name = origin.graph
    for value in (*model.graph.input, *model.graph.output):
        if not value.doc_string and origin.end_docs.get(value.name):
            value.doc_string = origin.end_docs[value.name]
        _add_facts(value, origin.end_facts.get(value.name, ()))
    _add_facts(model.graph, origin.graph_facts)
    known = {axis.dim_param for value in model.graph.input for axis in value.type.tensor_type.shape.dim}
    for value in model.graph.output:
        axes, names = value.type.tensor_type.shape.dim, origin.output_axes.get(value.name, ())
        for axis, name in zip(axes, names, strict=False):
            # An axis of an input that has this name may have another size.
            if axis.dim_param and name and name not in known:
                axis.dim_param = name


def _add_facts(part: Any, facts: Facts) -> None:
    """Adds metadata to a graph, a node or a value."""
    for key, value in facts:
        part.metadata_props.add(key=key, value=value)


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
    infos = {tensor.name: info for info, tensor in zip(inputs, interface.inputs, strict=True)}
    passed = {
        tensor.name: info
        for info, tensor in zip(outputs, interface.outputs, strict=True)
        if tensor.name in infos and _take_copy(writer, info.name, infos[tensor.name].name)
    }
    # ONNX gives every tensor one name: another output that has the name of an input gets another one.
    results = [
        (info, _without(tensor, infos))
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
        info.CopyFrom(infos[name])


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
