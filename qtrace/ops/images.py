"""Resizing, and sampling of images and feature maps at computed positions."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.ops.arguments import arguments, positional, tensors
from qtrace.ops.base import Reading, Role, op_rule

# Resizing. The mode ``nearest`` only moves values; the other modes compute new ones.


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


_RESIZE = (op_rule("interpolate", Role.ELEMENTWISE, _interpolate, F.vision.interpolate),)


# Sampling of images and feature maps at computed positions.


def _roi_align(expr: Expr) -> Reading:
    """Reads ``roi_align``: the positions stay float; the values are weighted means, as in pooling."""
    a = arguments(expr)
    attrs = {
        "rois": a["rois"],
        "output_size": a.integers("output_shape", 2),
        "mode": a["mode"],
        "scale": a.number("spatial_scale"),
        "samples": a.integers("sample_points", 2),
        "aligned": a.flag("aligned"),
    }
    return Reading((a.tensor(),), attrs)


def _first(expr: Expr) -> Reading:
    return Reading(tensors(*positional(expr))[:1], {"operands": positional(expr)})


_SAMPLES = "it samples between pixels; no runtime does that on integers"
_NO_KERNEL = "no runtime has an integer kernel"
_PREPARES = "it belongs to preprocessing"
_OVERLAPS = "it sums overlapping windows; no runtime does that on integers"
_DEFORMABLE = (F.nn.deformable_psroi_pooling, M.DeformablePSROIPooling)
_WINDOWS = (F.nn.sliding_window_transpose, M.SlidingWindowTranspose)

_VISION = (
    op_rule("roi_align", Role.ELEMENTWISE, _roi_align, F.vision.roi_align),
    op_rule("roi_pooling", Role.FLOAT, _first, F.vision.roi_pooling, reason=_NO_KERNEL),
    op_rule("deformable_psroi_pooling", Role.FLOAT, _first, *_DEFORMABLE, reason=_SAMPLES),
    op_rule("remap", Role.FLOAT, _first, F.vision.remap, reason=_SAMPLES),
    op_rule("warp_affine", Role.FLOAT, _first, F.vision.warp_affine, reason=_SAMPLES),
    op_rule("warp_perspective", Role.FLOAT, _first, F.vision.warp_perspective, reason=_SAMPLES),
    op_rule("cvt_color", Role.FLOAT, _first, F.vision.cvt_color, reason=_PREPARES),
    op_rule("correlation", Role.FLOAT, _first, F.vision.correlation, reason=_NO_KERNEL),
    op_rule("nvof", Role.FLOAT, _first, F.vision.nvof, reason=_NO_KERNEL),
    op_rule("sliding_window_transpose", Role.FLOAT, _first, *_WINDOWS, reason=_OVERLAPS),
)

RULES = (*_RESIZE, *_VISION)
