"""Linear algebra beyond products, and complex numbers."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arguments import children
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    return Reading(children((expr.args, expr.kwargs)))


_WHY = "no runtime has an integer kernel, and its result depends on small differences"

RULES = (
    op_rule("matinv", Role.FLOAT, _read, F.matinv, reason=_WHY),
    op_rule("svd", Role.FLOAT, _read, F.svd, reason=_WHY),
    op_rule("diag", Role.FLOAT, _read, F.diag, reason="no runtime has an integer kernel"),
)
