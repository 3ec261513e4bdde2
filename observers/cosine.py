"""The range whose quantized values point the same way as the true ones."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import State
from qtrace.observers.statistics.histogram import HistogramObserver
from qtrace.observers.statistics.search import best_range, dissimilarity
from qtrace.plugins.options import Int

__all__ = ["Cosine"]


class Cosine(HistogramObserver):
    """The quantizer of this scheme with the largest cosine between what was seen and what it makes of it.

    Wu et al. 2020, "EasyQuant: Post-training Quantization via Scale Optimization", maximise the cosine of a
    layer's *output* in float and quantized, and go through activation and weight scales in turn. This is
    the cosine of the tensor itself, ``<x, Q(x)> / (|x| |Q(x)|)``, which is what a histogram knows: it needs
    no second pass and merges exactly, but does not see which values a layer weighs more.

    A cosine does not notice a common factor, so that with few levels more is clipped than by ``mse``.

    Options:
        candidates: how many ratios the first sweep tries.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=1024)] = 64

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return best_range(state, self._scheme, self._options["candidates"], dissimilarity)
