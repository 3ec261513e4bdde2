"""The range that LSQ+ begins with: three standard deviations around the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qtrace.observers.base import Option, State
from qtrace.observers.statistics.histogram import HISTOGRAM, HistogramObserver
from qtrace.observers.statistics.moments import moments

__all__ = ["LSQPlusInitialization"]


class LSQPlusInitialization(HistogramObserver):
    """``mean - sigmas * sigma`` to ``mean + sigmas * sigma``, within what was seen.

    Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable offsets and better
    initialization", section 3.2, for weights: a symmetric scheme gets the scale
    ``max(|mean - 3 sigma|, |mean + 3 sigma|) / qmax``. For activations the paper looks for the least squared
    error, which is ``mse`` here. The paper does not limit the range to what was seen; beyond it levels
    would be wasted.

    Options:
        sigmas: how many standard deviations.
        bins: the moments are those of a histogram of `bins` to ``2 * bins`` bins.
        sample: one value of so many is counted, where a batch has enough of them.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {"sigmas": Option(3.0, 0.5, 20.0), **HISTOGRAM}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        found = moments(state)
        reach = self._options["sigmas"] * found.deviation
        return np.clip(found.mean - reach, lo, hi), np.clip(found.mean + reach, lo, hi)
