"""How well text is read and located."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

THRESHOLD = 0.3  # above it, a pixel of the detector's map is text


def edit_distance(a: str, b: str) -> int:
    """Counts the insertions, deletions and substitutions of characters that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def line_accuracy(read: Sequence[str], truth: Sequence[str]) -> float:
    """Returns the percentage of lines that are read without any error."""
    return 100 * sum(a == b for a, b in zip(read, truth, strict=True)) / len(truth)


def character_error_rate(read: Sequence[str], truth: Sequence[str]) -> float:
    """Returns the edits that are needed in all lines, in percent of the characters of ``truth``."""
    edits = sum(edit_distance(a, b) for a, b in zip(read, truth, strict=True))
    return 100 * edits / sum(len(text) for text in truth)


def text_iou(maps: np.ndarray, reference: np.ndarray) -> float:
    """Averages the IoU of the pixels above THRESHOLD over the pages; 1 if both maps have none."""
    a, b = (m.reshape(len(m), -1) > THRESHOLD for m in (maps, reference))
    union = (a | b).sum(axis=1)
    return float(np.where(union == 0, 1.0, (a & b).sum(axis=1) / np.maximum(union, 1)).mean())
