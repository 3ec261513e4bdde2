"""The range that quantizes the observed values with the least squared error."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, best_range
from qtrace.plugins.options import Int

__all__ = ["MeanSquaredError"]


class MeanSquaredError(HistogramObserver):
    """Trades clipping against resolution: the quantizer of this scheme with the least squared error.

    The error comes from the whole quantizer, rounding, clipping and rounded zero point included, computed
    from a histogram in closed form (`qtrace.observers.statistics`).

    Options:
        candidates: number of ratios that the first sweep tries.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=1024)] = 64

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return best_range(state, self._scheme, self._options["candidates"])
