"""Resize and Upsample of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.folding import Size, value_at
from qtrace.importing.onnx.model import Stored

_SHIFTED = "half_pixel"


@dataclass(frozen=True)
class _Target:
    """The size of a result along one axis.

    Attributes:
        size: the size.
        numbers: the sizes of input and result, and the factor, for each probe.
        factor: a fixed factor; None where the size is given.
    """

    size: int | Size
    numbers: tuple[tuple[int, int, float], ...]
    factor: float | None

    @property
    def is_open(self) -> bool:
        """Whether the size depends on an open axis."""
        return len(self.numbers) > 1 and len(set(self.numbers)) > 1


def _upsample(call: Call) -> Any:
    mode = call.attribute("mode", "nearest")
    scales = call.array(1).tolist()
    return _resized(call, mode, "asymmetric", "floor", _scaled(call, scales, range(call.rank(0))))


def _resize(call: Call) -> Any:
    if call.version == 10:
        return _upsample(call)
    mode = call.attribute("mode", "nearest")
    place = call.attribute("coordinate_transformation_mode", "half_pixel")
    nearest = call.attribute("nearest_mode", "round_prefer_floor")
    coefficient = float(call.attribute("cubic_coeff_a", -0.75))
    call.attribute("extrapolation_value", 0.0)
    if call.attribute("antialias", 0) or call.attribute("exclude_outside", 0):
        call.refuse("smooths before it shrinks, or leaves places outside out")
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        call.refuse("keeps the aspect ratio by a policy")
    targets = _targets(call)
    if place == "align_corners" and any(t / n != f for x in targets for n, t, f in x.numbers):
        # onnx places the last corner at the scaled size, onnxruntime at the size of the result.
        call.refuse("aligns corners by a scale that is not the quotient of the sizes")
    if mode == "cubic":
        return _cubic(call, place, coefficient, targets)
    return _resized(call, mode, place, nearest, targets)


def _targets(call: Call) -> list[_Target]:
    """Returns the size of the result along every axis."""
    rank = call.rank(0)
    axes = [call.axis(a, rank) for a in call.ints("axes", list(range(rank)))]
    if not call.has(3):
        return _scaled(call, call.array(2).tolist(), axes)
    targets = _scaled(call, [], [])
    for axis, size in zip(axes, call.sizes(3), strict=True):
        own = [shape[axis] for shape in call.shapes(0)]
        probes = range(max(len(own), len(size.values) if isinstance(size, Size) else 1))
        known = [(own[min(p, len(own) - 1)], int(value_at(size, p))) for p in probes]
        numbers = tuple((n, t, t / n) for n, t in known)
        targets[axis] = _Target(size, numbers, None)
    return targets


def _scaled(call: Call, scales: Sequence[float], axes: Sequence[int]) -> list[_Target]:
    """Returns the size of the result along every axis, scaled along some."""
    factors = [1.0] * call.rank(0)
    for axis, scale in zip(axes, scales, strict=True):
        factors[axis] = scale
    targets = []
    for axis, factor in enumerate(factors):
        own = [shape[axis] for shape in call.shapes(0)]
        numbers = tuple((n, int(np.floor(n * factor)), factor) for n in own)
        targets.append(_Target(call.size(0, axis) if factor == 1 else numbers[0][1], numbers, factor))
    return targets


def _check_image(call: Call, targets: Sequence[_Target]) -> None:
    if call.rank(0) != 4 or any(n != t for x in targets[:2] for n, t, _ in x.numbers) or not call.is_float(0):
        call.refuse("resizes other axes than the two last of an image; MegEngine resizes these")


def _resized(call: Call, mode: str, place: str, nearest: str, targets: Sequence[_Target]) -> Any:
    _check_image(call, targets)
    image = targets[2:]
    if all(n == t and f == 1 for x in image for n, t, f in x.numbers):
        return call.tensor(0)
    for target in image:
        if target.is_open and target.factor is not None and target.factor != int(target.factor):
            call.refuse(f"scales an open axis by {target.factor:g}, whose result differs with the size")
    if mode == "nearest":
        return _nearest(call, place, nearest, image)
    if mode != "linear":
        call.refuse(f"resizes in the mode {mode!r}; its result in MegEngine differs")
    if any(t / n != f for x in image for n, t, f in x.numbers):
        call.refuse("has a scale that is not the quotient of the sizes")
    if place == "pytorch_half_pixel":
        place = _SHIFTED if all(t != 1 for x in image for _, t, _ in x.numbers) else place
    if place not in (_SHIFTED, "align_corners"):
        call.refuse(f"finds its places by {place!r}; MegEngine by half_pixel or align_corners")
    return _interpolated(call, image, mode="bilinear", align_corners=place == "align_corners")


def _cubic(call: Call, place: str, coefficient: float, targets: Sequence[_Target]) -> Any:
    """Multiplies rows and columns by matrices of weights: MegEngine's bicubic kernel has other borders."""
    _check_image(call, targets)
    result = call.tensor(0)
    for axis, target in ((3, targets[3]), (2, targets[2])):
        if target.is_open:
            call.refuse("resizes an open axis by cubic weights")
        size, count, factor = target.numbers[0]
        weights = cubic_weights(size, count, factor, place, coefficient)
        if weights is None:
            call.refuse(f"finds its places by {place!r}")
        if size == count and np.array_equal(weights, np.eye(size)):
            continue
        matrix = weights.astype(np.float32) if axis == 2 else weights.T.astype(np.float32)
        shape = (1, 1, *matrix.shape)
        node = call.layers.tensor(Stored(matrix.reshape(shape), f"{call.name}_weights_{axis}"))
        batch = [call.size(0, 0), call.size(0, 1)]
        shapes = [(*own[:2], *matrix.shape) for own in call.shapes(0)]
        node = call.expanded(node, [*batch, *matrix.shape], shapes, name=f"{call.name}_weights_{axis}")
        pair = (node, result) if axis == 2 else (result, node)
        result = call.function(F.matmul, *pair, name=f"{call.name}_{'rows' if axis == 2 else 'columns'}")
    return result


def cubic_weights(size: int, target: int, factor: float, place: str, coefficient: float) -> np.ndarray | None:
    """Returns the weights of cubic resizing along an axis, by ONNX's definition (Keys 1981).

    Args:
        size: the size of the axis.
        target: the size of the result.
        factor: the scale of the axis.
        place: ``coordinate_transformation_mode``.
        coefficient: ``cubic_coeff_a``.

    Returns:
        float64, target x size; None for a mode that is not known. Places beyond the ends count as the ends.
    """
    source = source_places(size, target, factor, place)
    if source is None:
        return None
    first = np.floor(source).astype(np.int64)
    weights = np.zeros((target, size))
    for tap in range(-1, 3):
        distance = np.abs(source - (first + tap))
        near = ((coefficient + 2) * distance - (coefficient + 3)) * distance**2 + 1
        far = coefficient * (((distance - 5) * distance + 8) * distance - 4)
        np.add.at(
            weights,
            (np.arange(target), np.clip(first + tap, 0, size - 1)),
            np.where(distance <= 1, near, far),
        )
    return weights


def _interpolated(call: Call, image: Sequence[_Target], **options: Any) -> Any:
    """Resizes to fixed sizes, by fixed factors, or to sizes that the graph computes."""
    if not any(target.is_open for target in image):
        return call.function(
            F.nn.interpolate, call.tensor(0), size=tuple(x.numbers[0][1] for x in image), **options
        )
    if all(target.factor is not None for target in image):
        factors = tuple(float(target.factor or 1) for target in image)
        return call.function(F.nn.interpolate, call.tensor(0), scale_factor=factors, **options)
    size = tuple(call.layers.size(target.size) for target in image)
    return call.function(F.nn.interpolate, call.tensor(0), size=size, **options)


def _nearest(call: Call, place: str, nearest: str, image: Sequence[_Target]) -> Any:
    """Picks rows and columns: MegEngine's kernel if it picks the same ones, else by index."""
    whole = (place, nearest) == ("asymmetric", "floor")
    for target in image:
        # By whole factors, all rules that agree here agree for other sizes, too.
        fractions = any(t % n for n, t, _ in target.numbers)
        if target.is_open and target.factor is None and fractions and not whole:
            call.refuse(f"picks places ({place}, {nearest}) that depend on the size of an open axis")
        for size, result, factor in target.numbers:
            picked = nearest_places(size, result, factor, place, nearest)
            kernel = np.minimum(np.floor(np.arange(result) * (size / result)).astype(np.int64), size - 1)
            if picked is None or not np.array_equal(picked, kernel):
                call.refuse(f"picks other places ({place}, {nearest}) than MegEngine's nearest neighbours")
    return _interpolated(call, image, mode="nearest")


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
    source = source_places(size, target, factor, place)
    if source is None:
        return None
    rounded = {
        "floor": np.floor(source),
        "ceil": np.ceil(source),
        "round_prefer_floor": np.ceil(source - 0.5),
        "round_prefer_ceil": np.floor(source + 0.5),
    }.get(nearest)
    return None if rounded is None else np.clip(rounded, 0, size - 1).astype(np.int64)


def source_places(size: int, target: int, factor: float, place: str) -> np.ndarray | None:
    """Returns where each place of the result lies in the input, by ONNX's definition of Resize.

    Args:
        size: the size of the axis.
        target: the size of the result.
        factor: the scale of the axis.
        place: ``coordinate_transformation_mode``.

    Returns:
        float64; None for a mode that is not known.
    """
    x = np.arange(target, dtype=np.float64)
    if place in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / factor - 0.5 if target > 1 or place == "half_pixel" else np.zeros(target)
    if place == "asymmetric":
        return x / factor
    if place == "align_corners":
        return x * (size - 1) / (target - 1) if target > 1 else np.zeros(target)
    return None


LOWERINGS: dict[str, Lowering] = {"Resize": _resize, "Upsample": _upsample}
