"""Rules on the file as a whole, and on where tensors are rounded: before sums and joins, after layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import (
    FUNCTIONS,
    QUANTIZERS,
    IntegerGrid,
    Operand,
    QdqGraph,
    label,
    type_name,
)
from qtrace.extras.contracts.quantizer_rules import covering

_CONVS = ("Conv", "ConvTranspose")
_BITS: dict[int, int] = {
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT16: 16,
    TensorProto.UINT16: 16,
}

_OWN = ("", "ai.onnx")
_INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")


def _layer_before(graph: QdqGraph, name: str) -> NodeProto | None:
    """Returns the convolution that gives a tensor, directly or through norm and function; else None."""
    node = graph.producers.get(name)
    while node is not None and node.op_type not in _CONVS:
        if node.op_type == "Mul":  # a function times its own input, as SiLU has it
            factors = [graph.producers.get(i) for i in node.input]
            gates = [f for f in factors if f is not None and f.op_type in ("Sigmoid", "HardSigmoid")]
            if len(gates) != 1 or gates[0].input[0] not in node.input:
                return None
            node = graph.producers.get(gates[0].input[0])
        elif node.op_type in (*FUNCTIONS, "BatchNormalization"):
            node = graph.producers.get(node.input[0])
        else:
            return None
    return node


def _is_quantized(graph: QdqGraph, node: NodeProto) -> bool:
    data = graph.operand(node, 0)
    return data is not None and data.dequantize is not None


def unrounded_summands(source: str) -> ContractRule:
    """A sum adds the result of a convolution before it is rounded; only its other input is rounded."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes("Add"):
            operands = [graph.operand(node, index) for index in range(2)]
            sides = [_rounded_side(graph, operand) for operand in operands]
            if not any(sides) or any(o is None or o.dequantize is None for o in operands):
                continue
            index = next(i for i, side in enumerate(sides) if side)
            layer, unrounded = sides[index] or (node, "")

            def repair(node: NodeProto = node, index: int = index, name: str = unrounded) -> None:
                graph.connect(node, index, name)

            what = f"it reads the result of {label(layer)} rounded, which keeps both from being one kernel"
            yield Violation(node, what, "round only the other input", repair)

    return ContractRule("unrounded-summands", source, find)


def _rounded_side(graph: QdqGraph, operand: Operand | None) -> tuple[NodeProto, str] | None:
    """Returns the convolution on integers whose result only this sum reads, rounded, and its float tensor."""
    if operand is None or operand.dequantize is None or operand.quantize is None:
        return None
    unrounded, integers = operand.quantize.node.input[0], operand.quantize.node.output[0]
    alone = all(graph.only_reader(name) is not None for name in (operand.name, integers, unrounded))
    layer = _layer_before(graph, unrounded)
    return (layer, unrounded) if alone and layer is not None and _is_quantized(graph, layer) else None


def unrounded_functions(source: str) -> ContractRule:
    """Nothing is rounded between a layer and the function after it."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(*FUNCTIONS):
            operand = graph.operand(node, 0)
            if operand is None or operand.quantize is None:
                continue
            unrounded, integers = operand.quantize.node.input[0], operand.quantize.node.output[0]
            layer = graph.producers.get(unrounded)
            alone = all(graph.only_reader(n) is not None for n in (operand.name, integers, unrounded))
            kinds = (*_CONVS, "Gemm", "MatMul", "Add")
            if layer is None or layer.op_type not in kinds or not alone or not _is_quantized(graph, layer):
                continue

            def repair(node: NodeProto = node, name: str = unrounded) -> None:
                graph.connect(node, 0, name)

            what = f"it reads the result of {label(layer)} rounded, so that it is no part of its kernel"
            yield Violation(node, what, "round behind the function only", repair)

    return ContractRule("unrounded-functions", source, find)


def shared_scales(source: str) -> ContractRule:
    """The inputs of a concatenation share scale and zero point."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes("Concat"):
            operands = [graph.operand(node, index) for index in range(len(node.input))]
            quantizers = [o.dequantize for o in operands if o is not None and o.dequantize is not None]
            grids = [q.grid for q in quantizers]
            known = [g for g in grids if g is not None and g.scale.size == 1]
            if len(known) < len(node.input) or len({(g.type, *_numbers(g)) for g in known}) == 1:
                continue
            groups = [graph.partners(q) for q in quantizers]
            able = None not in groups and len({g.type for g in known}) == 1

            def repair(node: NodeProto = node) -> None:
                _share(graph, node)

            cure = "give all inputs the widest of their ranges"
            yield Violation(node, "its inputs have different scales", cure, repair if able else None)

    return ContractRule("shared-scales", source, find)


def _numbers(grid: IntegerGrid) -> tuple[float, int]:
    return float(np.float32(grid.scale.reshape(()))), int(grid.zero_point.reshape(()))


def _share(graph: QdqGraph, node: NodeProto) -> None:
    """Gives all inputs of a concatenation one grid, which covers the range of each."""
    operands = [graph.operand(node, index) for index in range(len(node.input))]
    quantizers = [o.dequantize for o in operands if o is not None and o.dequantize is not None]
    grids = [q.grid for q in quantizers if q.grid is not None]
    ends = [tuple(float(np.reshape(end, ())) for end in grid.ends) for grid in grids]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    shifted = [grid for grid in grids if grid.zero_point.any()]
    shared = covering(low, high, (shifted or grids)[0])
    if not shifted:  # symmetric: the widest scale itself, without a rounding of its own
        shared = max(grids, key=lambda grid: float(grid.scale.reshape(())))
    for operand, quantizer in zip(operands, quantizers, strict=True):
        nodes = graph.partners(quantizer)
        assert operand is not None
        assert nodes is not None
        if quantizer.node.input[0] in graph.stored and operand.values is not None:
            index = list(node.input).index(operand.name)
            graph.set_stored(node, index, operand.values, shared)
        else:
            graph.set_grid(nodes, shared)


def both_inputs_quantized(source: str, *kinds: str) -> ContractRule:
    """An elementwise op whose result is rounded has two quantized inputs, or none.

    A computed divisor may stay float: a small one would round to zero.
    """

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(*kinds):
            operands = [graph.operand(node, index) for index in range(2)]
            floats = [o for o in operands if o is not None and o.dequantize is None]
            if len(floats) != 1 or _adds_bias(graph, node) or not _is_rounded(graph, node.output[0]):
                continue
            if node.op_type == "Div" and floats[0] is operands[1] and floats[0].values is None:
                continue
            what = f"one input is quantized, and {floats[0].name} is float"
            yield Violation(node, what, "quantize both inputs, or none")

    return ContractRule("both-inputs", source, find)


def _is_rounded(graph: QdqGraph, name: str) -> bool:
    """Whether only QuantizeLinear nodes read a tensor, after a clamp."""
    readers = graph.readers.get(name, [])
    if len(readers) == 1 and readers[0].op_type in ("Relu", "Clip"):
        return _is_rounded(graph, readers[0].output[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _adds_bias(graph: QdqGraph, node: NodeProto) -> bool:
    """Whether a node adds the bias of a product."""
    sources = [graph.producers.get(name) for name in node.input]
    return any(s is not None and s.op_type in ("MatMul", "Gemm") for s in sources)


def equal_types(source: str, *kinds: str) -> ContractRule:
    """The inputs of an elementwise op have one type."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(*kinds):
            types = [o.dequantize.type for o in _operands(graph, node) if o.dequantize is not None]
            if len(types) == 2 and len(set(types)) == 2 and TensorProto.INT32 not in types:
                names = " and ".join(map(type_name, types))
                cure = "quantize both to one type, or convert one by a second pair of Q and DQ"
                yield Violation(node, f"its inputs are {names}", cure)

    return ContractRule("equal-types", source, find)


def _operands(graph: QdqGraph, node: NodeProto) -> Iterator[Operand]:
    return (o for i in range(len(node.input)) if (o := graph.operand(node, i)) is not None)


def equal_widths(source: str) -> ContractRule:
    """The input and the result of a convolution have one width."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(*_CONVS):
            data, follower = graph.operand(node, 0), graph.only_reader(node.output[0])
            while follower is not None and follower.op_type in FUNCTIONS:
                follower = graph.only_reader(follower.output[0])
            if data is None or data.dequantize is None or follower is None:
                continue
            if follower.op_type != "QuantizeLinear":
                continue
            types = data.dequantize.type, graph.quantizer(follower).type
            widths = [_BITS.get(kind, 0) for kind in types]
            if 0 not in widths and widths[0] != widths[1]:
                what = f"its input is {type_name(types[0])} and its result {type_name(types[1])}"
                cure = "use one width, or convert behind it by a second pair of Q and DQ"
                yield Violation(node, what, cure)

    return ContractRule("equal-widths", source, find)


def fixed_outputs(source: str, op: str, grids: dict[int, tuple[float, int]]) -> ContractRule:
    """The result of a function has a fixed grid.

    Args:
        source: the document.
        op: the type of the function.
        grids: type of integers -> scale and zero point.
    """

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(op):
            for reader in graph.readers.get(node.output[0], []):
                if reader.op_type != "QuantizeLinear":
                    continue
                quantizer = graph.quantizer(reader)
                grid, wanted = quantizer.grid, grids.get(quantizer.type)
                if grid is None or wanted is None or grid.scale.size != 1:
                    continue
                if np.isclose(float(grid.scale.reshape(())), wanted[0], rtol=1e-6, atol=0) and (
                    int(grid.zero_point.reshape(())) == wanted[1]
                ):
                    continue
                nodes = graph.partners(quantizer)
                scale = f"1/{round(1 / wanted[0])}"
                kind = type_name(quantizer.type)
                what = f"its {kind} result has another scale or zero point than {scale} and {wanted[1]}"
                cure = f"use scale {scale} and zero point {wanted[1]}"
                repair = _setting(
                    graph, nodes, IntegerGrid(np.array(wanted[0]), np.array(wanted[1]), quantizer.type)
                )
                yield Violation(node, what, cure, repair)

    return ContractRule(f"fixed-{op.lower()}", source, find)


def _setting(graph: QdqGraph, nodes: list[NodeProto] | None, grid: IntegerGrid) -> Callable[[], None] | None:
    """Returns the repair that gives ``nodes`` a grid; None where they are not to be changed."""
    if nodes is None:
        return None
    return lambda: graph.set_grid(nodes, grid)


def lowest_opset(source: str, lowest: int) -> ContractRule:
    """The opset is at least ``lowest``."""

    def find(graph: QdqGraph) -> Violations:
        if graph.opset < lowest:
            yield Violation(None, f"its opset is {graph.opset}", f"export it with opset {lowest} or higher")

    return ContractRule("opset", source, find)


def no_other_domains(source: str) -> ContractRule:
    """All nodes are ONNX's own, and the file imports no other operators."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes():
            if node.domain in _OWN:
                continue
            narrow = (TensorProto.INT8, TensorProto.UINT8)
            movable = node.op_type in QUANTIZERS and graph.quantizer(node).type in narrow

            def repair(node: NodeProto = node) -> None:
                node.domain = ""

            cure = "use ONNX's own node" if movable else "write it with ONNX's own ops"
            yield Violation(node, f"it is of the domain {node.domain}", cure, repair if movable else None)
        used = {node.domain for node in graph.nodes()}
        for entry in graph.model.opset_import:
            if entry.domain in (*_OWN, *used):
                continue

            def remove(domain: str = entry.domain) -> None:
                remaining = [e for e in graph.model.opset_import if e.domain != domain]
                copies = [type(e).FromString(e.SerializeToString()) for e in remaining]
                del graph.model.opset_import[:]
                graph.model.opset_import.extend(copies)

            what = f"it imports the domain {entry.domain}, which no node needs"
            yield Violation(None, what, "leave the import out", remove)

    return ContractRule("no-other-domains", source, find)


def no_integer_ops(source: str) -> ContractRule:
    """Integers are written as pairs of QuantizeLinear and DequantizeLinear around float ops."""

    def find(graph: QdqGraph) -> Violations:
        for node in graph.nodes(*_INTEGER_OPS):
            what = f"{node.op_type} is no part of the QDQ form"
            yield Violation(node, what, "write the float op between DequantizeLinear and QuantizeLinear")
        for node in graph.nodes():
            if node.op_type.startswith("QLinear") and node.op_type not in _INTEGER_OPS:
                what = f"{node.op_type} is no part of the QDQ form"
                yield Violation(node, what, "write the float op between DequantizeLinear and QuantizeLinear")

    return ContractRule("qdq-form", source, find)
