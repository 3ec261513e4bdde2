"""Convolutions on integers whose result two ops read in float, which OpenVINO would compute as 0.

OpenVINO (2026.4.1) moves the scale after a convolution on integers towards the next rounding. Where the
sizes of a file are open, the convolution lacks a bias, and two ops read its result, one of them up to a
rounding, that one reads 0 everywhere. A bias of zeros is left out before, and a product or a sum with a
constant moves along. A ``LeakyRelu`` of slope 1 changes no value, is part of the convolution's kernel, and
keeps the scale where it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from qtrace.graph.names import unused_name
from qtrace.onnxfile.model import OnnxModel

__all__ = ["TARGETS", "hold_forked_layers"]

TARGETS = ("openvino",)
"""The backends whose files OpenVINO opens."""
_MOVED_ALONG = ("Add", "Sub", "Mul", "Div", "Identity")


def hold_forked_layers(model: Any) -> int:
    """Lets the readers of convolutions without bias read a ``LeakyRelu`` of slope 1, where they are several.

    Args:
        model: an ONNX model with its tensors; it is changed in place.

    Returns:
        The number of convolutions.
    """
    if not any(_is_open(value) for value in model.graph.input):
        return 0
    index = OnnxModel(model)
    graph, names = index.graph, index.names()
    nodes, count = [], 0
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Conv" and _is_on_integers(node, index) and _forks(node.output[0], index):
            name = node.output[0]
            node.output[0] = unused_name(f"{name}_held", names.__contains__)
            names.add(node.output[0])
            nodes.append(
                helper.make_node("LeakyRelu", [node.output[0]], [name], name=node.output[0], alpha=1.0)
            )
            count += 1
    if count:
        del graph.node[:]
        graph.node.extend(nodes)
    return count


def _is_open(value: Any) -> bool:
    """Whether a size of an input is open."""
    return any(not size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)


def _is_on_integers(layer: Any, index: OnnxModel) -> bool:
    """Whether a convolution reads dequantized values and weights, and adds nothing."""
    read = (index.producers.get(name) for name in layer.input[:2])
    if any(node is None or node.op_type != "DequantizeLinear" for node in read):
        return False
    return len(layer.input) < 3 or not layer.input[2] or _is_zero(layer.input[2], index)


def _is_zero(name: str, index: OnnxModel) -> bool:
    """Whether a bias is 0 everywhere."""
    rounding = index.producers.get(name)
    if rounding is not None and rounding.op_type == "DequantizeLinear":
        name = rounding.input[0]
    return name in index.stored and not np.any(numpy_helper.to_array(index.stored[name]))


def _forks(name: str, index: OnnxModel) -> bool:
    """Whether several ops read a value, as it is or after a product or a sum with a constant."""
    while True:
        readers = index.readers.get(name, [])
        if len(readers) + (name in index.output_names) != 1:
            return len(readers) > 0
        if not readers or readers[0].op_type not in _MOVED_ALONG:
            return False
        others = [other for other in readers[0].input if other != name]
        if any(other not in index.stored for other in others):
            return False
        name = readers[0].output[0]
