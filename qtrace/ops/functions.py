"""The functions of ``qtrace.graph.functions``, and other ops that stay in float.

These are losses, which occur where a training graph was traced. Linear algebra beyond products, and complex
numbers. Roundings by the range of each batch, which `prepare` puts before layers with method: dynamic. And
opaque nodes: what an ONNX file has and MegEngine lacks, kept as in the file and run by onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F

from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph import functions
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor, owner, tensor_inputs
from qtrace.ops.arguments import activation, arguments, children, tensors
from qtrace.ops.base import OpRule, Reading, Role, op_rule, typed
from qtrace.ops.elementwise import unary

# The functions of ``qtrace.graph.functions``, which composites in pieces become.


def _hard_sigmoid(expr: Expr) -> Reading:
    a = arguments(expr)
    numbers = {"slope": a.number("slope"), "offset": a.number("offset")}
    return typed(expr, (activation(expr),), numbers)


def _rms_norm(expr: Expr) -> Reading:
    a = arguments(expr)
    attrs = {"weight": a["weight"], "axis": a.integer("axis"), "eps": a.number("eps")}
    return typed(expr, (activation(expr),), attrs)


def _scale_and_shift(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, (activation(expr),), {"scale": a["scale"], "shift": a["shift"]})


def _attention(expr: Expr) -> Reading:
    a = arguments(expr)
    inputs = tensors(a["query"], a["key"], a["value"], a["mask"], a["bias"])
    return typed(expr, inputs, {"scale": a.number("scale"), "mask": a["mask"], "bias": a["bias"]})


def _channel_shuffle(expr: Expr) -> Reading:
    return typed(expr, (activation(expr),), {"groups": arguments(expr).integer("groups")})


def _space_to_depth(expr: Expr) -> Reading:
    a = arguments(expr)
    reading = typed(expr, (activation(expr),), {"block": a.integer("block")})
    return replace(reading, attrs={**reading.attrs, "order": a.integers("order", 3)})


def _float(kind: str, read: Callable[[Expr], Reading], function: Callable[..., Any], reason: str) -> OpRule:
    return op_rule(kind, Role.FLOAT, read, function, reason=reason)


_ACCURATE = "it keeps its accuracy only in float between 8-bit neighbours"
_EXPANDED = "prepare writes it as products and a softmax, which are quantized"

_FUNCTIONS = (
    op_rule("erf", Role.FLOAT, unary, functions.erf, reason=_ACCURATE),
    _float("gelu_tanh", unary, functions.gelu_tanh, _ACCURATE),
    op_rule("hard_sigmoid", Role.ELEMENTWISE, _hard_sigmoid, functions.hard_sigmoid),
    op_rule("mish", Role.ELEMENTWISE, unary, functions.mish),
    _float("rms_norm", _rms_norm, functions.rms_norm, _ACCURATE),
    op_rule("scale_and_shift", Role.ELEMENTWISE, _scale_and_shift, functions.scale_and_shift),
    _float("scaled_dot_product_attention", _attention, functions.scaled_dot_product_attention, _EXPANDED),
    op_rule("channel_shuffle", Role.CARRY, _channel_shuffle, functions.channel_shuffle),
    op_rule("space_to_depth", Role.CARRY, _space_to_depth, functions.space_to_depth),
)


# Ops that stay in float.


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

_FLOAT_OPS = (
    *(op_rule(f.__name__, Role.FLOAT, _read, f, reason="a loss is computed in float") for f in _LOSSES),
    op_rule("matinv", Role.FLOAT, _read, F.matinv, reason=_WHY),
    op_rule("svd", Role.FLOAT, _read, F.svd, reason=_WHY),
    op_rule("diag", Role.FLOAT, _read, F.diag, reason="no runtime has an integer kernel"),
    op_rule("dynamic_quantize", Role.FLOAT, _read_rounding, DynamicQuant, reason=_BY_BATCH),
    op_rule("opaque", Role.FLOAT, _read_opaque, OpaqueOp, reason=_KEPT),
)

RULES = (*_FUNCTIONS, *_FLOAT_OPS)
