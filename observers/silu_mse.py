"""The range of a SiLU's input that gives the least squared error at its output."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.numerics import grid
from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, Tables, best_range
from qtrace.plugins.options import Int
from qtrace.scheme import QScheme

__all__ = ["SiluMeanSquaredError"]


class SiluMeanSquaredError(HistogramObserver):
    """Like ``mse``, but the error is measured on ``silu(x) = x / (1 + exp(-x))`` of the quantized values.

    Below -5 a SiLU (Elfwing et al. 2018, "Sigmoid-Weighted Linear Units for Neural Network Function
    Approximation") gives nearly nothing: errors and clipping there cost nothing. So the range ends
    there and has finer steps where the function bends. It is meant for kernels that round between a layer and
    its SiLU, such as onnxruntime's, and for tensors whose only consumer is a SiLU.

    Each bin counts as its middle. The search is as for ``mse``.

    Options:
        candidates: number of ratios that the first sweep tries.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=1024)] = 64

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        candidates = self._options["candidates"]
        # Channel by channel: the search of a group depends on whether all its channels have both signs.
        alone = ({key: array[c : c + 1] for key, array in state.items()} for c in range(len(state["lo"])))
        ranges = [best_range(part, self._scheme, candidates, _error) for part in alone]
        lo, hi = np.concatenate(ranges, axis=1)
        return lo, hi


def _error(table: Tables, lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Sums the squared error after a SiLU for C channels and K ranges, float64 (C, K)."""
    x = (table.origin + np.arange(table.mass.shape[1]) + 0.5) * table.width
    reference = _silu(x)
    scale, zero_point = grid(lo, hi, scheme)
    result = np.empty(scale.shape)
    for k in range(scale.shape[1]):  # one by one, so that the arrays stay in the cache
        step, zero = scale[:, k : k + 1].astype(np.float64), zero_point[:, k : k + 1]
        integers = np.clip(np.rint(x / step) + zero, scheme.qmin, scheme.qmax)
        error = _silu((integers - zero) * step) - reference
        result[:, k] = (table.mass * error * error).sum(axis=1)
    return result


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1.0 + np.exp(np.minimum(-x, 700.0))))
