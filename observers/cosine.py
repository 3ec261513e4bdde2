"""The range with the largest cosine between the quantized values and the observed ones."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, best_range, dissimilarity
from qtrace.plugins.options import Int

__all__ = ["Cosine"]


class Cosine(HistogramObserver):
    """Chooses the quantizer with the largest cosine between the observed values and the quantized ones.

    Wu et al. 2020, "EasyQuant: Post-training Quantization via Scale Optimization", maximise the cosine of a
    layer's *output* in float and quantized, and go through activation and weight scales in turn. This
    observer takes the cosine of the tensor itself, ``<x, Q(x)> / (|x| |Q(x)|)``, which a histogram gives. It
    needs no second pass and merges exactly, but ignores how much a layer weighs each value.

    A cosine is blind to a common factor, so that with few levels it clips more than ``mse``.

    Options:
        candidates: number of ratios that the first sweep tries.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=1024)] = 64

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return best_range(state, self._scheme, self._options["candidates"], dissimilarity)
