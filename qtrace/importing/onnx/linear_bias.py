"""Joins a layer and the sum with its stored bias after it.

Exporters write a linear layer on more than two axes as MatMul and Add, since Gemm takes matrices. Files for
OpenVINO have a convolution and the sum with its rounded bias (`qtrace.export.onnx.biases_apart`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from qtrace.importing.onnx.model import Graph, OnnxNode, count_readers
from qtrace.importing.onnx.values import is_float

__all__ = ["LINEAR", "join_biases", "join_channel_biases"]

LINEAR = ("qtrace", "Linear")
"""Domain and kind of the joined node: inputs x, weight (inputs x outputs) and bias."""


def join_biases(graph: Graph) -> Graph:
    """Returns the graph with each product and sum as one linear layer, in the place of the sum.

    Args:
        graph: the graph; pairs whose product is read elsewhere stay.
    """
    readers = count_readers(graph)
    shapes = _stored_shapes(graph)
    products = {node.outputs[0]: node for node in graph.nodes if _is_product(node, shapes)}
    joined: dict[str, OnnxNode] = {}  # by the name of the sum
    dropped: set[str] = set()  # names of products
    for node in graph.nodes:
        if node.op != "Add" or node.domain or len(node.inputs) != 2:
            continue
        for product, bias in (node.inputs, node.inputs[::-1]):
            layer = products.get(product)
            if layer is None or readers[product] != 1 or product in dropped:
                continue
            if shapes.get(bias) == shapes[layer.inputs[1]][1:]:
                joined[node.outputs[0]] = dataclasses.replace(
                    layer,
                    domain=LINEAR[0],
                    op=LINEAR[1],
                    inputs=(*layer.inputs, bias),
                    outputs=node.outputs,
                    title=node.title,
                )
                dropped.add(product)
                break
    nodes = [node for node in graph.nodes if not dropped.intersection(node.outputs)]
    return dataclasses.replace(graph, nodes=tuple(joined.get(node.outputs[0], node) for node in nodes))


def _stored_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of stored floats, transposed ones, and those that DequantizeLinear makes."""
    shapes = {name: array.shape for name, array in graph.stored.items() if is_float(array.dtype)}
    for node in graph.nodes:
        if node.op == "Transpose" and not node.domain and len(shapes.get(node.inputs[0], ())) == 2:
            rows, columns = shapes[node.inputs[0]]
            turned = list(node.attributes.get("perm", (1, 0))) == [1, 0]
            shapes[node.outputs[0]] = (columns, rows) if turned else (rows, columns)
        if node.op == "DequantizeLinear" and node.inputs[0] in graph.stored:
            shapes[node.outputs[0]] = graph.stored[node.inputs[0]].shape
    return shapes


def _is_product(node: OnnxNode, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    weight = shapes.get(node.inputs[1]) if len(node.inputs) == 2 else None
    known = weight is not None and len(weight) == 2 and node.inputs[0] not in shapes
    return known and node.op == "MatMul" and not node.domain


def join_channel_biases(graph: Graph) -> Graph:
    """Returns the graph with each convolution and rounded bias as one, in the place of the sum.

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
