"""Resizing. The mode ``nearest`` only moves values; the other modes compute new ones."""

from __future__ import annotations

from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arguments import arguments
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _interpolate(expr: Expr) -> Reading:
    a = arguments(expr)
    mode = str(a["mode"]).lower()
    attrs: dict[str, Any] = {
        "size": a["size"],
        "scale_factor": a["scale_factor"],
        "mode": mode,
        "align_corners": a.flag("align_corners"),
    }
    return Reading((a.tensor(),), attrs, role=Role.CARRY if mode == "nearest" else Role.ELEMENTWISE)


RULES = (op_rule("interpolate", Role.ELEMENTWISE, _interpolate, F.vision.interpolate),)
