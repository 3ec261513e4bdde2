"""The range that quantizes what was seen with the least squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qtrace.observers.base import Option, State
from qtrace.observers.statistics.histogram import HISTOGRAM, HistogramObserver
from qtrace.observers.statistics.search import best_range

__all__ = ["MeanSquaredError"]


class MeanSquaredError(HistogramObserver):
    """Trades clipping against resolution: the quantizer of this scheme with the least squared error.

    The error is that of the whole quantizer, rounding, clipping and rounded zero point included, computed
    from a histogram in closed form (`qtrace.observers.statistics.search`).

    Options:
        bins: the range is resolved by `bins` to ``2 * bins`` bins.
        sample: one value of so many is counted, where a batch has enough of them.
        candidates: how many ratios the first sweep tries.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {**HISTOGRAM, "candidates": Option(64, 8, 1024)}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return best_range(state, self._scheme, int(self._options["candidates"]))
