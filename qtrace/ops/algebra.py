"""Linear algebra beyond products, and complex numbers."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, children

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading | str:
    return Reading(children((expr.args, expr.kwargs)))


_WHY = "no runtime has an integer kernel, and its result depends on small differences"

RULES = (
    OpRule("matinv", Role.FLOAT, (Target(function=F.matinv),), _read, _WHY),
    OpRule("svd", Role.FLOAT, (Target(function=F.svd),), _read, _WHY),
    OpRule("diag", Role.FLOAT, (Target(function=F.diag),), _read, "no runtime has an integer kernel"),
)
