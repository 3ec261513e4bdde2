"""Rules on the biases of layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto, TensorProto

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import (
    LAYERS,
    IntegerGrid,
    Operand,
    QdqGraph,
    bias_grid,
    symmetric,
    type_name,
)

__all__ = ["accumulator_biases", "float_biases", "int8_biases", "int32_biases", "norm_biases"]


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
