"""Exponential moving averages of what each batch says about the ends of the range, mergeable in any order."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import Layout, Observer, State
from qtrace.plugins.options import Float, OptionModel

__all__ = ["MovingObserver"]


class MovingObserver(Observer):
    """Abstract: averages the ends of batches, later ones weighing more.

    ``v <- momentum * v + (1 - momentum) * new``. The average begins with the first batch, as in
    MegEngine's ``ExponentialMovingAverageObserver``: of n batches the first weighs
    ``momentum**(n - 1)``, one with ``age`` batches after it ``(1 - momentum) * momentum**age``.

    Averages do not merge, but lists of batches do: the state keeps the ends of each batch, ordered by batch
    index, and `range` averages them. Shards must pass the index in the whole run as ``batch``; batches of
    one index keep the order in which they were observed or merged.

    A subclass defines the ends of a batch in `_ends`.

    Options:
        momentum: 0 (only the last batch) to 1 (only the first).
    """

    class Options(OptionModel):
        momentum: Annotated[Float, Field(ge=0, le=1)] = 0.9

    @abstractmethod
    def _ends(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Measures the ends of one batch, float32 (C,), from the arguments of `_measure`."""

    def _layout(self) -> Layout:
        return {
            "batch": (np.int64, ("R",)),
            "lo": (np.float32, ("R", "C")),
            "hi": (np.float32, ("R", "C")),
        }

    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        low, high = self._ends(x, lo, hi)
        return {"batch": np.array([batch], np.int64), "lo": low[None], "hi": high[None]}

    def _combine(self, first: State, second: State) -> State:
        rows = {key: np.concatenate([first[key], second[key]]) for key in first}
        order = np.argsort(rows["batch"], kind="stable")
        return {key: array[order] for key, array in rows.items()}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        return self._average(lo), self._average(hi)

    def _average(self, rows: np.ndarray) -> np.ndarray:
        """Computes the moving average over the rows of shape (R, C): shape (C,)."""
        momentum = self._options["momentum"]
        average = rows[0]
        for row in rows[1:]:
            average = momentum * average + (1.0 - momentum) * row
        return average
