"""The range for what a SiLU reads: least squared error behind it."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.numerics import grid
from qtrace.observers.base import State
from qtrace.observers.statistics.histogram import HistogramObserver
from qtrace.observers.statistics.search import Tables, best_range
from qtrace.plugins.options import Int
from qtrace.scheme import QScheme

__all__ = ["SiluMeanSquaredError"]


class SiluMeanSquaredError(HistogramObserver):
    """Like ``mse``, but the error is that of ``silu(x) = x / (1 + exp(-x))`` of the quantized values.

    Below -5 a SiLU (Elfwing et al. 2018, "Sigmoid-Weighted Linear Units for Neural Network Function
    Approximation") gives nearly nothing: an error there costs nothing, and neither does clipping. So the
    range ends where the function does, with finer steps where it bends. For kernels that round between a
    layer and its SiLU, such as onnxruntime's. Only for tensors that nothing but a SiLU reads.

    Each bin counts as its middle; the search is that of ``mse``.

    Options:
        candidates: how many ratios the first sweep tries.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=1024)] = 64

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        candidates = self._options["candidates"]
        # Channel by channel: the way of the search depends on whether all channels of a group have two signs.
        alone = ({key: array[c : c + 1] for key, array in state.items()} for c in range(len(state["lo"])))
        found = [best_range(part, self._scheme, candidates, _error) for part in alone]
        lo, hi = np.concatenate(found, axis=1)
        return lo, hi


def _error(table: Tables, lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> np.ndarray:
    """The summed squared error behind a SiLU of C channels and K ranges, float64 (C, K)."""
    x = (table.origin + np.arange(table.mass.shape[1]) + 0.5) * table.width
    want = _silu(x)
    scale, zero_point = grid(lo, hi, scheme)
    result = np.empty(scale.shape)
    for k in range(scale.shape[1]):  # one by one: what is computed stays in the cache
        step, zero = scale[:, k : k + 1].astype(np.float64), zero_point[:, k : k + 1]
        integers = np.clip(np.rint(x / step) + zero, scheme.qmin, scheme.qmax)
        error = _silu((integers - zero) * step) - want
        result[:, k] = (table.mass * error * error).sum(axis=1)
    return result


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1.0 + np.exp(np.minimum(-x, 700.0))))
