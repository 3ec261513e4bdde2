"""Gives a model back what the file that it was imported from says of itself, and the names of that file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, NodeProto

from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.origin import Facts, FileOrigin, FileParameter, FileRemark, FileResult

__all__ = ["PRODUCER", "OwnNames", "describe"]

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
