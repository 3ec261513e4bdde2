"""MSCGraph, the graph document of TVM's multi-system compiler: JSON, weights and a prototxt for viewers.

Nodes name their parents, and MSC derives the children from them; tensors are called ``NODE:INDEX``. Weights
and tensors have types and layouts; the values of weights are in a ``.npz`` file by their names. Quantization
parameters are attributes of the nodes: ``qparams_input_0``, ``qparams_output_0``, ``qparams_weight`` and so
on, each a JSON text.

What MSC cannot hold, and the way back (`qtrace.graph.to_traced`) needs, are attributes, too, only where
they say more than the type and the names do: ``scope`` (below ``block``), ``call``, ``stored``,
``roundings`` and ``traced_shape``.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, GraphError
from qtrace.export.converted import ConvertedGraph
from qtrace.export.document import (
    DocumentOp,
    GraphDocument,
    Rounding,
    TensorQuantization,
    Value,
    read_graph,
)
from qtrace.export.format import Format
from qtrace.graph.types import GetAttr
from qtrace.graph.walk import owner
from qtrace.storage.checkpoints import pack_arrays
from qtrace.targets.msc.calls import StoredPlace, default_place, node_digest, same_call, write_call
from qtrace.targets.msc.document import BLOCK, MSCGraph, MSCNode, MSCTensor
from qtrace.targets.msc.kinds import standard_calls
from qtrace.targets.msc.ops import DocumentSizes, in_words_of_msc, output_layout, weight_layout, weight_shape

__all__ = ["FORMAT"]


def files(converted: ConvertedGraph, path: Path, free_batch: bool = False) -> dict[Path, bytes]:
    """Returns the JSON document, the weights and the prototxt.

    Args:
        converted: the graph of a converted module, or of a plain traced one. Sizes that depend on its open
            axes are -1.
        path: the path of the JSON document; the others get the suffixes ``.npz`` and ``.prototxt``.
        free_batch: whether the first axis of every input is open, too.

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
    graph = _Writer(document, DocumentSizes(converted, free_batch)).graph()
    weights = {t.name: t.shape for t in graph.get_weights()}
    values = {name: v.reshape(weights[name]) for name, v in document.parameters.items()}
    return {
        path.with_suffix(".npz"): pack_arrays(values),
        path.with_suffix(".prototxt"): graph.visualize().encode(),
        path: graph.to_json().encode(),
    }


# Named by format=: many documents end in .json.
FORMAT = Format("msc", files, options=("free_batch",), float_options=("free_batch",), float_types=())


class _Writer:
    """Makes the nodes of a document, each from its op and the nodes before it."""

    def __init__(self, document: GraphDocument, sizes: DocumentSizes) -> None:
        self.document, self.sizes = document, sizes
        self.nodes: dict[str, MSCNode] = {}
        self.tensors: dict[str, MSCTensor] = {}
        self.owners: dict[str, str] = {}  # name of a layer's first weight -> the first node that uses it
        # Name of a tensor -> its alias: only inputs and outputs of the graph have one.
        self.aliases = {_tensor_name(op.outputs[0]): op.name for op in document.ops if op.kind == "input"}
        counts = {op.name: len(op.outputs) for op in document.ops}
        for value in document.outputs:
            alias = value.producer if counts[value.producer] == 1 else f"{value.producer}_{value.index}"
            self.aliases.setdefault(_tensor_name(value), alias)

    def graph(self) -> MSCGraph:
        """Returns the graph without values."""
        for index, op in enumerate(self.document.ops):
            node = self._node(index, op)
            self.nodes[node.name] = node
            self.tensors.update((tensor.name, tensor) for tensor in node.outputs)
        inputs = tuple(_tensor_name(op.outputs[0]) for op in self.document.ops if op.kind == "input")
        outputs = tuple(_tensor_name(value) for value in self.document.outputs)
        return MSCGraph(
            self.document.name, inputs, outputs, tuple(self.nodes.values()), tuple(self.sizes.prims)
        )

    def _node(self, index: int, op: DocumentOp) -> MSCNode:
        inputs = tuple(self.tensors[_tensor_name(value)] for value in op.inputs)
        outputs = tuple(self._output(op, value, [t.layout for t in inputs]) for value in op.outputs)
        weights = {key: _weight(op, key, value) for key, value in op.weights.items()}
        self.sizes.add(op)
        first = next((t.name for key, t in weights.items() if key != "const"), None)
        shared = op.name if first is None else self.owners.setdefault(first, op.name)
        node = MSCNode(
            index,
            op.name,
            "" if shared == op.name else shared,
            op.kind,
            tuple(self.nodes[name] for name in dict.fromkeys(v.producer for v in op.inputs)),
            inputs,
            outputs,
            {},
            weights,
            () if op.expr is None else (BLOCK, *(part for part in op.path.split(".") if part)),
        )
        node = in_words_of_msc(op, node)
        node = replace(node, attrs={**node.attrs, **_qparams(op)})
        return replace(node, attrs={**node.attrs, **self._way_back(op, node)})

    def _output(self, op: DocumentOp, value: Value, before: list[str]) -> MSCTensor:
        name = _tensor_name(value)
        shape, prims = self.sizes.axes(value.name, value.producer, value.index)
        layout = output_layout(op, value, before)
        alias = self.aliases.get(name, "")
        return MSCTensor(name, alias, value.dtype, layout, shape or value.shape, prims)

    def _way_back(self, op: DocumentOp, node: MSCNode) -> dict[str, str]:
        """Returns what the type, the attributes and the names of a node do not say of its op."""
        texts = {"stored": _stored(op), "roundings": self._roundings(op)}
        if any(-1 in tensor.shape for tensor in node.outputs) and op.kind == "input":
            texts["traced_shape"] = ",".join(map(str, op.outputs[0].shape))
        if op.expr is not None:
            try:
                call = _call(op, node)
                if not _is_standard(call, node):
                    texts["call"] = json.dumps({**call, "node": node_digest(node)})
            except GraphError as error:
                texts["no_call"] = str(error)
        return {key: text for key, text in texts.items() if text}

    def _roundings(self, op: DocumentOp) -> str:
        """Returns the roundings of what an op reads, and of the graph's outputs that it gives."""
        steps = {operand.key: operand.roundings for operand in op.operands.values()}
        ends = zip(self.document.outputs, self.document.output_roundings, strict=True)
        for index, (value, roundings) in enumerate(ends):
            if value.producer == op.name:
                steps[f"graph_output_{index}"] = roundings
        named = {key: [_step(step) for step in each] for key, each in steps.items() if each}
        return json.dumps(named) if named else ""


def _is_standard(call: dict[str, Any], node: MSCNode) -> bool:
    """Returns whether the type and the attributes of a node say its call."""
    try:
        calls = standard_calls(node)
    except GraphError:
        return False
    return calls.results is None and len(calls.steps) == 1 and same_call(call, calls.steps[0])


def _step(rounding: Rounding) -> list[Any]:
    return [rounding.site, list(rounding.shape)]


def _call(op: DocumentOp, node: MSCNode) -> dict[str, Any]:
    """Returns the call of an op as data.

    Raises:
        GraphError: when an argument cannot be written as data.
    """
    assert op.expr is not None
    references = {each: _reference(op, node, operand.key) for each, operand in op.operands.items()}
    path, tensors = "", {}
    if owner(op.expr) is not None:
        source = op.expr.inputs[0].expr
        path = source.name if isinstance(source, GetAttr) else op.expr.inputs[0].name
        prefix = len(path) + 1
        tensors = {place.path[prefix:]: _reference(op, node, key) for key, place in op.stored.items()}
    return write_call(op.expr, references, tensors, path)


def _reference(op: DocumentOp, node: MSCNode, key: str) -> dict[str, Any]:
    """Returns how a call refers to a tensor; with its shape, if that is another one in the document."""
    if key not in op.stored or op.stored[key].shape == node.weights[key].shape:
        return {"ref": key}
    return {"ref": key, "shape": list(op.stored[key].shape)}


def _stored(op: DocumentOp) -> str:
    """Returns where weights are stored, as far as their names do not say it."""
    places = {}
    for key, stored in op.stored.items():
        kind = ("parameter" if stored.trainable else "buffer") if stored.path else "constant"
        name = op.weights[key].name
        place, default = StoredPlace(stored.path or name, kind), default_place(name, key)
        if op.expr is not None and owner(op.expr) is not None:  # the call says the path
            place = StoredPlace(default.path, kind)
        if place != default:
            places[key] = [place.path, place.kind]
    return json.dumps(places) if places else ""


def _weight(op: DocumentOp, key: str, value: Value) -> MSCTensor:
    if key == "bias" or op.kind in ("batch_norm", "prelu"):  # (1, C, 1, 1) in the graph
        value = replace(value, shape=(math.prod(value.shape),))
    if key == "weight":
        value = replace(value, shape=weight_shape(op.kind, value))
    layout = weight_layout(op.kind, value) if key == "weight" else "" if key == "const" else "O"
    return MSCTensor(
        value.name, "", value.dtype, layout if len(layout) == len(value.shape) else "", value.shape
    )


def _tensor_name(value: Value) -> str:
    return f"{value.producer}:{value.index}"


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
