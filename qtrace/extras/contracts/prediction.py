"""Predicts which ops of a file a target computes in float."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import NodeProto

from qtrace.extras.contracts.base import CPU, Contract, FloatOp
from qtrace.extras.contracts.qdq_graph import QUANTIZERS, QdqGraph
from qtrace.onnxfile.bodies import read_names

__all__ = ["conversions", "predict_floats"]

# Ops that move values or compute shapes: they run on what they get.
_MOVES = (
    "Reshape Transpose Flatten Squeeze Unsqueeze Slice Split Gather GatherElements GatherND Pad Expand Tile "
    "Identity Cast Shape Constant ConstantOfShape Range Concat Where Equal Less Greater Not And Or NonZero "
    "MaxPool DepthToSpace SpaceToDepth Size Dropout ScatterElements ScatterND Compress OneHot Floor"
)


def predict_floats(graph: QdqGraph, contract: Contract, broken: Mapping[str, str]) -> list[FloatOp]:
    """Lists the ops that compute in float, in the order of the graph.

    Args:
        graph: the graph.
        contract: the contract of the target.
        broken: first output of a node that breaks a rule -> the name of the rule.
    """
    floats = []
    for node in graph.nodes():
        if node.op_type in QUANTIZERS or not node.output:
            continue
        if not any(name not in graph.stored for name in read_names(node)):
            continue  # it is computed from constants
        place = contract.place_of_floats(node.op_type)
        if node.op_type in _MOVES.split():
            # What moves values runs on what it gets, unless the device lacks the op.
            reason = "" if contract.device_ops is None or place != CPU else f"{contract.title} has no such op"
        else:
            reason = broken.get(node.output[0]) or _reason(graph, contract, node)
        if reason:
            floats.append(FloatOp(node.name or node.output[0], node.op_type, reason, place))
    return floats


def _reason(graph: QdqGraph, contract: Contract, node: NodeProto) -> str:
    """Explains why a node computes in float; "" if it does not, or is part of the kernel before it."""
    if node.op_type in contract.fused and _reads_kernel(graph, contract, node):
        return ""
    if node.op_type not in contract.ops:
        return f"{contract.title} computes {node.op_type} in float"
    count = (
        2 if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div") else 1
    )
    operands = [graph.operand(node, index) for index in range(count)]
    floats = [o.name for o in operands if o is not None and o.dequantize is None]
    if floats:
        return f"it reads {floats[0]} in float"
    if node.op_type in contract.rounds_results and not _is_rounded(graph, contract, node):
        return "its result is not rounded"
    return ""


def _reads_kernel(graph: QdqGraph, contract: Contract, node: NodeProto) -> bool:
    """Whether a node directly follows an op on integers, or another one in the kernel of such an op."""
    for name in node.input:
        producer = graph.producers.get(name)
        if producer is None or producer.op_type in QUANTIZERS:
            continue
        first = graph.operand(producer, 0)
        if producer.op_type in contract.ops and first is not None and first.dequantize is not None:
            return True
        if producer.op_type in contract.fused and _reads_kernel(graph, contract, producer):
            return True
    return False


def _is_rounded(graph: QdqGraph, contract: Contract, node: NodeProto) -> bool:
    """Whether all that reads the result, after the functions of its kernel, are QuantizeLinear nodes."""
    name = node.output[0]
    readers = graph.readers.get(name, [])
    if not readers or name in graph.output_names:
        return False
    if len(readers) == 1 and readers[0].op_type in contract.fused:
        return _is_rounded(graph, contract, readers[0])
    return all(reader.op_type == "QuantizeLinear" for reader in readers)


def conversions(graph: QdqGraph) -> list[NodeProto]:
    """Returns where a tensor is rounded again to integers of another width, such as 16 bits to 8.

    A device computes each of these QuantizeLinear as an op of its own.
    """
    sources = ((node, graph.producers.get(node.input[0])) for node in graph.nodes("QuantizeLinear"))
    return [
        node
        for node, source in sources
        if source is not None
        and source.op_type == "DequantizeLinear"
        and graph.type_of(source.input[0]) != graph.type_of(node.output[0])
    ]
