"""MSCGraph, the graph document of TVM's multi-system compiler: JSON, and a prototxt for viewers beside it.

Nodes name their parents, and MSC derives the children from them; tensors are called ``NODE:INDEX``.
Weights and tensors have types and layouts. Quantization parameters are attributes of the nodes:
``qparams_input_0``, ``qparams_output_0``, ``qparams_weight`` and so on, each a JSON text.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.export.converted.document import DocumentOp, Graph, Quantized, Value, read_graph
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.msc.ops import attributes, optype, output_layout, weight_layout

__all__ = ["SUFFIXES", "files"]

# Named by format=: many documents end in .json.
SUFFIXES: tuple[str, ...] = ()


def files(converted: ConvertedGraph, path: Path) -> dict[Path, bytes]:
    """Returns the JSON document and the prototxt.

    Args:
        converted: the graph of a converted module.
        path: the path of the JSON document; the prototxt gets the suffix ``.prototxt``.

    Raises:
        ExportError: when ``path`` has the suffix of the prototxt.
    """
    if path.suffix == ".prototxt":
        raise ExportError(f"{path.name} is the name of the document for viewers: name the one in JSON.")
    document = _document(read_graph(converted))
    text = json.dumps(document, indent=1)
    return {path.with_suffix(".prototxt"): _prototxt(document).encode(), path: f"{text}\n".encode()}


def _document(graph: Graph) -> dict[str, Any]:
    layouts: dict[str, str] = {}
    first: dict[str, str] = {}
    nodes = [_node(index, op, layouts, first) for index, op in enumerate(graph.ops)]
    return {
        "name": graph.name,
        "inputs": [_tensor_name(op.outputs[0]) for op in graph.ops if op.kind == "input"],
        "outputs": [_tensor_name(value) for value in graph.outputs],
        "nodes": nodes,
        "prims": [],
    }


def _node(index: int, op: DocumentOp, layouts: dict[str, str], first: dict[str, str]) -> dict[str, Any]:
    inside = [layouts.get(_tensor_name(v), "") for v in op.inputs]
    outputs = []
    for value in op.outputs:
        name = _tensor_name(value)
        layouts[name] = output_layout(op, value, inside)
        outputs.append(_tensor(name, value, layouts[name]))
    weights = {}
    for key, value in op.weights.items():
        if key == "bias":  # a convolution's is (1, C, 1, 1) in the graph
            value = replace(value, shape=(math.prod(value.shape),))
        layout = {"weight": weight_layout(op.kind, value), "bias": "O"}.get(key, "")
        weights[key] = _tensor(value.name, value, layout if len(layout) == len(value.shape) else "")
    shared = first.setdefault(op.weights["weight"].name, op.name) if "weight" in op.weights else op.name
    return {
        "index": index,
        "name": op.name,
        "shared_ref": "" if shared == op.name else shared,
        "optype": optype(op),
        "parents": list(dict.fromkeys(v.producer for v in op.inputs)),
        "inputs": [_tensor_name(v) for v in op.inputs],
        "outputs": outputs,
        "attrs": {**attributes(op), **_qparams(op)},
        "weights": weights,
    }


def _tensor_name(value: Value) -> str:
    return f"{value.producer}:{value.index}"


def _tensor(name: str, value: Value, layout: str) -> dict[str, Any]:
    parts = {"dtype": value.dtype, "layout": layout, "shape": list(value.shape), "prims": []}
    return {"name": name, "alias": value.name if value.name != name else "", **parts}


def _qparams(op: DocumentOp) -> dict[str, str]:
    by_key = {f"qparams_input_{i}": v.quantized for i, v in enumerate(op.inputs)}
    by_key.update((f"qparams_output_{i}", v.quantized) for i, v in enumerate(op.outputs))
    by_key.update((f"qparams_{key}", v.quantized) for key, v in op.weights.items())
    return {key: _numbers(quantized) for key, quantized in by_key.items() if quantized is not None}


def _numbers(quantized: Quantized) -> str:
    return json.dumps(
        {
            "site": quantized.site,
            "scheme": quantized.scheme,
            "scale": quantized.scale.tolist(),
            "zero_point": quantized.zero_point.tolist(),
        }
    )


def _prototxt(document: dict[str, Any]) -> str:
    """Writes the nodes as layers: viewers show bottoms and tops as edges, ``layer_param`` as a table."""
    tensors = {t["name"]: t for node in document["nodes"] for t in node["outputs"]}
    lines = [f"name: {_quoted(document['name'])}"]
    for node in document["nodes"]:
        kind = node["optype"].replace(".", "_")
        lines += ["layer {", f"  name: {_quoted(node['name'])}", f"  type: {_quoted(kind)}"]
        lines.append(f"  top: {_quoted(node['name'])}")
        lines += [f"  bottom: {_quoted(parent)}" for parent in node["parents"]]
        lines += ["  layer_param {", f"    idx: {node['index']}"]
        rows = [(f"input_{i}", _shown(tensors[name])) for i, name in enumerate(node["inputs"])]
        rows += [(f"output_{i}", _shown(t)) for i, t in enumerate(node["outputs"])]
        rows += [(f"param_{key}", _shown(t)) for key, t in node["weights"].items()]
        rows += list(node["attrs"].items())
        lines += [f"    {key}: {_quoted(text)}" for key, text in rows]
        lines += ["  }", "}"]
    return "\n".join(lines) + "\n"


def _shown(tensor: dict[str, Any]) -> str:
    sizes = ",".join(map(str, tensor["shape"]))
    layout = f"({tensor['layout']})" if tensor["layout"] else ""
    return f"{tensor['name']}<{sizes}|{tensor['dtype']}>{layout}"


def _quoted(text: str) -> str:
    return json.dumps(text)
