"""Linear layers and matrix products."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Apply, CallFunction, Expr, TensorNode
from qtrace.ops.arguments import Arguments, UnreadableError, arguments, operands, tensors
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES", "weight_and_bias"]


def weight_and_bias(a: Arguments) -> tuple[TensorNode, TensorNode | None]:
    """Reads the weight and the bias of a layer.

    Raises:
        UnreadableError: when one of them is not a tensor of the graph.
    """
    weight, bias = a["weight"], a["bias"]
    if not isinstance(weight, TensorNode) or not isinstance(bias, (TensorNode, type(None))):
        raise UnreadableError("its weight or bias is not a tensor of the graph")
    return weight, bias


def _linear(expr: Expr) -> Reading:
    a = arguments(expr)
    weight, bias = weight_and_bias(a)
    return Reading((a.tensor(),), {}, weight, bias, (0,))


def _matmul(expr: Expr) -> Reading:
    left, right = operands(expr, 2)
    flips = (False, False)
    if isinstance(expr, CallFunction):
        a = arguments(expr)  # F.dot lacks arguments for flips
        flips = (bool(a.get("transpose_a", False)), bool(a.get("transpose_b", False)))
    elif isinstance(expr, Apply):
        flips = (bool(expr.opdef.transposeA), bool(expr.opdef.transposeB))
    elif expr.method == "__rmatmul__":
        left, right = right, left
    nodes = tensors(left, right)
    if len(nodes) != 2:
        raise UnreadableError("an operand is not a tensor of the graph")
    return typed(expr, nodes, {"transpose_a": flips[0], "transpose_b": flips[1]})


RULES = (
    op_rule("linear", Role.COMPUTE, _linear, F.linear),
    op_rule(
        "matmul",
        Role.COMPUTE,
        _matmul,
        F.matmul,
        F.dot,
        methods=["__matmul__", "__imatmul__", "__rmatmul__"],
        kernels=["MatrixMul", "BatchedMatrixMul"],
    ),
)
