"""Exponential moving averages of the smallest and the largest value of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qtrace.observers.base import Layout, Observer, Option, State

__all__ = ["MovingAverage"]


class MovingAverage(Observer):
    """Averages the ranges of batches, later ones weighing more: ``v <- momentum * v + (1 - momentum) * new``.

    The moving average is that of Jacob et al. 2018, "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference", section 3.1; it is freed of the weight of its start by
    dividing by ``1 - momentum**n`` (Kingma & Ba 2015, "Adam", section 3).

    An average cannot be merged, its batches can: their ranges are kept, ordered by batch index, and averaged
    when the range is asked for. Shards must pass the index in the whole run as ``batch``; batches of one
    index keep the order in which they were observed or merged.

    Options:
        momentum: 0 (only the last batch) to 1 (the plain mean).
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {"momentum": Option(0.9, 0.0, 1.0)}

    def _layout(self) -> Layout:
        return {
            "batch": (np.int64, ("R",)),
            "lo": (np.float32, ("R", "C")),
            "hi": (np.float32, ("R", "C")),
        }

    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        return {"batch": np.array([batch], np.int64), "lo": lo[None], "hi": hi[None]}

    def _combine(self, first: State, second: State) -> State:
        rows = {key: np.concatenate([first[key], second[key]]) for key in first}
        order = np.argsort(rows["batch"], kind="stable")
        return {key: array[order] for key, array in rows.items()}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        age = np.arange(state["batch"].size - 1, -1, -1, dtype=np.float64)
        weight = np.power(self._options["momentum"], age)
        # Dividing by the sum is the correction for the start: it is (1 - momentum**n) / (1 - momentum).
        weight = (weight / weight.sum())[:, None]
        lo = np.sum(weight * state["lo"].astype(np.float64), axis=0)
        hi = np.sum(weight * state["hi"].astype(np.float64), axis=0)
        return lo, hi
