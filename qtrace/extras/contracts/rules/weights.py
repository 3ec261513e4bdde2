"""Rules on the weights of layers."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import (
    FUNCTIONS,
    LAYERS,
    Operand,
    QdqGraph,
    channel_axis,
    symmetric,
    type_name,
)

__all__ = ["quantized_weights", "symmetric_weights", "weight_axis", "weight_bits", "weights_per_tensor"]

_WITH_AXIS = ("Conv", "ConvTranspose")


def _requantize(graph: QdqGraph, node: NodeProto, per_channel: bool) -> None:
    """Rounds the values of a layer's weight again, to symmetric int8."""
    weight = graph.operand(node, 1)
    assert weight is not None
    assert weight.values is not None
    axis = channel_axis(node) if per_channel else None
    values = weight.values
    graph.set_stored(node, 1, values, symmetric(values, TensorProto.INT8, axis))


def _has_channels(node: NodeProto, weight: Operand) -> bool:
    return weight.dequantize is not None and weight.dequantize.per_channel


def weight_axis(source: str) -> ContractRule:
    """The scales of a Conv's weight belong to axis 0, for a ConvTranspose to axis 1."""

    def find(graph: QdqGraph) -> Violations:
        for node, _, weight in graph.layers():
            if node.op_type not in _WITH_AXIS or not _has_channels(node, weight):
                continue
            assert weight.dequantize is not None
            axis, wanted = weight.dequantize.axis, channel_axis(node)
            assert weight.values is not None
            if axis % weight.values.ndim == wanted:
                continue

            def repair(node: NodeProto = node) -> None:
                _requantize(graph, node, True)

            what = f"the scales of its weight are on axis {axis}"
            yield Violation(node, what, f"use scales on axis {wanted}", repair)

    return ContractRule("weight-axis", source, find)


def weights_per_tensor(source: str, *kinds: str) -> ContractRule:
    """The weights of these ops have one scale."""

    def find(graph: QdqGraph) -> Violations:
        for node, _, weight in graph.layers():
            if node.op_type not in kinds or not _has_channels(node, weight):
                continue

            def repair(node: NodeProto = node) -> None:
                _requantize(graph, node, False)

            yield Violation(node, "its weight has a scale per channel", "use one scale for it", repair)

    return ContractRule("weights-per-tensor", source, find)


def quantized_weights(source: str, per_tensor: tuple[str, ...] = ()) -> ContractRule:
    """The weight of a layer is quantized if its input and result are, the input for such layers only.

    A float layer may read what others read as integers, and what a kernel before it gives as integers.

    Args:
        source: the document.
        per_tensor: the ops whose weight gets one scale in a repair; others get one per channel.
    """

    def find(graph: QdqGraph) -> Violations:
        for node, data, weight in graph.layers():
            if data.dequantize is None or weight.dequantize is not None or not _is_rounded(graph, node):
                continue
            readers = graph.readers.get(data.name, [])
            if any(not _is_half_quantized(graph, reader) for reader in readers):
                continue

            def repair(node: NodeProto = node) -> None:
                _requantize(graph, node, node.op_type not in per_tensor)

            yield Violation(node, "its input is quantized and its weight is float", "quantize both", repair)

    return ContractRule("quantized-weights", source, find)


def _is_rounded(graph: QdqGraph, node: NodeProto) -> bool:
    """Whether all that reads the result of a node, or of the function after it, are QuantizeLinear nodes."""
    readers = graph.readers.get(node.output[0], [])
    if len(readers) == 1 and readers[0].op_type in FUNCTIONS:
        return _is_rounded(graph, readers[0])
    inside = bool(readers) and node.output[0] not in graph.output_names
    return inside and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _is_half_quantized(graph: QdqGraph, node: NodeProto) -> bool:
    """Whether a node is a layer with quantized input and a float weight."""
    weight = graph.operand(node, 1) if node.op_type in LAYERS else None
    return weight is not None and weight.dequantize is None and weight.values is not None


def symmetric_weights(source: str, unsigned: bool = False) -> ContractRule:
    """Weights are symmetric int8.

    Args:
        source: the document.
        unsigned: whether unsigned weights are allowed, with any zero point.
    """

    def find(graph: QdqGraph) -> Violations:
        for node, _, weight in graph.layers():
            quantizer = weight.dequantize
            if quantizer is None or quantizer.grid is None:
                continue
            signed = quantizer.type in (TensorProto.INT8, TensorProto.INT4, TensorProto.INT16)
            shifted = bool(np.any(quantizer.grid.zero_point))
            if (signed and not shifted) or (unsigned and not signed):
                continue

            def repair(node: NodeProto = node, channels: bool = _has_channels(node, weight)) -> None:
                _requantize(graph, node, channels)

            what = f"its weight is {type_name(quantizer.type)}" + (" with a zero point" if shifted else "")
            yield Violation(node, what, "use int8 with zero points of 0", repair)

    return ContractRule("symmetric-weights", source, find)


def weight_bits(source: str, *kinds: str) -> ContractRule:
    """The weights of these ops have at most 8 bits."""

    def find(graph: QdqGraph) -> Violations:
        for node, _, weight in graph.layers():
            wide = (TensorProto.INT16, TensorProto.UINT16)
            if node.op_type not in kinds or weight.dequantize is None or weight.dequantize.type not in wide:
                continue

            def repair(node: NodeProto = node, channels: bool = _has_channels(node, weight)) -> None:
                _requantize(graph, node, channels)

            what = f"its weight is {type_name(weight.dequantize.type)}"
            yield Violation(node, what, "use 8 bits for the weight", repair)

    return ContractRule("weight-bits", source, find)
