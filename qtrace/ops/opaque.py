"""Opaque nodes: what an ONNX file has and MegEngine lacks, kept as in the file and run by onnxruntime."""

from __future__ import annotations

from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    op = owner(expr)
    assert isinstance(op, OpaqueOp)
    inputs = tuple(node for node in expr.inputs[1:] if isinstance(node, TensorNode))
    floats = any(map(is_float_tensor, (*inputs, *expr.outputs)))
    role = Role.FLOAT if floats else Role.SHAPE
    return Reading(inputs, role=role, reason=f"kept as in the file: {op.operators}")


RULES = (
    op_rule("opaque", Role.FLOAT, _read, OpaqueOp, reason="kept as in the file, and run by onnxruntime"),
)
