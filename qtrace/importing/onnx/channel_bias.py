"""Joins a convolution and the sum with its rounded bias behind it, as files for OpenVINO have them.

`qtrace.export.onnx.biases_apart` says why they do. Biases of floats are folded with the other constants.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from qtrace.importing.onnx.model import Graph, OnnxNode, count_readers

__all__ = ["join_channel_biases"]


def join_channel_biases(graph: Graph) -> Graph:
    """Returns the graph with each pair as one convolution, in the place of the sum.

    Args:
        graph: the graph; pairs whose convolution is read elsewhere stay.
    """
    readers = count_readers(graph)
    layers = {
        node.outputs[0]: node
        for node in graph.nodes
        if node.op == "Conv" and not node.domain and len(node.inputs) == 2 and readers[node.outputs[0]] == 1
    }
    biases = {node.outputs[0]: node for node in graph.nodes if _is_bias(node, graph, readers)}
    joined: dict[str, OnnxNode] = {}  # by the name of the sum
    for node in graph.nodes:
        if node.op == "Add" and not node.domain and len(node.inputs) == 2:
            layer, bias = layers.get(node.inputs[0]), node.inputs[1]
            if layer is not None and bias in biases:
                joined[node.outputs[0]] = dataclasses.replace(
                    layer, inputs=(*layer.inputs, bias), outputs=node.outputs
                )
    added = Counter(node.inputs[2] for node in joined.values())
    whole = {bias for bias, count in added.items() if count == readers[bias]}
    joined = {name: node for name, node in joined.items() if node.inputs[2] in whole}
    if not joined:
        return graph
    vectors = {node.inputs[0]: node for name, node in biases.items() if name in whole}
    stored = {name: np.reshape(a, -1) if name in vectors else a for name, a in graph.stored.items()}
    axes = {
        bias: dataclasses.replace(biases[bias], attributes={**biases[bias].attributes, "axis": 0})
        for bias in whole
    }
    dropped = {name for name, layer in layers.items() if any(n.name == layer.name for n in joined.values())}
    nodes = [node for node in graph.nodes if not dropped.intersection(node.outputs)]
    nodes = [joined.get(n.outputs[0], axes.get(n.outputs[0], n)) for n in nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes), stored=stored)


def _is_bias(node: OnnxNode, graph: Graph, readers: Counter[str]) -> bool:
    """Whether a node dequantizes stored integers of 32 bits, one for each channel of a result."""
    if node.op != "DequantizeLinear" or node.domain or node.inputs[0] not in graph.stored:
        return False
    values = graph.stored[node.inputs[0]]
    channels = values.ndim > 2 and values.size == values.shape[1]
    return values.dtype == np.int32 and channels and readers[node.inputs[0]] == 1
