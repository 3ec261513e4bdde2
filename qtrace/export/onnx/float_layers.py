"""Layers in float between roundings, which onnxruntime would put on integers.

onnxruntime rounds the float weight of a ``Conv``, ``ConvTranspose`` or ``Gemm`` to int8 by itself, with one
scale for all of it, where the layer reads dequantized values and its result is quantized at once
("WeightBiasQuantization", seen in 1.23): neither the placement nor the user wanted integers there. A
``LeakyRelu`` of slope 1 after the layer changes no value and keeps it in float. Where nothing else reads
the result, onnxruntime computes it in the kernel of a convolution or a ``Gemm``. A ``MatMul`` and the ``Add``
of a stored bias become a ``Gemm`` before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import helper

from qtrace.graph.names import unused_name
from qtrace.onnxfile.bodies import read_names
from qtrace.onnxfile.model import OnnxModel

__all__ = ["MOVES", "TARGETS", "hold_float_layers"]

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
    new = unused_name(f"{name}_float", names.__contains__)
    names.add(new)
    for reader in readers:
        for index, read in enumerate(reader.input):
            if read == name:
                reader.input[index] = new
    return helper.make_node("LeakyRelu", [name], [new], name=new, alpha=1.0)
