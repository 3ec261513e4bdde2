"""ONNX for ops that read between pixels, at computed places: RoiAlign and GridSample of opset 16."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export._onnx_types import Emitter, cast, operand
from qtrace.export._onnx_writer import OnnxWriter
from qtrace.graph.types import CallFunction, TensorNode
from qtrace.ops import OpCall
from qtrace.ops.base import arguments

__all__ = ["SAMPLING"]

_BORDERS = {"replicate": "border", "constant": "zeros"}


def _roi_align(w: OnnxWriter, call: OpCall) -> None:
    """Regions as MegEngine gives them: the number of the image, then two corners."""
    a, base = call.attrs, call.out.name
    high, wide = a["samples"]
    if a["mode"] != "average":
        raise ExportError(
            "roi_align takes the largest sample, which onnxruntime computes in another way: "
            "use mode='average'"
        )
    if high != wide:
        raise ExportError(
            f"roi_align has {high} x {wide} samples, and ONNX as many in both directions: "
            "make sample_points one number"
        )
    rois = operand(w, a["rois"], np.float32)
    numbers = w.node("Slice", [rois, w.ints([0]), w.ints([1]), w.ints([1])], w.fresh(base))
    numbers = cast(w, w.node("Reshape", [numbers, w.ints([-1])], w.fresh(base)), np.int64)
    corners = w.node("Slice", [rois, w.ints([1]), w.ints([5]), w.ints([1])], w.fresh(base))
    # MegEngine has zeros around the image where ONNX repeats its edge: with a frame of zeros both read the
    # same. Regions are moved by its width, and where MegEngine does not subtract half a pixel by that, too:
    # ONNX's mode without it widens regions of less than one pixel.
    moved = (1.0 if a["aligned"] else 1.5) / a["scale"]
    corners = w.node("Add", [corners, w.constant(f"{base}_frame", np.float32(moved))], w.fresh(base))
    frame = w.ints([0, 0, 1, 1, 0, 0, 1, 1])
    image = w.node("Pad", [w.name(call.inputs[0]), frame, w.scalar(0.0)], w.fresh(base), mode="constant")
    size = dict(zip(("output_height", "output_width"), a["output_size"], strict=True))
    how = {"coordinate_transformation_mode": "half_pixel", "mode": "avg", "sampling_ratio": int(high)}
    w.emit("RoiAlign", [image, corners, numbers], call.out, **size, **how, spatial_scale=float(a["scale"]))


def _given(call: OpCall) -> dict[str, Any]:
    assert isinstance(call.expr, CallFunction)
    return arguments(call.expr)


def _sample(w: OnnxWriter, call: OpCall, places: str, settings: dict[str, Any], border: float) -> None:
    """Reads the input at ``places``, N x H x W x 2 pixels (x, y); ONNX counts from -1 to 1."""
    mode, way = settings["border_mode"].lower(), settings["interp_mode"].lower()
    if mode not in _BORDERS or (mode == "constant" and border != 0):
        raise ExportError(
            f"{call.kind} with border_mode={mode!r} and the value {border} has no ONNX form: "
            "use 'replicate', or 'constant' with 0"
        )
    if way != "linear":
        raise ExportError(f"{call.kind} with interp_mode={way!r} has no ONNX form: use 'linear'")
    base, shape = call.out.name, call.inputs[0].shape
    sizes = np.array([int(shape[3]), int(shape[2])], np.float32)
    factor = w.constant(f"{base}_factor", 2 / sizes)
    shift = w.constant(f"{base}_shift", 1 / sizes - 1)
    grid = w.node("Add", [w.node("Mul", [places, factor], w.fresh(base)), shift], w.fresh(base))
    how = {"mode": "bilinear", "padding_mode": _BORDERS[mode], "align_corners": 0}
    w.emit("GridSample", [w.name(call.inputs[0]), grid], call.out, **how)


def _remap(w: OnnxWriter, call: OpCall) -> None:
    a = _given(call)
    _sample(w, call, operand(w, a["map_xy"], np.float32), a, float(a["scalar"]))


def _warp(w: OnnxWriter, call: OpCall) -> None:
    """Places are ``mat @ (x, y, 1)`` for every pixel of the output; the third row divides the others."""
    a, base = _given(call), call.out.name
    if a["format"] != "NCHW":
        raise ExportError(f"{call.kind} has an ONNX form only with format='NCHW'")
    if a.get("mat_idx") is not None:
        raise ExportError(f"{call.kind} with mat_idx has no ONNX form: give each image its matrix")
    if isinstance(a["out_shape"], TensorNode):
        raise ExportError(f"{call.kind} has an ONNX form only where out_shape is fixed")
    high, wide = (int(n) for n in call.out.shape[2:])
    y, x = np.mgrid[:high, :wide].astype(np.float32)
    pixels = w.constant(f"{base}_pixels", np.stack([x, y, np.ones_like(x)], -1).reshape(1, -1, 3))
    matrix = w.node("Transpose", [operand(w, a["mat"], np.float32)], w.fresh(base), perm=[0, 2, 1])
    places = w.node("MatMul", [pixels, matrix], w.fresh(base))
    if call.kind == "warp_perspective":
        depth = w.node("Slice", [places, w.ints([2]), w.ints([3]), w.ints([2])], w.fresh(base))
        places = w.node("Slice", [places, w.ints([0]), w.ints([2]), w.ints([2])], w.fresh(base))
        places = w.node("Div", [places, depth], w.fresh(base))
    places = w.node("Reshape", [places, w.ints([0, high, wide, 2])], w.fresh(base))
    _sample(w, call, places, a, float(a["border_val"]))


SAMPLING: dict[str, Emitter] = {
    "roi_align": _roi_align,
    "remap": _remap,
    "warp_affine": _warp,
    "warp_perspective": _warp,
}
