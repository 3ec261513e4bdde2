"""Takes away the Identity nodes by which exporters let equal tensors share one initializer.

PyTorch's exporter stores equal parameters once: ``Identity(l0.bias) -> l1.bias``. Vectors may be equal by
chance, as biases of zeros are: each is a stored tensor of its own again, so that layers find their biases and
scales, and can learn apart. Equal matrices are tied, and stay one.
"""

from __future__ import annotations

import dataclasses

import onnx

from qtrace.importing.onnx.model import Graph, OnnxNode
from qtrace.onnxfile.bodies import rename_tensors

__all__ = ["store_copies"]


def store_copies(graph: Graph) -> Graph:
    """Returns the graph with a copy of the tensor in place of each Identity of a stored one.

    Args:
        graph: the graph; stored integers that a DequantizeLinear reads count as stored, too.
    """
    stored = dict(graph.stored)
    dequantized: dict[str, OnnxNode] = {}
    nodes: list[OnnxNode] = []
    tied: dict[str, str] = {}
    for node in graph.nodes:
        if not tied.keys().isdisjoint(node.inputs):
            proto = onnx.NodeProto()
            proto.CopyFrom(node.proto)
            rename_tensors(proto, tied)
            node = dataclasses.replace(node, inputs=tuple(proto.input), proto=proto)
        if node.op == "Identity" and not node.domain:
            (source,), (copy,) = node.inputs, node.outputs
            if source in stored:
                stored[copy] = stored[source]
                if stored[source].ndim > 1:
                    tied[copy] = source
                continue
            if source in dequantized:
                node = dataclasses.replace(dequantized[source], name=node.name, outputs=(copy,))
        if node.op == "DequantizeLinear" and node.inputs[0] in stored:
            dequantized[node.outputs[0]] = node
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), stored=stored)
