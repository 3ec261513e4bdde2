"""Sampling of images and feature maps at computed places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors
from qtrace.ops.conv import pair

__all__ = ["RULES"]


def _roi_align(expr: Expr) -> Reading | str:
    """The places stay float; the values are weighted means of the input's, as in pooling."""
    a = arguments(expr)
    attrs: dict[str, Any] = {
        "rois": a["rois"],
        "output_size": pair(a["output_shape"]),
        "mode": a["mode"],
        "scale": float(a["spatial_scale"]),
        "samples": pair(a["sample_points"]),
        "aligned": bool(a["aligned"]),
    }
    return Reading(tensors(a["inp"]), attrs)


def _first(expr: Expr) -> Reading | str:
    return Reading(tensors(*positional(expr))[:1], {"operands": positional(expr)})


def _float(kind: str, reason: str, *targets: Target) -> OpRule:
    return OpRule(kind, Role.FLOAT, targets, _first, reason)


def _functions(*functions: Callable[..., Any]) -> tuple[Target, ...]:
    return tuple(Target(function=f) for f in functions)


_SAMPLES = "it samples between pixels; no runtime does that on integers"

RULES = (
    OpRule("roi_align", Role.ELEMENTWISE, _functions(F.vision.roi_align), _roi_align),
    _float("roi_pooling", "no runtime has an integer kernel", *_functions(F.vision.roi_pooling)),
    _float(
        "deformable_psroi_pooling",
        _SAMPLES,
        *_functions(F.nn.deformable_psroi_pooling),
        Target(module=M.DeformablePSROIPooling),
    ),
    _float("remap", _SAMPLES, *_functions(F.vision.remap)),
    _float("warp_affine", _SAMPLES, *_functions(F.vision.warp_affine)),
    _float("warp_perspective", _SAMPLES, *_functions(F.vision.warp_perspective)),
    _float("cvt_color", "it belongs to preprocessing", *_functions(F.vision.cvt_color)),
    _float("correlation", "no runtime has an integer kernel", *_functions(F.vision.correlation)),
    _float("nvof", "no runtime has an integer kernel", *_functions(F.vision.nvof)),
    _float(
        "sliding_window_transpose",
        "it sums overlapping windows; no runtime does that on integers",
        *_functions(F.nn.sliding_window_transpose),
        Target(module=M.SlidingWindowTranspose),
    ),
)
