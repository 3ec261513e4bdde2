"""Exponential moving averages of the smallest and the largest value of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qtrace.observers.base import Option
from qtrace.observers.statistics.moving import MOMENTUM, MovingObserver

__all__ = ["MovingAverage"]


class MovingAverage(MovingObserver):
    """Averages the ranges of batches, later ones weighing more: ``v <- momentum * v + (1 - momentum) * new``.

    The method is that of Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", section 3.1. Shards must pass the batch's index in the whole run.

    Options:
        momentum: 0 (only the last batch) to 1 (only the first).
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {"momentum": MOMENTUM}

    def _ends(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return lo, hi
