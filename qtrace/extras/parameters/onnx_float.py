"""A float ONNX model and, next to it, a file of quantization parameters that refers to its tensors by name.

For tools that quantize a float model: TensorRT with a calibration cache, Qualcomm's converters with AIMET
encodings, ncnn with a table. The tensors have the names of the graph's nodes. Weights and biases are the
trained floats; a weight is clipped where its scheme leaves out the lowest integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, float_graph
from qtrace.export.format import Content, Format
from qtrace.export.onnx.exporter import OnnxOptions, write_model
from qtrace.export.onnx.files import check, contents_of
from qtrace.export.parameters import Names, ParameterLayer, beside, parameter_file, site_table
from qtrace.ops import OpCall


def files(converted: ConvertedGraph, path: Path, *, params: str | None = None) -> dict[Path, Content]:
    """Returns the float model and its parameter file.

    Args:
        converted: the graph of a converted module.
        path: the path of the model.
        params: the kind of parameter file, such as ``aimet-2.0.0``; None for only the model.

    Raises:
        ExportError: when ONNX cannot express a node, or the kind of file cannot express a site, naming it.
    """
    kind = None if params is None else parameter_file(params)
    # The parameter file calls parameters as the graph does.
    exporter, model = write_model(float_graph(converted), OnnxOptions(names_parameters=False))
    _name_parameters(exporter.graph, model)
    check(model)
    contents: dict[Path, Content] = {}
    if kind is not None:
        rows = site_table(converted, _names(exporter.graph, exporter.writer, model))
        contents[beside(path, kind)] = kind.write(rows).encode()
    return {**contents, **contents_of(model, path)}


# Chosen by name: the suffix .onnx stands for the format with integers.
FORMAT = Format("onnx_float", files, options=("params",))


def _calls(flat: ConvertedGraph) -> Iterator[OpCall]:
    return (op.call for op in flat.ops if op.call is not None)


def _name_parameters(flat: ConvertedGraph, model: Any) -> None:
    """Gives weights and biases in another layout the names of their nodes, unless other tensors have them."""
    from qtrace.onnxfile.model import read_names, rename_tensors

    graph = model.graph
    used = {name for node in graph.node for name in (*read_names(node), *node.output)}
    renamed: dict[str, str] = {}
    for call in _calls(flat):
        for node, suffix in ((call.weight, call.kind), (call.bias, "flat")):
            if node is not None and f"{node.name}_{suffix}" in used and node.name not in used:
                renamed[f"{node.name}_{suffix}"] = node.name
                used.add(node.name)
    for tensor in graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    for node in graph.node:
        rename_tensors(node, renamed)


def _names(flat: ConvertedGraph, writer: Any, model: Any) -> Names:
    """Returns the names of the graph's nodes and layers in the model."""
    nodes = list(flat.nodes.values())
    values = {n.name: writer.values[n] for n in nodes if n in writer.values}
    tensors = {name: name for name in values}
    tensors.update((n.name, writer.names[n]) for n in nodes if n in writer.names)
    stored = {t.name for t in model.graph.initializer}
    layers: dict[str, ParameterLayer] = {}
    for call in _calls(flat):
        if call.weight is not None:
            layers[call.out.name] = _layer(call, values.get(call.weight.name), tensors, stored, model, layers)
    return Names(tensors, layers)


def _layer(
    call: OpCall,
    value: np.ndarray | None,
    tensors: dict[str, str],
    stored: set[str],
    model: Any,
    others: dict[str, ParameterLayer],
) -> ParameterLayer:
    from qtrace.export.onnx.sites import weight_layout

    assert call.weight is not None
    name = call.weight.name
    if value is None:
        raise ExportError(
            f"{name}, the weight of {call.out.name}, is computed, and a parameter file speaks of stored "
            "weights: set quantize: false for that layer, or export format onnx."
        )
    laid, axis = weight_layout(call, value)
    weight = f"{name}_{call.kind}" if f"{name}_{call.kind}" in stored else name
    bias = "" if call.bias is None else call.bias.name
    bias = f"{bias}_flat" if f"{bias}_flat" in stored else bias
    reads, used_nodes = [tensors[call.inputs[0].name], weight], {layer.name for layer in others.values()}
    node = next(n.name for n in model.graph.node if list(n.input[:2]) == reads and n.name not in used_nodes)
    return ParameterLayer(node, weight, bias, laid, axis, int(call.attrs.get("groups", 1)))
