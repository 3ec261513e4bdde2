"""Functions of one number that stay in float: roots, logarithms, rounding, trigonometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.ops.arithmetic import binary, unary
from qtrace.ops.base import OpRule, Role, op_rule

__all__ = ["RULES"]

_WIDE = "its output spans orders of magnitude"
_DEEP = "its input spans orders of magnitude"
_STEEP = "it is steep near the end of its range, where one step of 8 bits is much"
_ROUNDS = "it rounds: an error of one step changes a whole value"
_PERIODIC = "it is periodic: the position in a period needs more than 8 bits"


def _rule(kind: str, function: Callable[..., Any], kernel: str, reason: str, *methods: str) -> OpRule:
    kernels = [kernel] if kernel else []
    return op_rule(kind, Role.FLOAT, unary, function, methods=methods, kernels=kernels, reason=reason)


RULES = (
    _rule("exp", F.exp, "EXP", _WIDE),
    _rule("expm1", F.expm1, "EXPM1", _WIDE),
    _rule("log", F.log, "LOG", _DEEP),
    _rule("log1p", F.log1p, "LOG1P", _DEEP),
    _rule("sqrt", F.sqrt, "SQRT", "it is steep near zero, where one step of 8 bits is much"),
    _rule("floor", F.floor, "FLOOR", _ROUNDS, "__floor__"),
    _rule("ceil", F.ceil, "CEIL", _ROUNDS, "__ceil__"),
    _rule("round", F.round, "ROUND", _ROUNDS, "__round__"),
    _rule("sign", F.sign, "SIGN", "it is decided at zero, which rounding moves"),
    _rule("sin", F.sin, "SIN", _PERIODIC),
    _rule("cos", F.cos, "COS", _PERIODIC),
    _rule("tan", F.tan, "TAN", _PERIODIC),
    _rule("asin", F.asin, "ASIN", _STEEP),
    _rule("acos", F.acos, "", _STEEP),
    _rule("atan", F.atan, "", _STEEP),
    _rule("sinh", F.sinh, "", _WIDE),
    _rule("cosh", F.cosh, "", _WIDE),
    _rule("asinh", F.asinh, "", _DEEP),
    _rule("acosh", F.acosh, "", _DEEP),
    _rule("atanh", F.atanh, "", _STEEP),
    op_rule("atan2", Role.FLOAT, binary, F.atan2, reason=_PERIODIC),
    op_rule("logaddexp", Role.FLOAT, binary, F.logaddexp, reason=_DEEP),
)
