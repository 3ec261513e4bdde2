"""MSCGraph, the graph document of TVM's multi-system compiler: JSON, weights and a prototxt for viewers.

Nodes name their parents, and MSC derives the children from them; tensors are called ``NODE:INDEX``. Weights
and tensors have types and layouts; the values of weights are in a ``.npz`` file by their names. Quantization
parameters are attributes of the nodes: ``qparams_input_0``, ``qparams_output_0``, ``qparams_weight`` and so
on, each a JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qtrace.errors import ExportError
from qtrace.export.converted.document import DocumentOp, GraphDocument, TensorQuantization, Value, read_graph
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.shapes import shapes_of
from qtrace.export.format import Format
from qtrace.export.msc.ops import attributes, optype, output_layout, weight_layout, weight_shape
from qtrace.graph.msc import MSCGraph, MSCNode, MSCTensor
from qtrace.storage.archives import pack_arrays
from qtrace.storage.ownership import WRITTEN

__all__ = ["FORMAT"]


def files(converted: ConvertedGraph, path: Path, free_batch: bool = False) -> dict[Path, bytes]:
    """Returns the JSON document, the weights and the prototxt.

    Args:
        converted: the graph of a converted module, or of a plain traced one.
        path: the path of the JSON document; the others get the suffixes ``.npz`` and ``.prototxt``.
        free_batch: whether the first axis of every input is free: all sizes that depend on it are -1.

    Raises:
        ExportError: when ``path`` has the suffix of another file, ``free_batch`` is no truth value, or the
            graph does not run with one more sample.
    """
    if path.suffix == ".prototxt":
        raise ExportError(f"{path.name} is the name of the document for viewers: name the one in JSON.")
    if path.suffix == ".npz":
        raise ExportError(f"{path.name} is the name of the file of weights: name the document in JSON.")
    if not isinstance(free_batch, bool):
        raise ExportError(f"free_batch of format msc is {free_batch!r}: give true or false.")
    document = read_graph(converted)
    graph = _graph(document, _free_axes(converted) if free_batch else {})
    weights = {t.name: t.shape for node in graph.nodes for t in node.weights.values()}
    values = {name: v.reshape(weights[name]) for name, v in document.parameters.items()}
    return {
        path.with_suffix(".npz"): pack_arrays(values),
        path.with_suffix(".prototxt"): _prototxt(graph).encode(),
        path: graph.to_json().encode(),
    }


# Named by format=: many documents end in .json.
FORMAT = Format("msc", files, options=("free_batch",), float_options=("free_batch",))


def _free_axes(converted: ConvertedGraph) -> dict[str, frozenset[int]]:
    """Returns name of a tensor -> its axes whose sizes change with the number of samples."""
    traced, longer = shapes_of(converted.module), shapes_of(converted.module, more=1)
    free: dict[str, frozenset[int]] = {}
    for node, shape in traced.items():
        axes = (i for i, (n, other) in enumerate(zip(shape, longer[node], strict=True)) if n != other)
        free[converted.inputs.get(node, node.name)] = frozenset(axes)
    return free


def _graph(graph: GraphDocument, free: Mapping[str, frozenset[int]]) -> MSCGraph:
    layouts: dict[str, str] = {}
    first: dict[str, str] = {}
    nodes = [_node(index, op, layouts, first, free) for index, op in enumerate(graph.ops)]
    inputs = tuple(_tensor_name(op.outputs[0]) for op in graph.ops if op.kind == "input")
    return MSCGraph(graph.name, inputs, tuple(_tensor_name(v) for v in graph.outputs), tuple(nodes))


def _node(
    index: int,
    op: DocumentOp,
    layouts: dict[str, str],
    first: dict[str, str],
    free: Mapping[str, frozenset[int]],
) -> MSCNode:
    inside = [layouts.get(_tensor_name(v), "") for v in op.inputs]
    outputs = []
    for value in op.outputs:
        name = _tensor_name(value)
        layouts[name] = output_layout(op, value, inside)
        axes = free.get(value.name, frozenset())
        shape = tuple(-1 if axis in axes else n for axis, n in enumerate(value.shape))
        outputs.append(_tensor(name, replace(value, shape=shape), layouts[name]))
    weights = {}
    for key, value in op.weights.items():
        if key == "bias":  # a convolution's is (1, C, 1, 1) in the graph
            value = replace(value, shape=(math.prod(value.shape),))
        if key == "weight":
            value = replace(value, shape=weight_shape(op.kind, value))
        layout = {"weight": weight_layout(op.kind, value), "bias": "O"}.get(key, "")
        weights[key] = _tensor(value.name, value, layout if len(layout) == len(value.shape) else "")
    shared = first.setdefault(op.weights["weight"].name, op.name) if "weight" in op.weights else op.name
    return MSCNode(
        index,
        op.name,
        "" if shared == op.name else shared,
        optype(op),
        tuple(dict.fromkeys(v.producer for v in op.inputs)),
        tuple(_tensor_name(v) for v in op.inputs),
        tuple(outputs),
        {**attributes(op), **_qparams(op)},
        weights,
    )


def _tensor_name(value: Value) -> str:
    return f"{value.producer}:{value.index}"


def _tensor(name: str, value: Value, layout: str) -> MSCTensor:
    alias = value.name if value.name != name else ""
    return MSCTensor(name, alias, value.dtype, layout, value.shape)


def _qparams(op: DocumentOp) -> dict[str, str]:
    by_key = {f"qparams_input_{i}": v.quantized for i, v in enumerate(op.inputs)}
    by_key.update((f"qparams_output_{i}", v.quantized) for i, v in enumerate(op.outputs))
    by_key.update((f"qparams_{key}", v.quantized) for key, v in op.weights.items())
    return {key: _numbers(quantized) for key, quantized in by_key.items() if quantized is not None}


def _numbers(quantized: TensorQuantization) -> str:
    return json.dumps(
        {
            "site": quantized.site,
            "scheme": quantized.scheme,
            "scale": quantized.scale.tolist(),
            "zero_point": quantized.zero_point.tolist(),
        }
    )


def _prototxt(graph: MSCGraph) -> str:
    """Writes the nodes as layers: viewers show bottoms and tops as edges, ``layer_param`` as a table."""
    lines = [f"# {WRITTEN}.", f"name: {_quoted(graph.name)}"]
    for node in graph.nodes:
        kind = node.optype.replace(".", "_")
        lines += ["layer {", f"  name: {_quoted(node.name)}", f"  type: {_quoted(kind)}"]
        lines.append(f"  top: {_quoted(node.name)}")
        lines += [f"  bottom: {_quoted(parent)}" for parent in node.parents]
        lines += ["  layer_param {", f"    idx: {node.index}"]
        rows = [(f"input_{i}", _shown(graph.find_tensor(name))) for i, name in enumerate(node.inputs)]
        rows += [(f"output_{i}", _shown(t)) for i, t in enumerate(node.outputs)]
        rows += [(f"param_{key}", _shown(t)) for key, t in node.weights.items()]
        rows += list(node.attrs.items())
        lines += [f"    {key}: {_quoted(text)}" for key, text in rows]
        lines += ["  }", "}"]
    return "\n".join(lines) + "\n"


def _shown(tensor: MSCTensor) -> str:
    """Shows a tensor as ``x:0<1,3,4,4|float32|NCHW>``, without a layout if it is not known."""
    sizes = ",".join(map(str, tensor.shape))
    layout = f"|{tensor.layout}" if tensor.layout else ""
    return f"{tensor.name}<{sizes}|{tensor.dtype}{layout}>"


def _quoted(text: str) -> str:
    return json.dumps(text)
