"""Rules on the types and zero points of activations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto, TensorProto, helper

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import IntegerGrid, QdqGraph, Quantizer, type_name

__all__ = ["activation_types", "activations", "native_wide_types", "no_zero_points", "written_zero_points"]

_WIDE = (TensorProto.INT16, TensorProto.UINT16, TensorProto.INT4, TensorProto.UINT4)
_EIGHT_BITS = (TensorProto.INT8, TensorProto.UINT8)
_MICROSOFT = "com.microsoft"


def activations(graph: QdqGraph) -> list[Quantizer]:
    """Returns one quantizer for each rounding of a computed tensor: its QuantizeLinear."""
    return [q for q in map(graph.quantizer, graph.nodes("QuantizeLinear")) if not graph.is_stored(q)]


def _made_symmetric(graph: QdqGraph, quantizer: Quantizer, kind: int) -> Callable[[], None] | None:
    """Returns the repair that makes a tensor symmetric, of type ``kind``, with the range that it has.

    Integers around 128 are those around 0, less 128. Others get a scale that covers both ends.
    """
    nodes, grid = graph.partners(quantizer), quantizer.grid
    if nodes is None or grid is None or grid.scale.size > 1:
        return None

    def repair() -> None:
        low, high = (float(np.reshape(end, ())) for end in grid.ends)
        middle = grid.type == TensorProto.UINT8 and int(np.reshape(grid.zero_point, ())) == 128
        highest = IntegerGrid.BOUNDS[kind][1]
        scale = float(np.reshape(grid.scale, ())) if middle else max(-low, high) / highest
        graph.set_grid(nodes, IntegerGrid(np.array(scale), np.array(0), kind))

    return repair


def activation_types(source: str, *types: int) -> ContractRule:
    """Activations have one of ``types``. Other types of 8 bits become the first one, with the same range."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in activations(graph):
            if quantizer.type in types:
                continue
            names = " or ".join(map(type_name, types))
            eight = quantizer.type in _EIGHT_BITS
            repair = _made_symmetric(graph, quantizer, types[0]) if eight else None
            cure = f"write {names}" if repair else f"quantize the network again with {names} activations"
            yield Violation(quantizer.node, f"its integers are {type_name(quantizer.type)}", cure, repair)

    return ContractRule("activation-types", source, find)


def no_zero_points(source: str) -> ContractRule:
    """The zero points of signed activations are 0."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in activations(graph):
            zero_point = quantizer.zero_point
            if zero_point is None or quantizer.type not in (TensorProto.INT8, TensorProto.INT16):
                continue
            if np.any(zero_point):
                repair = _made_symmetric(graph, quantizer, quantizer.type)
                cure = "use a symmetric scale that covers both ends"
                yield Violation(quantizer.node, f"its zero point is {zero_point.flat[0]}", cure, repair)

    return ContractRule("zero-points-are-0", source, find)


def written_zero_points(source: str) -> ContractRule:
    """Each QuantizeLinear and DequantizeLinear names a zero point, as the type is read from it."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            if quantizer.has_zero_point or quantizer.scale is None:
                continue
            # ONNX reads uint8 in a QuantizeLinear without a zero point, TensorRT int8.
            stored = graph.value(quantizer.node.input[0]) if quantizer.node.op_type[0] == "D" else None
            zeros = np.zeros(quantizer.scale.shape, np.int8 if stored is None else stored.dtype)

            def repair(node: NodeProto = quantizer.node, zeros: np.ndarray = zeros) -> None:
                graph.connect(node, 2, graph.store(f"{node.input[1]}_zero_point", zeros))

            cure = f"write zero points of {zeros.dtype.name}"
            yield Violation(quantizer.node, "it has no zero point", cure, repair)

    return ContractRule("written-zero-points", source, find)


def native_wide_types(source: str) -> ContractRule:
    """Integers of 16 and 4 bits are ONNX's own from opset 21 on, and of com.microsoft below."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            if quantizer.type not in _WIDE or graph.opset >= 21 or quantizer.node.domain == _MICROSOFT:
                continue

            def repair(node: NodeProto = quantizer.node) -> None:
                node.domain = _MICROSOFT
                if all(entry.domain != _MICROSOFT for entry in graph.model.opset_import):
                    graph.model.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))

            what = f"opset {graph.opset} has no {type_name(quantizer.type)} there"
            cure = f"write it with the domain {_MICROSOFT}, or export with opset 21"
            yield Violation(quantizer.node, what, cure, repair)

    return ContractRule("wide-types", source, find)
