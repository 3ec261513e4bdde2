"""Exponential moving averages of two quantiles of each batch."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import MovingObserver
from qtrace.plugins.options import Float

__all__ = ["MovingPercentile"]


class MovingPercentile(MovingObserver):
    """Cuts both tails of each batch and averages the remaining ranges, later batches weighing more.

    Of n values of a batch (and channel), ``floor(n * (100 - percentile) / 100)`` are left out at either end:
    exact order statistics, no histogram. So one outlier neither stretches the range, as it would with
    ``moving_average``, nor needs the memory of a histogram, as ``percentile`` does. The percentile is from
    Li et al. 2019, "Fully Quantized Network for Object Detection", section 3.2, the average from Jacob et
    al. 2018, section 3.1. Shards must pass the batch's index in the whole run.

    Options:
        percentile: 51 to 100; 100 is ``moving_average``.
    """

    class Options(MovingObserver.Options):
        percentile: Annotated[Float, Field(ge=51, le=100)] = 99.99

    def _ends(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = x.shape[0] * x.shape[2]
        # Rounded, so that 0.01 percent of 10000 is exactly 1.
        cut = int(np.floor(np.round(count * (100.0 - self._options["percentile"]) / 100.0, 6)))
        if cut == 0:
            return lo, hi
        rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], count)
        ordered = np.partition(rows, (cut, count - 1 - cut), axis=1)
        # + 0.0 makes 0.0 of -0.0: otherwise the sign would depend on the order of the data.
        zero = np.float32(0.0)
        return ordered[:, cut] + zero, ordered[:, count - 1 - cut] + zero
