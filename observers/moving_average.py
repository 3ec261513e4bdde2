"""Exponential moving averages of the smallest and the largest value of each batch."""

from __future__ import annotations

import numpy as np

from qtrace.observers.base import MovingObserver

__all__ = ["MovingAverage"]


class MovingAverage(MovingObserver):
    """Averages the ranges of batches, later ones weighing more: ``v <- momentum * v + (1 - momentum) * new``.

    The method follows Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", section 3.1. Shards must pass the batch's index in the whole run.
    """

    def _ends(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return lo, hi
