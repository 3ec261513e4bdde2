"""Training targets at every point of the maps, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import megengine as mge
import megengine.functional as F
import numpy as np

from examples.detector import data
from examples.detector.boxes import points

# The longest side of the boxes that each level is for, and how many strides from its centre a box is learned.
_UP_TO = (16.0, 28.0, np.inf)
_RADIUS = 1.5


@dataclass(frozen=True)
class Targets:
    """The targets of a batch of images.

    Attributes:
        classes: N x points x classes, 1 where there is something.
        positive: indices into the N * points rows that are in a box.
        boxes: for each row of `positive`, its box.
    """

    classes: np.ndarray
    positive: np.ndarray
    boxes: np.ndarray


def assign(boxes: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> Targets:
    """Gives every point the smallest box of its level in whose middle it lies."""
    count = len(points()[0])
    classes = np.zeros((len(boxes), count, len(data.CLASSES)), np.float32)
    positive, truth = [], []
    for image, (own, names) in enumerate(zip(boxes, labels, strict=True)):
        which = _owner(own)
        inside = np.flatnonzero(which >= 0)
        classes[image, inside, names[which[inside]]] = 1
        positive.append(inside + image * count)
        truth.append(own[which[inside]])
    return Targets(classes, np.concatenate(positive).astype(np.int32), np.concatenate(truth))


def _owner(boxes: np.ndarray) -> np.ndarray:
    """For every point the index of its box, or -1."""
    centres, strides = points()
    span = boxes[:, 2:] - boxes[:, :2]
    level = np.searchsorted(_UP_TO, span.max(axis=1))
    fits = strides[:, None] == np.array([4, 8, 16])[level]
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    near = np.abs(centres[:, None] - middle).max(axis=2) < _RADIUS * strides[:, None]
    inner = (centres[:, None] > boxes[:, :2]) & (centres[:, None] < boxes[:, 2:])
    area = np.where(fits & near & inner.all(axis=2), span.prod(axis=1), np.inf)
    return np.where(np.isfinite(area.min(axis=1)), area.argmin(axis=1), -1)


def loss(maps: Sequence[mge.Tensor], targets: Targets) -> mge.Tensor:
    """Focal loss of the classes, GIoU loss of the boxes, cross entropy of the quality."""
    count = max(len(targets.positive), 1)
    classes = _flatten_maps(maps, 0)
    total = _focal(
        classes.reshape(-1, classes.shape[2]), mge.Tensor(targets.classes.reshape(-1, classes.shape[2]))
    )
    rows = mge.Tensor(targets.positive)
    sides = F.relu(_flatten_maps(maps, 1).reshape(-1, 4)[rows])
    overlap, giou = _giou(sides, targets)
    quality = _flatten_maps(maps, 2).reshape(-1)[rows]
    sure = F.nn.binary_cross_entropy(quality, overlap.detach(), reduction="sum")
    return (4 * total + 2 * (1 - giou).sum() + sure) / count


def _flatten_maps(maps: Sequence[mge.Tensor], kind: int) -> mge.Tensor:
    parts = [F.flatten(m, 2) for m in maps[kind::3]]
    return F.transpose(F.concat(parts, axis=2), (0, 2, 1))


def _focal(logits: mge.Tensor, truth: mge.Tensor, alpha: float = 0.25, gamma: float = 2.0) -> mge.Tensor:
    p = F.sigmoid(logits)
    right = p * truth + (1 - p) * (1 - truth)
    weight = (alpha * truth + (1 - alpha) * (1 - truth)) * (1 - right) ** gamma
    entropy = F.relu(logits) - logits * truth + F.log(1 + F.exp(-F.abs(logits)))
    return (weight * entropy).sum()


def _giou(sides: mge.Tensor, targets: Targets) -> tuple[mge.Tensor, mge.Tensor]:
    """IoU and generalized IoU of predicted distances with the boxes, relative to each point."""
    centres, strides = points()
    at = targets.positive % len(centres)
    truth = np.concatenate([centres[at] - targets.boxes[:, :2], targets.boxes[:, 2:] - centres[at]], axis=1)
    true = mge.Tensor(truth / strides[at, None])
    inner, outer = F.minimum(sides, true), F.maximum(sides, true)
    common = (inner[:, 0] + inner[:, 2]) * (inner[:, 1] + inner[:, 3])
    hull = (outer[:, 0] + outer[:, 2]) * (outer[:, 1] + outer[:, 3])
    areas = [(s[:, 0] + s[:, 2]) * (s[:, 1] + s[:, 3]) for s in (sides, true)]
    union = areas[0] + areas[1] - common
    overlap = common / F.maximum(union, 1e-6)
    return overlap, overlap - (hull - union) / F.maximum(hull, 1e-6)
