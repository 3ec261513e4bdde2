"""A ``LeakyRelu`` of slope 1 after layers, which keeps runtimes from changing what these compute.

Layers in float between roundings, which onnxruntime would put on integers.

onnxruntime rounds the float weight of a ``Conv``, ``ConvTranspose`` or ``Gemm`` to int8 by itself, with one
scale for all of it. It does so where the layer reads dequantized values and its result is quantized at once
("WeightBiasQuantization", seen in 1.23). Neither the placement nor the user wanted integers there. A
``LeakyRelu`` of slope 1 after the layer changes no value and keeps it in float. Where nothing else reads
the result, onnxruntime computes it in the kernel of a convolution or a ``Gemm``. A ``MatMul`` and the ``Add``
of a stored bias become a ``Gemm`` before.

Convolutions on integers whose result two ops read in float, which OpenVINO would compute as 0.

OpenVINO (2026.4.1) moves the scale after a convolution on integers towards the next rounding. Where the
sizes of a file are open, the convolution lacks a bias, and two ops read its result, one of them up to a
rounding, that one reads 0 everywhere. A bias of zeros is left out before, and a product or a sum with a
constant moves along. A ``LeakyRelu`` of slope 1 changes no value, is part of the convolution's kernel, and
keeps the scale where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from qtrace.export.onnx.naming import claim_name
from qtrace.onnxfile.bodies import read_names
from qtrace.onnxfile.model import OnnxModel

__all__ = ["MOVES", "OPENVINO_TARGETS", "TARGETS", "hold_float_layers", "hold_forked_layers"]

TARGETS = ("onnxruntime", "generic", "qnn", "ryzenai", "ryzenai_xint8")
"""The backends whose files onnxruntime opens."""
_LAYERS = ("Conv", "ConvTranspose", "Gemm")
MOVES = {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Identity", "MaxPool", "Gather"),
    "Split",
}
"""What onnxruntime moves roundings across, or leaves out."""
_MERGED = {*MOVES, "Relu", "Clip", "Add", "Sub", "Mul", "Div", "BatchNormalization", "Dropout", "Cast"}
"""What onnxruntime merges into a layer or a rounding after it, leaves out, or moves roundings across."""
_IN_FRONT = {*_MERGED, "Pad"}
"""What may vanish between a DequantizeLinear and a layer."""


def hold_float_layers(model: Any) -> int:
    """Keeps layers with float weights in float where onnxruntime would round their weights.

    Args:
        model: an ONNX model with its tensors; it is changed in place.

    Returns:
        The number of layers.
    """
    index = OnnxModel(model)
    graph, readers, names = index.graph, index.readers, index.names()
    stored = _constants(index)
    held = {}
    for node in graph.node:
        last = _last_node(node, readers, stored)
        if last is not None and _reads_rounded(node, index.producers, stored) and _is_rounded(last, readers):
            held[id(last)] = _hold(last, readers.get(last.output[0], ()), names)
    if held:
        nodes = [each for node in graph.node for each in (node, held.get(id(node))) if each is not None]
        del graph.node[:]
        graph.node.extend(nodes)
    return len(held)


def _constants(index: OnnxModel) -> set[str]:
    """Returns the names of tensors that depend on no input and that no DequantizeLinear gives."""
    stored = set(index.stored)
    for node in index.graph.node:
        if node.op_type != "DequantizeLinear" and all(name in stored for name in read_names(node)):
            stored.update(node.output)
    return stored


def _last_node(node: Any, readers: Mapping[str, list[Any]], stored: set[str]) -> Any:
    """Returns the node that gives the result of a layer with a float weight; None where there is none."""
    if node.op_type in _LAYERS and node.input[1] in stored:
        return node
    if node.op_type == "MatMul" and node.input[1] in stored:
        adds = [n for n in readers.get(node.output[0], ()) if n.op_type == "Add"]
        return next((n for n in adds if not stored.isdisjoint(n.input)), None)
    return None


def _reads_rounded(layer: Any, producers: Mapping[str, Any], stored: set[str]) -> bool:
    """Whether a layer reads dequantized values, at once or through what moves them or may vanish."""
    node = producers.get(layer.input[0])
    while node is not None and node.op_type in _IN_FRONT:
        computed = [name for name in node.input if name and name not in stored]
        node = producers.get(computed[0]) if len(computed) == 1 else None
    return node is not None and node.op_type == "DequantizeLinear"


def _is_rounded(layer: Any, readers: Mapping[str, list[Any]]) -> bool:
    """Whether a reader of a layer's result quantizes it, at once or after what merges with one of them."""
    waiting, seen = [layer.output[0]], {layer.output[0]}
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            if node.op_type == "QuantizeLinear":
                return True
            if node.op_type in _MERGED:
                new = [output for output in node.output if output not in seen]
                seen.update(new)
                waiting += new
    return False


def _hold(layer: Any, readers: Iterable[Any], names: set[str]) -> Any:
    """Lets the readers of a layer's result read a copy, and returns the node that makes it."""
    name = layer.output[0]
    new = claim_name(f"{name}_float", names)
    for reader in readers:
        for index, read in enumerate(reader.input):
            if read == name:
                reader.input[index] = new
    return helper.make_node("LeakyRelu", [name], [new], name=new, alpha=1.0)


OPENVINO_TARGETS = ("openvino",)
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
            node.output[0] = claim_name(f"{name}_held", names)
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
