"""Dense detectors on a pyramid: RetinaNet, FreeAnchor, FCOS and ATSS."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

from tests.zoo.detectors.anchors import Anchors, as_rows, decode_distances, decode_offsets, points
from tests.zoo.detectors.blocks import Backbone, Pyramid

__all__ = ["Atss", "Fcos", "FreeAnchor", "RetinaNet"]

STRIDES = (8, 16, 32, 64, 128)
CLASSES = 3
CHANNELS = 8


def _pyramid() -> Pyramid:
    return Pyramid(Backbone(), ("res3", "res4", "res5"), CHANNELS, pooled_top=False)


def _tower(depth: int, groups: int = 0) -> M.Sequential:
    layers: list[M.Module] = []
    for _ in range(depth):
        layers.append(M.Conv2d(CHANNELS, CHANNELS, 3, padding=1))
        if groups:
            layers.append(M.GroupNorm(groups, CHANNELS))
        layers.append(M.ReLU())
    return M.Sequential(*layers)


class BoxHead(M.Module):
    """RetinaNet's head: two towers and two last layers, the same for every level."""

    def __init__(self, anchors: int, depth: int = 2) -> None:
        super().__init__()
        self.cls_subnet, self.bbox_subnet = _tower(depth), _tower(depth)
        self.cls_score = M.Conv2d(CHANNELS, anchors * CLASSES, 3, padding=1)
        self.bbox_pred = M.Conv2d(CHANNELS, anchors * 4, 3, padding=1)

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, offsets = [], []
        for x in maps:
            logits.append(self.cls_score(self.cls_subnet(x)))
            offsets.append(self.bbox_pred(self.bbox_subnet(x)))
        return logits, offsets


class RetinaNet(M.Module):
    """Anchors on five levels; either the head's maps or decoded boxes and scores."""

    def __init__(self, infer: bool = False) -> None:
        super().__init__()
        self.infer = infer
        self.anchors = Anchors(STRIDES, (0.5, 1.0, 2.0))
        self.backbone = _pyramid()
        self.head = BoxHead(3)

    def forward(self, x: Tensor) -> Any:
        maps = self.backbone(x)
        logits, offsets = self.head(maps)
        if not self.infer:
            return logits, offsets
        scores = F.concat([as_rows(t, CLASSES) for t in logits], axis=1)
        deltas = F.concat([as_rows(t, 4) for t in offsets], axis=1)
        boxes = decode_offsets(F.concat(self.anchors(maps), axis=0), deltas)
        return boxes, F.sigmoid(scores)


class FreeAnchor(RetinaNet):
    """RetinaNet with its training graph: a bag likelihood over the overlaps with given boxes."""

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        maps = self.backbone(x)
        logits, offsets = self.head(maps)
        scores = F.sigmoid(F.concat([as_rows(t, CLASSES) for t in logits], axis=1))
        deltas = F.concat([as_rows(t, 4) for t in offsets], axis=1)
        boxes = decode_offsets(F.concat(self.anchors(maps), axis=0), deltas)
        overlaps = _overlaps(boxes, targets)
        weight = overlaps / F.maximum(overlaps.max(axis=1, keepdims=True), 1e-6)
        likelihood = F.expand_dims(F.max(scores, axis=2), 2) * weight
        bag = F.sum(likelihood * weight, axis=1) / (F.sum(weight, axis=1) + 1e-6)
        loss = -F.log(F.clip(bag, 1e-4, 1.0)).mean()
        return {"loss": loss, "overlaps": overlaps, "scores": scores}


def _overlaps(boxes: Tensor, targets: Tensor) -> Tensor:
    """Intersection over union of boxes (N, K, 4) and targets (N, T, 4): (N, K, T)."""
    left, right = F.expand_dims(boxes, 2), F.expand_dims(targets, 1)
    low = F.maximum(left[..., :2], right[..., :2])
    high = F.minimum(left[..., 2:], right[..., 2:])
    sides = F.maximum(high - low, 0.0)
    common = sides[..., 0] * sides[..., 1]
    return common / (_area(left) + _area(right) - common)


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


class Scale(M.Module):
    """A factor that is learned."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.scale = mge.Parameter(np.array([value], np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class PointHead(M.Module):
    """FCOS's head: towers with GroupNorm, a factor a level, and a third map for centerness.

    With ``vector`` the factors are one parameter that is indexed, else a module each.
    """

    def __init__(self, depth: int = 2, vector: bool = True) -> None:
        super().__init__()
        self.vector = vector
        self.cls_subnet, self.bbox_subnet = _tower(depth, groups=4), _tower(depth, groups=4)
        self.cls_score = M.Conv2d(CHANNELS, CLASSES, 3, padding=1)
        self.bbox_pred = M.Conv2d(CHANNELS, 4, 3, padding=1)
        self.ctrness = M.Conv2d(CHANNELS, 1, 3, padding=1)
        if vector:
            self.scale_list = mge.Parameter(np.ones(len(STRIDES), np.float32))
        else:
            self.scales = [Scale() for _ in STRIDES]

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        logits, distances, centers = [], [], []
        for index, (x, stride) in enumerate(zip(maps, STRIDES, strict=True)):
            logits.append(self.cls_score(self.cls_subnet(x)))
            tower = self.bbox_subnet(x)
            centers.append(self.ctrness(tower))
            distances.append(self.regress(self.bbox_pred(tower), index, stride))
        return logits, distances, centers

    def regress(self, x: Tensor, index: int, stride: int) -> Tensor:
        if self.vector:
            return F.relu(x * self.scale_list[index]) * stride
        return self.scales[index](x)


class Fcos(M.Module):
    """Points on five levels; either the head's maps or boxes and scores."""

    def __init__(self, infer: bool = False) -> None:
        super().__init__()
        self.infer = infer
        self.backbone = _pyramid()
        self.head = PointHead()

    def forward(self, x: Tensor) -> Any:
        maps = self.backbone(x)
        logits, distances, centers = self.head(maps)
        if not self.infer:
            return {"logits": logits, "distances": distances, "centers": centers}
        scores = F.sigmoid(_rows(logits, CLASSES)) * F.sigmoid(_rows(centers, 1))
        centres = F.concat(points(maps, STRIDES), axis=0)
        return decode_distances(centres, _rows(distances, 4)), F.sqrt(scores)


class Atss(M.Module):
    """FCOS's head with one anchor a cell."""

    def __init__(self, infer: bool = False) -> None:
        super().__init__()
        self.infer = infer
        self.anchors = Anchors(STRIDES, (1.0,), (8.0,))
        self.backbone = _pyramid()
        self.head = PointHead(vector=False)

    def forward(self, x: Tensor) -> Any:
        maps = self.backbone(x)
        logits, offsets, centers = (
            _rows(t, size) for t, size in zip(self.head(maps), (CLASSES, 4, 1), strict=True)
        )
        if not self.infer:
            return [logits, offsets, centers]
        boxes = decode_offsets(F.concat(self.anchors(maps), axis=0), offsets)
        return boxes, F.sqrt(F.sigmoid(logits) * F.sigmoid(centers))


def _rows(maps: list[Tensor], values: int) -> Tensor:
    return F.concat([as_rows(t, values) for t in maps], axis=1)
