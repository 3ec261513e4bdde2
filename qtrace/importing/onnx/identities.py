"""Takes away the Identity nodes by which exporters let equal tensors share one initializer.

PyTorch's exporter stores equal parameters once: ``Identity(l0.bias) -> l1.bias``. Each of them is a stored
tensor of its own again, so that layers find their weights, biases and scales, and can learn apart.
"""

from __future__ import annotations

import dataclasses

from qtrace.importing.onnx.model import Graph, OnnxNode

__all__ = ["store_copies"]


def store_copies(graph: Graph) -> Graph:
    """Returns the graph with a copy of the tensor in place of each Identity of a stored one.

    Args:
        graph: the graph; stored integers that a DequantizeLinear reads count as stored, too.
    """
    stored = dict(graph.stored)
    dequantized: dict[str, OnnxNode] = {}
    nodes: list[OnnxNode] = []
    for node in graph.nodes:
        if node.op == "Identity" and not node.domain:
            (source,), (copy,) = node.inputs, node.outputs
            if source in stored:
                stored[copy] = stored[source]
                continue
            if source in dequantized:
                node = dataclasses.replace(dequantized[source], name=node.name, outputs=(copy,))
        if node.op == "DequantizeLinear" and node.inputs[0] in stored:
            dequantized[node.outputs[0]] = node
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), stored=stored)
