"""Ops that stay in float.

These are losses, which occur where a training graph was traced. Linear algebra beyond products, and complex
numbers. Roundings by the range of each batch, which `prepare` puts before layers with method: dynamic. And
opaque nodes: what an ONNX file has and MegEngine lacks, kept as in the file and run by onnxruntime.
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor, owner, tensor_inputs
from qtrace.ops.arguments import children
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    return Reading(children((expr.args, expr.kwargs)))


def _read_rounding(expr: Expr) -> Reading:
    return Reading((expr.inputs[1],))


def _read_opaque(expr: Expr) -> Reading:
    op = owner(expr)
    assert isinstance(op, OpaqueOp)
    inputs = tuple(tensor_inputs(expr))
    floats = any(map(is_float_tensor, (*inputs, *expr.outputs)))
    role = Role.FLOAT if floats else Role.SHAPE
    return Reading(inputs, role=role, reason=f"kept as in the file: {op.operators}")


_WHY = "no runtime has an integer kernel, and its result depends on small differences"
_BY_BATCH = "it rounds by the range of each batch"
_KEPT = "kept as in the file, and run by onnxruntime"
_LOSSES = (
    *(F.loss.l1_loss, F.loss.square_loss, F.loss.cross_entropy, F.loss.binary_cross_entropy),
    *(F.loss.hinge_loss, F.loss.ctc_loss),
)

RULES = (
    *(op_rule(f.__name__, Role.FLOAT, _read, f, reason="a loss is computed in float") for f in _LOSSES),
    op_rule("matinv", Role.FLOAT, _read, F.matinv, reason=_WHY),
    op_rule("svd", Role.FLOAT, _read, F.svd, reason=_WHY),
    op_rule("diag", Role.FLOAT, _read, F.diag, reason="no runtime has an integer kernel"),
    op_rule("dynamic_quantize", Role.FLOAT, _read_rounding, DynamicQuant, reason=_BY_BATCH),
    op_rule("opaque", Role.FLOAT, _read_opaque, OpaqueOp, reason=_KEPT),
)
