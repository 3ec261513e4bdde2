"""Resizing. Nearest only moves values; the other modes make new ones."""

from __future__ import annotations

from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, tensors

__all__ = ["RULES"]


def _interpolate(expr: Expr) -> Reading | str:
    a = arguments(expr)
    mode = str(a["mode"]).lower()
    attrs: dict[str, Any] = {
        "size": a["size"],
        "scale_factor": a["scale_factor"],
        "mode": mode,
        "align_corners": bool(a["align_corners"]),
    }
    return Reading(tensors(a["inp"]), attrs, role=Role.CARRY if mode == "nearest" else Role.ELEMENTWISE)


RULES = (OpRule("interpolate", Role.ELEMENTWISE, (Target(function=F.vision.interpolate),), _interpolate),)
