"""Rules on types, scales and zero points: constant, positive, of fitting lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto, TensorProto, helper

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import IntegerGrid, QdqGraph, Quantizer, type_name

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


def constant_scales(source: str) -> ContractRule:
    """Scales and zero points are constants."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            computed = quantizer.scale is None or (quantizer.has_zero_point and quantizer.zero_point is None)
            if computed:
                cure = "store scale and zero point as initializers"
                yield Violation(quantizer.node, "its scale or zero point is computed", cure)

    return ContractRule("constant-scales", source, find)


def positive_scales(source: str) -> ContractRule:
    """Scales are finite and greater than 0."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            scale = quantizer.scale
            if scale is not None and not (np.isfinite(scale).all() and (scale > 0).all()):
                yield Violation(quantizer.node, "a scale is not greater than 0", "calibrate the tensor again")

    return ContractRule("positive-scales", source, find)


def matching_lengths(source: str) -> ContractRule:
    """Scale and zero point have equally many elements."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            scale, zero_point = quantizer.scale, quantizer.zero_point
            if scale is None or zero_point is None or scale.size == zero_point.size:
                continue
            what = f"it has {scale.size} scales and {zero_point.size} zero points"
            same = zero_point.size > 0 and (zero_point == zero_point.flat[0]).all()

            def repair(
                node: NodeProto = quantizer.node, scale: np.ndarray = scale, zero: np.ndarray = zero_point
            ) -> None:
                value = np.full(scale.shape, zero.flat[0], zero.dtype)
                graph.connect(node, 2, graph.store(node.input[2], value))

            yield Violation(
                quantizer.node, what, "write one zero point for each scale", repair if same else None
            )

    return ContractRule("matching-lengths", source, find)


def fitting_scales(source: str) -> ContractRule:
    """Several scales are as many as the axis that they belong to has channels; read from stored tensors."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            value = graph.value(quantizer.node.input[0])
            if value is None or quantizer.scale is None or quantizer.scale.size < 2:
                continue
            axis = quantizer.axis
            if not -value.ndim <= axis < value.ndim:
                what = f"its axis {axis} is none of a tensor of {value.ndim} axes"
            elif value.shape[axis] != quantizer.scale.size:
                what = f"it has {quantizer.scale.size} scales for {value.shape[axis]} channels on axis {axis}"
            else:
                continue
            yield Violation(quantizer.node, what, "correct the axis, or write a scale for each channel")

    return ContractRule("fitting-scales", source, find)


def no_needless_axis(source: str) -> ContractRule:
    """A quantizer with one scale is without an axis, and its scale, too."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            grid, node = quantizer.grid, quantizer.node
            if grid is None or grid.scale.size != 1 or not any(a.name == "axis" for a in node.attribute):
                continue

            def repair(node: NodeProto = node) -> None:
                remaining = [a for a in node.attribute if a.name != "axis"]
                del node.attribute[:]
                node.attribute.extend(remaining)

            what = "it has one scale and the attribute axis"
            yield Violation(node, what, "leave the attribute out", repair)

    return ContractRule("no-needless-axis", source, find)


def one_scale_per_activation(source: str) -> ContractRule:
    """Activations have one scale for the tensor."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in activations(graph):
            if quantizer.per_channel:
                cure = "use one scale, which covers the widest channel"
                yield Violation(quantizer.node, "it has a scale per channel", cure, _widest(graph, quantizer))

    return ContractRule("one-scale-per-activation", source, find)


def _widest(graph: QdqGraph, quantizer: Quantizer) -> Callable[[], None] | None:
    """Returns the repair that gives a tensor the range of its widest channel; None if it lacks a grid."""
    nodes, grid = graph.partners(quantizer), quantizer.grid
    if nodes is None or grid is None:
        return None

    def repair() -> None:
        lows, highs = grid.ends
        graph.set_grid(nodes, covering(float(lows.min()), float(highs.max()), grid))

    return repair


def covering(low: float, high: float, like: IntegerGrid) -> IntegerGrid:
    """Returns a grid of one scale over a range; symmetric around 0 if ``like`` is."""
    lowest, highest = IntegerGrid.BOUNDS[like.type]
    if lowest < 0 and not like.zero_point.any():
        return IntegerGrid(np.array(max(-low, high) / highest), np.array(0), like.type)
    scale = np.float64(np.float32((high - low) / (highest - lowest)))
    zero_point = np.clip(np.rint(lowest - low / scale), lowest, highest)
    return IntegerGrid(np.array(scale), np.array(int(zero_point)), like.type)


def power_of_two_scales(source: str) -> ContractRule:
    """Scales are powers of two. Others become the next larger one, so that nothing clips."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in graph.quantizers():
            grid, node = quantizer.grid, quantizer.node
            if grid is None or (np.frexp(grid.scale)[0] == 0.5).all():
                continue
            producer = graph.producers.get(node.input[0])
            if producer is not None and producer.op_type == "QuantizeLinear":
                continue  # its QuantizeLinear stands for both
            nodes, value = graph.partners(quantizer), graph.value(node.input[0])
            what = f"its scale {float(grid.scale.flat[0]):.4g} is no power of two"
            stored = node.op_type == "DequantizeLinear"
            able = nodes is not None and (not stored or (value is not None and grid.fits(value)))

            def repair(
                node: NodeProto = node,
                nodes: list[NodeProto] | None = nodes,
                grid: IntegerGrid = grid,
                integers: np.ndarray | None = value if stored else None,
            ) -> None:
                assert nodes is not None
                scale = np.exp2(np.ceil(np.log2(grid.scale)))
                wanted = IntegerGrid(scale, grid.zero_point, grid.type, grid.axis)
                if integers is not None:
                    rounded = wanted.stored(wanted.quantize(grid.dequantize(integers)))
                    node.input[0] = graph.store(node.input[0], rounded)
                graph.set_grid(nodes, wanted)

            yield Violation(node, what, "use the next larger power of two", repair if able else None)

    return ContractRule("power-of-two-scales", source, find)


def smallest_range(source: str, smallest: float) -> ContractRule:
    """The range of an activation is at least ``smallest``."""

    def find(graph: QdqGraph) -> Violations:
        for quantizer in activations(graph):
            nodes, grid = graph.partners(quantizer), quantizer.grid
            if grid is None or grid.scale.size != 1:
                continue
            low, high = (float(np.reshape(end, ())) for end in grid.ends)
            # A float32 scale may be a little below the quotient that it was rounded from.
            if high - low >= smallest * (1 - 1e-6):
                continue

            def repair(
                nodes: list[NodeProto] | None = nodes,
                grid: IntegerGrid = grid,
                factor: float = smallest / (high - low),
            ) -> None:
                assert nodes is not None
                graph.set_grid(nodes, IntegerGrid(grid.scale * factor, grid.zero_point, grid.type, grid.axis))

            what = f"its range is {high - low:.2g}"
            yield Violation(quantizer.node, what, f"widen it to {smallest:g}", repair if nodes else None)

    return ContractRule("smallest-range", source, find)


ONNX_OPERATORS = "ONNX operators, QuantizeLinear and DequantizeLinear"
"""The standard that all targets share."""


def scale_rules(standard: str, device: str) -> tuple[ContractRule, ...]:
    """Returns the rules on scales that every target has, with the documents that they come from."""
    return (
        matching_lengths(standard),
        constant_scales(device),
        positive_scales(standard),
        fitting_scales(standard),
    )
