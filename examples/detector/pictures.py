"""One picture of many: test images side by side as different networks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from examples.detector import data
from examples.detector.metric import Detections

_ZOOM, _GAP, _TITLE = 3, 6, 22
_COLOURS = ((60, 60, 255), (60, 220, 60), (255, 120, 40), (40, 220, 255))  # of the classes, blue first
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def true_detections(part: data.Part) -> list[Detections]:
    """Returns the true boxes and labels as the detections of a perfect network."""
    return [Detections(b, np.ones(len(b)), own) for b, own in zip(part.boxes, part.labels, strict=True)]


def save_grid(
    file: Path,
    part: data.Part,
    columns: Mapping[str, Sequence[Detections]],
    chosen: Sequence[int],
    min_score: float,
) -> None:
    """Writes a PNG with a row for each image and a column for each network.

    Args:
        file: the picture to write.
        part: the images.
        columns: title -> the detections of one network in every image of ``part``.
        chosen: the images to show.
        min_score: the score from which on a box is drawn.
    """
    rows = [_titles(list(columns))]
    for index in chosen:
        cells = [_cell(part.images[index], detections[index], min_score) for detections in columns.values()]
        rows.append(np.hstack([_framed(c) for c in cells]))
    if not cv2.imwrite(str(file), np.vstack([*rows, _legend(rows[0].shape[1])])):
        raise OSError(f"{file} cannot be written.")


def _cell(image: np.ndarray, detections: Detections, min_score: float) -> np.ndarray:
    size = data.SIZE * _ZOOM
    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
    cell = cv2.resize(pixels, (size, size), interpolation=cv2.INTER_NEAREST)
    for box, score, label in zip(detections.boxes, detections.scores, detections.labels, strict=True):
        if score < min_score:
            continue
        left, top, right, bottom = (np.clip(np.rint(box * _ZOOM), 0, size - 1)).astype(int).tolist()
        cv2.rectangle(cell, (left, top), (right, bottom), _COLOURS[label], 2)
        if score < 1:
            at = (left + 2, top + 10 if top < 12 else top - 3)
            for colour, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
                cv2.putText(cell, f"{score:.2f}"[1:], at, _FONT, 0.34, colour, width, cv2.LINE_AA)
    return cell


def _framed(cell: np.ndarray) -> np.ndarray:
    return cv2.copyMakeBorder(cell, 0, _GAP, _GAP // 2, _GAP // 2, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def _titles(names: Sequence[str]) -> np.ndarray:
    wide = data.SIZE * _ZOOM + _GAP
    row = np.full((_TITLE, wide * len(names), 3), 255, np.uint8)
    for index, name in enumerate(names):
        cv2.putText(row, name, (index * wide + _GAP, 16), _FONT, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return row


def _legend(wide: int) -> np.ndarray:
    row = np.full((_TITLE, wide, 3), 255, np.uint8)
    for index, (name, colour) in enumerate(zip(data.CLASSES, _COLOURS, strict=True)):
        left = _GAP + index * 110
        cv2.rectangle(row, (left, 4), (left + 14, 18), colour, -1)
        cv2.putText(row, name, (left + 20, 16), _FONT, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return row
