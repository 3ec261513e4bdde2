"""Mean average precision as COCO defines it: AP at IoU .50, .55 ... .95, interpolated at 101 recalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Detections:
    """The detections of one image, best first.

    Attributes:
        boxes: n x 4: left, top, right, bottom.
        scores: n.
        labels: n class numbers.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Precision:
    """Average precision.

    Attributes:
        table: thresholds x classes, 0 to 1; NaN for a class that does not occur.
    """

    table: np.ndarray

    @property
    def map(self) -> float:
        """The mean over thresholds and classes, in percent."""
        return 100 * float(np.nanmean(self.table))

    @property
    def ap50(self) -> float:
        """The mean over classes at IoU .50, in percent."""
        return 100 * float(np.nanmean(self.table[0]))


def iou(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of every box with every other: n x m."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(axis=2)
    areas = [np.clip(b[:, 2:] - b[:, :2], 0, None).prod(axis=1) for b in (boxes, others)]
    union = areas[0][:, None] + areas[1][None] - common
    return common / np.maximum(union, 1e-9)


def average_precision(
    detections: Sequence[Detections], boxes: Sequence[np.ndarray], labels: Sequence[np.ndarray], classes: int
) -> Precision:
    """Compares detections with the truth, image by image.

    Args:
        detections: the detections of every image.
        boxes: the true boxes of every image, n x 4.
        labels: their class numbers.
        classes: number of classes.
    """
    table = np.full((len(THRESHOLDS), classes), np.nan)
    for label in range(classes):
        truth = [b[own == label] for b, own in zip(boxes, labels, strict=True)]
        total = sum(len(t) for t in truth)
        if total == 0:
            continue
        hits, scores = [], []
        for image_detections, true in zip(detections, truth, strict=True):
            of_class = np.flatnonzero(image_detections.labels == label)
            of_class = of_class[np.argsort(-image_detections.scores[of_class], kind="stable")]
            hits.append(_matches(iou(image_detections.boxes[of_class], true)))
            scores.append(image_detections.scores[of_class])
        order = np.argsort(-np.concatenate(scores), kind="stable")
        for row, hit in enumerate(np.concatenate(hits, axis=1)):
            table[row, label] = _area(hit[order], total)
    return Precision(table)


def _matches(overlaps: np.ndarray) -> np.ndarray:
    """For each threshold and each detection, best first: whether it finds a box that is still free.

    A detection takes the free box that it overlaps most; every further detection of a box is wrong.
    """
    hits = np.zeros((len(THRESHOLDS), len(overlaps)), bool)
    if overlaps.shape[1] == 0:
        return hits
    for row, threshold in enumerate(THRESHOLDS):
        free = np.ones(overlaps.shape[1], bool)
        for index in np.flatnonzero(overlaps.max(axis=1) >= threshold):
            candidates = np.where(free, overlaps[index], -1.0)
            best = int(candidates.argmax())
            if candidates[best] >= threshold:
                free[best] = False
                hits[row, index] = True
    return hits


def _area(hits: np.ndarray, total: int) -> float:
    """The mean precision at 101 recalls, where precision at a recall is the best one at it or beyond."""
    if len(hits) == 0:
        return 0.0
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    # The slack absorbs the rounding of quotients such as 3 / 10, where a recall is met exactly.
    at = np.searchsorted(right / total + 1e-12, _RECALLS, side="left")
    return float(np.where(at < len(hits), precision[np.minimum(at, len(hits) - 1)], 0.0).mean())
