"""Rules on the weights and biases of layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto, TensorProto

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import (
    FUNCTIONS,
    LAYERS,
    IntegerGrid,
    Operand,
    QdqGraph,
    bias_grid,
    channel_axis,
    symmetric,
    type_name,
)

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


def _biases(graph: QdqGraph) -> list[tuple[NodeProto, int, Operand, Operand, Operand]]:
    """Lists the layers with a constant bias: node, position of the bias, input, weight, bias."""
    rows = []
    for node, data, weight in graph.layers():
        index = LAYERS[node.op_type]
        bias = None if index is None else graph.operand(node, index)
        if index is not None and bias is not None and bias.values is not None:
            rows.append((node, index, data, weight, bias))
    return rows


def float_biases(source: str) -> ContractRule:
    """Biases are stored as floats."""

    def find(graph: QdqGraph) -> Violations:
        for node, index, _, _, bias in _biases(graph):
            if bias.dequantize is None:
                continue

            def repair(node: NodeProto = node, index: int = index, bias: Operand = bias) -> None:
                assert bias.values is not None
                graph.connect(node, index, graph.store(f"{bias.name}_float", bias.values))

            what = f"its bias passes a DequantizeLinear of {type_name(bias.dequantize.type)}"
            yield Violation(node, what, "store the bias as floats", repair)

    return ContractRule("float-biases", source, find)


def int32_biases(source: str) -> ContractRule:
    """The biases of layers on integers are int32, at the scale of the accumulator."""

    def find(graph: QdqGraph) -> Violations:
        for node, index, data, weight, bias in _biases(graph):
            is_int32 = bias.dequantize is not None and bias.dequantize.type == TensorProto.INT32
            if is_int32 or _wanted(data, weight, bias) is None:
                continue
            kind = "float" if bias.dequantize is None else type_name(bias.dequantize.type)
            repair = _at(graph, node, index, bias)
            yield Violation(
                node, f"its bias is {kind}", "store it as int32 at the scale of the accumulator", repair
            )

    return ContractRule("int32-biases", source, find)


def int8_biases(source: str) -> ContractRule:
    """The biases of layers on integers are symmetric int8 with one scale."""

    def find(graph: QdqGraph) -> Violations:
        for node, index, data, _, bias in _biases(graph):
            if data.dequantize is None or (
                bias.dequantize is not None and bias.dequantize.type == TensorProto.INT8
            ):
                continue

            def repair(node: NodeProto = node, index: int = index, bias: Operand = bias) -> None:
                assert bias.values is not None
                graph.set_stored(node, index, bias.values, symmetric(bias.values, TensorProto.INT8, None))

            kind = "float" if bias.dequantize is None else type_name(bias.dequantize.type)
            yield Violation(node, f"its bias is {kind}", "store it as int8 with one scale", repair)

    return ContractRule("int8-biases", source, find)


def accumulator_biases(source: str) -> ContractRule:
    """An int32 bias has the scales of the accumulator and zero points of 0."""

    def find(graph: QdqGraph) -> Violations:
        for node, index, data, weight, bias in _biases(graph):
            wanted = _wanted(data, weight, bias)
            if wanted is None or bias.dequantize is None or bias.dequantize.type != TensorProto.INT32:
                continue
            grid, zero_point = bias.dequantize.grid, bias.dequantize.zero_point
            if grid is None:
                continue
            if grid.scale.size != wanted.scale.size:
                what = f"its bias has {grid.scale.size} scales and its weight {wanted.scale.size}"
            elif not np.allclose(grid.scale.reshape(-1), wanted.scale.reshape(-1), rtol=1e-4, atol=0):
                what = "the scale of its bias is not that of its input times that of its weight"
            elif zero_point is not None and zero_point.any():
                what = "its bias has a zero point"
            else:
                continue
            cure = "store the bias at the scale of the accumulator, with zero points of 0"
            yield Violation(node, what, cure, _at(graph, node, index, bias))

    return ContractRule("accumulator-biases", source, find)


def _wanted(data: Operand, weight: Operand, bias: Operand) -> IntegerGrid | None:
    """Returns the grid of the bias of a layer on integers; None for others or if it does not fit."""
    if data.dequantize is None or weight.dequantize is None:
        return None
    first, second = data.dequantize.grid, weight.dequantize.grid
    if first is None or second is None or first.scale.size != 1:
        return None
    grid = bias_grid(first, second)
    return grid if bias.values is not None and grid.fits(bias.values) else None


def _at(graph: QdqGraph, node: NodeProto, index: int, bias: Operand) -> Callable[[], None]:
    """Returns the repair that stores a bias at the scale of the accumulator."""

    def repair() -> None:
        data, weight = graph.operand(node, 0), graph.operand(node, 1)
        assert data is not None
        assert weight is not None
        wanted = _wanted(data, weight, bias)
        assert bias.values is not None
        if wanted is not None:
            graph.set_stored(node, index, bias.values, wanted)

    return repair


def norm_biases(source: str) -> ContractRule:
    """The bias of a LayerNormalization has one scale."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes("LayerNormalization"):
            bias = graph.operand(node, 2)
            if bias is None or bias.dequantize is None or not bias.dequantize.per_channel:
                continue
            kind = bias.dequantize.type

            def repair(node: NodeProto = node, bias: Operand = bias, kind: int = kind) -> None:
                assert bias.values is not None
                graph.set_stored(node, 2, bias.values, symmetric(bias.values, kind, None))

            able = bias.values is not None and kind in (
                TensorProto.INT8,
                TensorProto.INT16,
                TensorProto.INT32,
            )
            what = "its bias has a scale per channel"
            yield Violation(node, what, "use one scale for the bias", repair if able else None)

    return ContractRule("norm-biases", source, find)
