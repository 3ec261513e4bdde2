"""Joins a product with a stored matrix and the sum with a stored vector behind it: one linear layer.

Exporters write a linear layer on more than two axes as MatMul and Add, since Gemm takes matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from qtrace.importing.onnx.model import Graph, OnnxNode, count_readers
from qtrace.importing.onnx.values import is_float

__all__ = ["LINEAR", "join_biases"]

LINEAR = ("qtrace", "Linear")
"""Domain and kind of the joined node: inputs x, weight (inputs x outputs) and bias."""


def join_biases(graph: Graph) -> Graph:
    """Returns the graph with each pair as one node, in the place of the sum.

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
