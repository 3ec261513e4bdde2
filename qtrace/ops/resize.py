"""Resizing. Nearest only moves values; bilinear makes new ones."""

from __future__ import annotations

from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, tensors

__all__ = ["RULES"]


def _interpolate(expr: Expr) -> Reading | str:
    a = arguments(expr)
    attrs: dict[str, Any] = {
        "size": a["size"],
        "scale_factor": a["scale_factor"],
        "mode": a["mode"],
        "align_corners": bool(a["align_corners"]),
    }
    role = Role.CARRY if a["mode"] == "nearest" else Role.ELEMENTWISE
    return Reading(tensors(a["inp"]), attrs, role=role)


RULES = (OpRule("interpolate", Role.ELEMENTWISE, (Target(function=F.vision.interpolate),), _interpolate),)
