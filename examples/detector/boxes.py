"""From the network's maps to boxes, in numpy: the same for a graph and for a file in a runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from examples.detector import data
from examples.detector.metric import Detections, Precision, average_precision, iou
from examples.detector.net import STRIDES

# From normalized images to the nine maps.
Runner = Callable[[np.ndarray], Sequence[np.ndarray]]

MIN_SCORE, MAX_IOU, MOST = 0.05, 0.6, 50


@lru_cache
def points(size: int = data.SIZE) -> tuple[np.ndarray, np.ndarray]:
    """The centre of every cell of the three levels, n x 2, and its stride, n."""
    centres, strides = [], []
    for stride in STRIDES:
        along = np.arange(0, size, stride) + stride / 2
        y, x = np.meshgrid(along, along, indexing="ij")
        centres.append(np.stack([x, y], axis=-1).reshape(-1, 2))
        strides.append(np.full(x.size, stride))
    return np.concatenate(centres).astype(np.float32), np.concatenate(strides).astype(np.float32)


def flatten_maps(maps: Sequence[np.ndarray], kind: int) -> np.ndarray:
    """The maps of one kind (0 classes, 1 sides, 2 quality) as N x points x channels."""
    parts = [m.reshape(*m.shape[:2], -1) for m in maps[kind::3]]
    return np.concatenate(parts, axis=2).transpose(0, 2, 1)


def decode_boxes(sides: np.ndarray) -> np.ndarray:
    """Boxes from distances in strides: ... x points x 4. A negative distance is none."""
    centres, strides = points()
    away = np.maximum(sides, 0) * strides[:, None]
    return np.concatenate([centres - away[..., :2], centres + away[..., 2:]], axis=-1)


def decode(maps: Sequence[np.ndarray]) -> list[Detections]:
    """The detections of every image of a batch, without duplicates."""
    quality = _sigmoid(flatten_maps(maps, 2))
    scores = np.sqrt(_sigmoid(flatten_maps(maps, 0)) * quality)
    boxes = np.clip(decode_boxes(flatten_maps(maps, 1)), 0, data.SIZE)
    return [_pick(b, s) for b, s in zip(boxes, scores, strict=True)]


def _pick(boxes: np.ndarray, scores: np.ndarray) -> Detections:
    places, labels = np.nonzero(scores > MIN_SCORE)
    best = scores[places, labels]
    order = np.argsort(-best, kind="stable")[:200]
    places, labels, best = places[order], labels[order], best[order]
    distinct = _distinct(boxes[places], labels)[:MOST]
    return Detections(boxes[places[distinct]], best[distinct], labels[distinct])


def _distinct(boxes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Indices without those that overlap a better one of their class."""
    clash = (iou(boxes, boxes) > MAX_IOU) & (labels[:, None] == labels)
    alive = np.ones(len(boxes), bool)
    for index in range(len(boxes)):
        if alive[index]:
            alive[index + 1 :] &= ~clash[index, index + 1 :]
    return np.flatnonzero(alive)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))


def detect(run: Runner, part: data.Part, batch: int = 50) -> list[Detections]:
    """Runs a network on the images of ``part`` and decodes its maps."""
    detections = []
    for start in range(0, len(part), batch):
        detections += decode(run(data.normalize(part.images[start : start + batch])))
    return detections


def evaluate(detections: Sequence[Detections], part: data.Part) -> Precision:
    """Compares detections with the boxes and labels of ``part``."""
    return average_precision(detections, part.boxes, part.labels, len(data.CLASSES))
