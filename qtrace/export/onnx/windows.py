"""ONNX for pooling and resizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.types import Emitter, shape_vector
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["WINDOWS"]


def _pool(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        a = call.attrs
        ph, pw = a["padding"]
        extra = {"count_include_pad": int(a["count_include_pad"])} if op == "AveragePool" else {}
        window = {"kernel_shape": list(a["kernel"]), "strides": list(a["stride"]), "pads": [ph, pw, ph, pw]}
        w.emit(op, [w.name(call.inputs[0])], call.out, **window, **extra)

    return emit


def _adaptive(everything: str, window: str) -> Emitter:
    """Emits adaptive pooling: windows of one size, which overlap if the sizes do not divide."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        size, shape = call.attrs["output_size"], call.inputs[0].shape[-2:]
        x = [w.name(call.inputs[0])]
        if size == (1, 1):
            w.emit(everything, x, call.out)
            return
        strides = [int(n) // s for n, s in zip(shape, size, strict=True)]
        kernel = [int(n) - (s - 1) * t for n, s, t in zip(shape, size, strides, strict=True)]
        w.emit(window, x, call.out, kernel_shape=kernel, strides=strides)

    return emit


def _interpolate(w: OnnxWriter, call: OpCall) -> None:
    a, shape, out = call.attrs, call.inputs[0].shape, call.out.shape
    mode = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "bicubic": "cubic"}.get(a["mode"])
    if mode is None:
        raise ExportError(
            f"{call.out.name}: interpolate mode {a['mode']!r} cannot become ONNX: use nearest, bilinear "
            "or bicubic"
        )
    place = "align_corners" if a["align_corners"] else "half_pixel"
    settings = {"mode": mode, "coordinate_transformation_mode": place}
    if mode == "nearest":
        settings = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if any(isinstance(n, TensorNode) for n in _several(a["size"])):
        _emit_resize(w, call, shape_vector(w, a["size"]), settings)
        return
    inside, outside = ([int(n) for n in s[2:]] for s in (shape, out))
    source, base = w.name(call.inputs[0]), call.out.name
    if all(o % i == 0 for o, i in zip(outside, inside, strict=True)):
        scales = [1.0, 1.0, *(float(o // i) for o, i in zip(outside, inside, strict=True))]
        factors = w.constant(f"{base}_scales", np.array(scales, np.float32))
        w.emit("Resize", [source, "", factors], call.out, **settings)
        return
    # A fractional factor would be rounded twice; sizes are exact.
    _emit_resize(w, call, w.ints(outside), settings)


def _several(size: Any) -> Sequence[Any]:
    return size if isinstance(size, (tuple, list)) else (size,)


def _emit_resize(w: OnnxWriter, call: OpCall, image: str, settings: Mapping[str, Any]) -> None:
    """Resizes to the height and width in the vector ``image``."""
    source, base = w.name(call.inputs[0]), call.out.name
    front = w.node(
        "Slice", [w.node("Shape", [source], w.fresh(base)), w.ints([0]), w.ints([2])], w.fresh(base)
    )
    sizes = w.node("Concat", [front, image], w.fresh(base), axis=0)
    w.emit("Resize", [source, "", "", sizes], call.out, **settings)


WINDOWS: dict[str, Emitter] = {
    "max_pool2d": _pool("MaxPool"),
    "avg_pool2d": _pool("AveragePool"),
    "adaptive_avg_pool2d": _adaptive("GlobalAveragePool", "AveragePool"),
    "adaptive_max_pool2d": _adaptive("GlobalMaxPool", "MaxPool"),
    "interpolate": _interpolate,
}
