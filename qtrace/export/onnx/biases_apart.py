"""Biases of convolutions as sums of their own, for OpenVINO, where a file computes with the size of a batch.

OpenVINO 2026.4.1 computes a convolution with a bias, whose result is rounded, wrong if the batch is open
and its size is part of the shape of an ``Expand`` or ``Tile``, or the end of a ``Range``, anywhere in it.
It adds one number, the largest bias, to all channels. A bias that an ``Add`` after the convolution adds, in
the shape of the result, is right, and joins the same kernel. Transposed convolutions and products are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtrace.export.onnx.naming import claim_name
from qtrace.onnxfile.model import OnnxModel

__all__ = ["write_biases_apart"]


def write_biases_apart(model: Any) -> int:
    """Takes the stored biases of convolutions out of them, if the model reads a shape.

    Args:
        model: an ONNX model with all of its tensors; it is changed in place.

    Returns:
        The number of convolutions.
    """
    from onnx import helper

    graph = model.graph
    if not any(node.op_type == "Shape" for node in graph.node):
        return 0
    index = OnnxModel(model)
    readers, names = index.readers, index.names()
    stored = {tensor.name: tensor for tensor in graph.initializer}  # only these get another shape
    dequantized = {n.output[0]: n for n in index.nodes("DequantizeLinear") if n.input[0] in stored}
    sums = dict[str, Any]()  # result of a layer -> the node that adds its bias
    for bias in list(readers):
        source = dequantized.get(bias)
        tensor = stored.get(bias if source is None else source.input[0])
        layers = readers[bias]
        if tensor is None or len(tensor.dims) != 1 or (source is not None and len(readers[tensor.name]) > 1):
            continue
        ranks = {_rank_of_weight(layer, bias, stored, dequantized) for layer in layers}
        rank = ranks.pop()
        if ranks or rank is None:
            continue
        # One axis for each of the result, the second of which counts the channels.
        shape = [1, tensor.dims[0], *[1] * (rank - 2)]
        del tensor.dims[:]
        tensor.dims.extend(shape)
        if source is not None:
            del source.attribute[:]
            source.attribute.append(helper.make_attribute("axis", 1))
        for layer in layers:
            result = layer.output[0]
            del layer.input[2:]
            layer.output[0] = claim_name(f"{result}_without_bias", names)
            sums[layer.output[0]] = helper.make_node(
                "Add", [layer.output[0], bias], [result], name=f"{result}_Add"
            )
    nodes = [own for node in graph.node for own in (node, sums.get(node.output[0])) if own is not None]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return len(sums)


def _rank_of_weight(
    node: Any, bias: str, stored: Mapping[str, Any], dequantized: Mapping[str, Any]
) -> int | None:
    """Returns the number of axes of a convolution's weight; None if ``bias`` is no bias of ``node``."""
    if node.op_type != "Conv" or list(node.input).index(bias) != 2:
        return None
    source = dequantized.get(node.input[1])
    weight = stored.get(node.input[1] if source is None else source.input[0])
    return None if weight is None else len(weight.dims)
