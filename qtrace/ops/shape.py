"""Shapes, tensors that are made from numbers and shapes only, and conversions between types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import activation, arguments, children, operands, tensors
from qtrace.ops.base import INTEGERS, Reading, Role, op_rule, typed

# Shapes, and tensors that are created from numbers and shapes only: never quantized.

_CREATED = "it is made from numbers and shapes"


def _shape(expr: Expr) -> Reading:
    return Reading(tensors(*expr.inputs))


def _read_created(*names: str) -> Callable[[Expr], Reading]:
    """Builds a reader of a function whose arguments ``names`` are numbers, shapes or their nodes."""

    def read(expr: Expr) -> Reading:
        a = arguments(expr)
        return Reading(tensors(*(a[n] for n in names)), {n: a[n] for n in names})

    return read


def _named_value(expr: Expr) -> float:
    """Returns the value that ones and zeros have by their name."""
    return float(expr.func.__name__.startswith("ones"))


def _fill(expr: Expr) -> Reading:
    """Reads full, ones and zeros, and the kernel of a call that the tracer did not see."""
    if isinstance(expr, Apply):
        value: Any = expr.opdef.value
        (shape,) = operands(expr, 1)
    else:
        a = arguments(expr)
        value, shape = a.get("value", _named_value(expr)), a["shape"]
    return Reading(tensors(shape, value), {"shape": shape, "value": value})


def _fill_like(expr: Expr) -> Reading:
    a = arguments(expr)
    value = a.get("value", _named_value(expr))
    return Reading(tensors(a["inp"]), {"value": value})


def _meshgrid(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, children(a["inputs"]), {"indexing": a["indexing"]})


_COORDINATES = "it makes coordinates, which need more than 8 bits"

_SHAPE = (
    op_rule("shape", Role.SHAPE, _shape, kernels=["GetVarShape"], reason=INTEGERS),
    op_rule("arange", Role.SHAPE, _read_created("start", "stop", "step"), F.arange, reason=_CREATED),
    op_rule("linspace", Role.SHAPE, _read_created("start", "stop", "num"), F.linspace, reason=_CREATED),
    op_rule("eye", Role.SHAPE, _read_created("N", "M"), F.eye, reason=_CREATED),
    op_rule("full", Role.SHAPE, _fill, F.full, F.ones, F.zeros, kernels=["Fill"], reason=_CREATED),
    op_rule("full_like", Role.SHAPE, _fill_like, F.full_like, F.ones_like, F.zeros_like, reason=_CREATED),
    op_rule("meshgrid", Role.FLOAT, _meshgrid, F.meshgrid, reason=_COORDINATES),
)


# Conversions between types.


def _astype(expr: Expr) -> Reading:
    node, out = activation(expr), expr.outputs[0]
    if np.dtype(node.dtype) == np.dtype(out.dtype):
        return replace(typed(expr, (node,)), kind="identity")
    if not is_float_tensor(node) and not is_float_tensor(out):
        return Reading((node,), role=Role.SHAPE, reason=INTEGERS)
    return Reading((node,), role=Role.FLOAT, reason="it converts between float32 and another type")


_CAST = (op_rule("astype", Role.CARRY, _astype, methods=["astype"], kernels=["TypeCvt"]),)

RULES = (*_SHAPE, *_CAST)
