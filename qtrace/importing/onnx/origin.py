"""What a file says of itself, and its names, kept for the export."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from qtrace.graph.interface import TensorInfo, read_interface, write_interface
from qtrace.graph.origin import (
    Facts,
    FileOrigin,
    FileParameter,
    FileRemark,
    FileResult,
    hash_values,
    read_origin,
    write_origin,
)
from qtrace.graph.types import Input, Node, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.importing.onnx.importer import Importer
from qtrace.importing.onnx.model import Graph, standard_opset
from qtrace.onnxfile.model import bodies_of
from qtrace.process import paused_collector

_PRODUCER = "qtrace.producer"  # in files of qtrace: the tool that wrote the file that was quantized


def list_names(importer: Importer, graph: Graph) -> FileOrigin:
    """Returns the names of the file for the nodes and parameters of a graph that is complete.

    Args:
        importer: the importer, which has added all nodes.
        graph: the graph of the file.
    """
    results = {
        node.name: result for node, result in importer.results.items() if not isinstance(node.expr, Input)
    }
    parameters = {}
    for path, source in importer.layers.sources.items():
        stored = graph.stored.get(source.name)
        shape = source.shape if stored is None else stored.shape
        parameters[path] = FileParameter(source.name, shape, source.moves)
    frozen = dict.fromkeys(sorted(importer.layers.frozen), "")
    programs = dict(_programs(importer, graph))
    return FileOrigin(results=results, parameters=parameters, frozen=frozen, programs=programs)


def _programs(importer: Importer, graph: Graph) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the path of each parameter that the file computes in fewer bytes, with hash and model."""
    # Without other domains, so that no export takes a program with their ops.
    opsets = [onnx.helper.make_opsetid("", importer.opsets.get("", 1))]
    for path, source in importer.layers.sources.items():
        name = importer.made.get((source.name, source.moves), "")
        if name not in importer.makers:
            continue
        values = get_module(importer.builder.traced, path).numpy()
        left, nodes = values.nbytes, dict[int, onnx.NodeProto]()
        tensors, pending = dict[str, onnx.TensorProto](), [(name, False)]
        while pending and left > 0:
            tensor, done = pending.pop()
            node = importer.makers.get(tensor)
            if node is None and tensor in graph.stored and tensor not in tensors:
                left -= graph.stored[tensor].nbytes
                tensors[tensor] = onnx.numpy_helper.from_array(np.array(graph.stored[tensor]), tensor)
            elif node is None or any(bodies_of(node)):  # it was joined into others, or runs in each call
                left = left if tensor in ("", *tensors) else 0
            elif done:
                nodes[id(node)] = node
            elif id(node) not in nodes:
                left -= node.ByteSize()
                pending += [(tensor, True), *((part, False) for part in node.input)]
        if left > 0:
            output = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, values.shape)
            body = onnx.helper.make_graph([*nodes.values()], "program", [], [output], [*tensors.values()])
            model = onnx.helper.make_model(body, opset_imports=opsets)
            yield path, (hash_values(values), base64.b64encode(model.SerializeToString()).decode())


@paused_collector()
def keep_own(traced: TracedModule, model: onnx.ModelProto, of_module: bool) -> None:
    """Adds what the model says of itself to the interface and the origin of ``traced``.

    Args:
        traced: the imported graph.
        model: the file.
        of_module: whether the parameters may be given back to a module, which must know the frozen ones.
    """
    facts = {fact.key: fact.value for fact in model.metadata_props}
    own = tuple((key, value) for key, value in facts.items() if not key.startswith("qtrace."))
    interface, origin = read_interface(traced), read_origin(traced)
    if interface is not None:
        outputs = _with_fixed_sizes(interface.outputs, traced.graph.outputs, model.graph.output)
        if own or outputs != interface.outputs:
            write_interface(traced, replace(interface, outputs=outputs, metadata=own or interface.metadata))
    if origin is None:
        return
    producer = f"{model.producer_name} {model.producer_version}".strip()
    opset = standard_opset(model) or 0
    values = (*model.graph.input, *model.graph.output)
    ends = {value.name: value.doc_string for value in values}
    end_facts = {value.name: _facts(value) for value in values}
    output_axes = {
        v.name: tuple(axis.dim_param for axis in v.type.tensor_type.shape.dim) for v in model.graph.output
    }
    write_origin(
        traced,
        replace(
            origin,
            graph=model.graph.name,
            doc=model.doc_string,
            graph_doc=model.graph.doc_string,
            producer=facts.get(_PRODUCER, "") if model.producer_name == "qtrace" else producer,
            domain=model.domain,
            model_version=max(int(model.model_version), 0),
            opset=max(int(opset), 0),
            ir_version=max(int(model.ir_version), 0),
            end_docs={name: text for name, text in ends.items() if text},
            graph_facts=_facts(model.graph),
            end_facts={name: facts for name, facts in end_facts.items() if facts},
            output_axes={name: axes for name, axes in output_axes.items() if any(axes)},
            node_remarks=_node_remarks(model.graph.node, {r.node for r in origin.results.values()}),
            results=_with_pieces(traced, model.graph, origin.results),
            frozen=origin.frozen if of_module else {},
        ),
    )


def _with_pieces(
    traced: TracedModule, graph: onnx.GraphProto, results: Mapping[str, FileResult]
) -> dict[str, FileResult]:
    """Adds the names of nodes of the file that were joined into others, as a Sigmoid into a SiLU.

    A node without a result in the graph is a piece of the only op that what it computes goes to.
    """
    present = {node.name for expr in exprs(traced) for node in expr.outputs}
    owners = {tensor: name for name, r in results.items() if name in present for tensor in r.names}
    computed, nodes = {value.name for value in graph.input}, list[onnx.NodeProto]()
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and not computed.isdisjoint(node.input):
            computed.update(node.output)
            nodes.append(node)
    found: dict[str, list[FileResult]] = {}
    readers: dict[str, str] = {}  # tensor -> the op that it goes to; "" for several
    for node in reversed(nodes):
        ops = {owners[name] for name in node.output if name in owners}
        ops = ops or {readers[name] for name in node.output if name in readers}
        op = ops.pop() if len(ops) == 1 else ""
        if not owners.keys() >= {node.name, *node.output}:
            found.setdefault(op, []).extend(FileResult(name, node.name, "") for name in node.output)
        for name in node.input:
            readers[name] = op if readers.setdefault(name, op) == op else ""
    return {name: r.joined(found[name]) if name in found else r for name, r in results.items()}


def _with_fixed_sizes(
    outputs: Iterable[TensorInfo], nodes: Iterable[Node], declared: Iterable[onnx.ValueInfoProto]
) -> tuple[TensorInfo, ...]:
    """Adds the sizes that the file fixes of outputs whose values decide their shape: the graph lacks them."""
    sizes = {value.name: _fixed_sizes(value) for value in declared}
    return tuple(
        replace(info, sizes=sizes.get(info.name)) if getattr(node, "shape", ()) is None else info
        for info, node in zip(outputs, nodes, strict=True)
    )


def _fixed_sizes(value: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    """Returns the sizes that the file fixes, None for the others; None if it fixes none."""
    sizes = tuple(axis.dim_value or None for axis in value.type.tensor_type.shape.dim)
    return sizes if any(size is not None and size > 0 for size in sizes) else None


def _node_remarks(nodes: Iterable[onnx.NodeProto], names: set[str]) -> dict[str, FileRemark]:
    """Returns what the file says of the nodes of some names."""
    remarks: dict[str, FileRemark] = {}
    for node in nodes:
        if node.name in names and (node.doc_string or node.metadata_props):
            remarks.setdefault(node.name, FileRemark(node.doc_string, _facts(node)))
    return remarks


def _facts(part: Any) -> Facts:
    """Returns the metadata of a graph, a node or a value."""
    return tuple((fact.key, fact.value) for fact in part.metadata_props)
