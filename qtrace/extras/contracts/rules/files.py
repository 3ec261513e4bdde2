"""Rules on the file as a whole: opset, domains, and ops that are no part of the QDQ form."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from qtrace.extras.contracts.base import ContractRule, Violation, Violations
from qtrace.extras.contracts.qdq_graph import QUANTIZERS, QdqGraph

__all__ = ["lowest_opset", "no_integer_ops", "no_other_domains"]

_OWN = ("", "ai.onnx")
_INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")


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
                kept = [e for e in graph.model.opset_import if e.domain != domain]
                copies = [type(e).FromString(e.SerializeToString()) for e in kept]
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
