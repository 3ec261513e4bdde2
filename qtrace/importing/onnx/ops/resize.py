"""Resize and Upsample of images."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering

__all__ = ["LOWERINGS"]

_SHIFTED = "half_pixel"


def _upsample(call: Call) -> Any:
    mode = call.attribute("mode", "nearest")
    scales = call.array(1).tolist() if call.version >= 9 else call.attribute("scales")
    sizes = [int(np.floor(n * s)) for n, s in zip(call.shape(0), scales, strict=True)]
    return _resized(call, mode, "asymmetric", "floor", sizes, scales)


def _resize(call: Call) -> Any:
    mode = call.attribute("mode", "nearest")
    if call.version == 10:
        scales = call.array(1).tolist()
        sizes = [int(np.floor(n * s)) for n, s in zip(call.shape(0), scales, strict=True)]
        return _resized(call, mode, "asymmetric", "floor", sizes, scales)
    place = call.attribute("coordinate_transformation_mode", "half_pixel")
    nearest = call.attribute("nearest_mode", "round_prefer_floor")
    call.attribute("cubic_coeff_a", -0.75)
    call.attribute("extrapolation_value", 0.0)
    if call.attribute("antialias", 0) or call.attribute("exclude_outside", 0):
        call.refuse("smooths before it shrinks, or leaves places outside out")
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        call.refuse("keeps the aspect ratio by a policy")
    sizes, scales = _sizes(call)
    return _resized(call, mode, place, nearest, sizes, scales)


def _sizes(call: Call) -> tuple[list[int], list[float]]:
    """Returns the size of the result and the factor along every axis."""
    own = call.shape(0)
    axes = [call.axis(a, len(own)) for a in call.ints("axes", list(range(len(own))))]
    sizes, scales = list(own), [1.0] * len(own)
    if call.has(3):
        for axis, size in zip(axes, call.sizes(3), strict=True):
            sizes[axis] = size if isinstance(size, int) else size.recorded
            scales[axis] = sizes[axis] / own[axis]
        return sizes, scales
    factors = call.array(2)
    for axis, scale in zip(axes, factors.tolist(), strict=True):
        scales[axis] = scale
        sizes[axis] = int(np.floor(own[axis] * scale))
    return sizes, scales


def _resized(call: Call, mode: str, place: str, nearest: str, sizes: list[int], scales: list[float]) -> Any:
    own = call.shape(0)
    if call.rank(0) != 4 or list(sizes[:2]) != list(own[:2]) or call.dtype(0).kind != "f":
        call.refuse("resizes other axes than the two last of an image; MegEngine resizes these")
    target, factors = tuple(sizes[2:]), tuple(scales[2:])
    if target == tuple(own[2:]) and all(f == 1 for f in factors):
        return call.tensor(0)
    if mode == "nearest":
        return _nearest(call, place, nearest, target, factors)
    if mode != "linear":
        call.refuse(f"resizes in the mode {mode!r}; its result in MegEngine differs")
    if any(t / n != f for t, n, f in zip(target, own[2:], factors, strict=True)):
        call.refuse("has a scale that is not the quotient of the sizes")
    if place == "pytorch_half_pixel":
        place = _SHIFTED if 1 not in target else place
    if place not in (_SHIFTED, "align_corners"):
        call.refuse(f"finds its places by {place!r}; MegEngine by half_pixel or align_corners")
    corners = place == "align_corners"
    return call.function(
        F.nn.interpolate, call.tensor(0), size=target, mode="bilinear", align_corners=corners
    )


def _nearest(
    call: Call, place: str, nearest: str, target: tuple[int, ...], factors: tuple[float, ...]
) -> Any:
    """Picks rows and columns: MegEngine's kernel if it picks the same ones, else by index."""
    own = call.shape(0)[2:]
    picked = [nearest_places(n, t, f, place, nearest) for n, t, f in zip(own, target, factors, strict=True)]
    kernel = [
        np.minimum(np.floor(np.arange(t) * (n / t)).astype(np.int64), n - 1)
        for n, t in zip(own, target, strict=True)
    ]
    if all(p is not None and np.array_equal(p, k) for p, k in zip(picked, kernel, strict=True)):
        return call.function(F.nn.interpolate, call.tensor(0), size=target, mode="nearest")
    call.refuse(f"picks other places ({place}, {nearest}) than MegEngine's nearest neighbours")


def nearest_places(size: int, target: int, factor: float, place: str, nearest: str) -> np.ndarray | None:
    """Returns the places that nearest-neighbour resizing picks along an axis, by ONNX's definition of Resize.

    Args:
        size: the size of the axis.
        target: the size of the result.
        factor: the scale of the axis.
        place: ``coordinate_transformation_mode``.
        nearest: ``nearest_mode``.

    Returns:
        One place for each of the result's; None for a mode that is not known.
    """
    x = np.arange(target, dtype=np.float64)
    if place in ("half_pixel", "pytorch_half_pixel"):
        source = (x + 0.5) / factor - 0.5 if target > 1 or place == "half_pixel" else np.zeros(target)
    elif place == "asymmetric":
        source = x / factor
    elif place == "align_corners":
        source = x * (size - 1) / (target - 1) if target > 1 else np.zeros(target)
    else:
        return None
    rounded = {
        "floor": np.floor(source),
        "ceil": np.ceil(source),
        "round_prefer_floor": np.ceil(source - 0.5),
        "round_prefer_ceil": np.floor(source + 0.5),
    }.get(nearest)
    return None if rounded is None else np.clip(rounded, 0, size - 1).astype(np.int64)


LOWERINGS: dict[str, Lowering] = {"Resize": _resize, "Upsample": _upsample}
