"""The range that LSQ+ begins with: three standard deviations around the mean."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, moments
from qtrace.plugins.options import Float

__all__ = ["LSQPlusInitialization"]


class LSQPlusInitialization(HistogramObserver):
    """``mean - sigmas * sigma`` to ``mean + sigmas * sigma``, within the observed range.

    Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable offsets and better
    initialization", section 3.2, for weights: a symmetric scheme gets the scale
    ``max(|mean - 3 sigma|, |mean + 3 sigma|) / qmax``. For activations the paper looks for the least squared
    error, as ``mse`` does. The paper does not limit the range to the observed one, beyond which levels
    are wasted.

    Options:
        sigmas: number of standard deviations.
    """

    class Options(HistogramObserver.Options):
        sigmas: Annotated[Float, Field(ge=0.5, le=20)] = 3.0

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        statistics = moments(state)
        reach = self._options["sigmas"] * statistics.deviation
        return np.clip(statistics.mean - reach, lo, hi), np.clip(statistics.mean + reach, lo, hi)
