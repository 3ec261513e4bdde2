"""The range whose quantized values point the same way as the true ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qtrace.observers.base import Option, State
from qtrace.observers.statistics.histogram import HISTOGRAM, HistogramObserver
from qtrace.observers.statistics.search import best_range, dissimilarity

__all__ = ["Cosine"]


class Cosine(HistogramObserver):
    """The quantizer of this scheme with the largest cosine between what was seen and what it makes of it.

    Wu et al. 2020, "EasyQuant: Post-training Quantization via Scale Optimization", maximise the cosine of a
    layer's *output* in float and quantized, and go through activation and weight scales in turn. This is
    the cosine of the tensor itself, ``<x, Q(x)> / (|x| |Q(x)|)``, which is what a histogram knows: it needs
    no second pass and merges exactly, but does not see which values a layer weighs more.

    A cosine does not notice a common factor, so that with few levels more is clipped than by ``mse``.

    Options:
        bins: the range is resolved by `bins` to ``2 * bins`` bins.
        sample: one value of so many is counted, where a batch has enough of them.
        candidates: how many ratios the first sweep tries.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {**HISTOGRAM, "candidates": Option(64, 8, 1024)}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return best_range(state, self._scheme, int(self._options["candidates"]), dissimilarity)
