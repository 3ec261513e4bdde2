"""The clipping range that is best for a Gaussian or a Laplacian, only from mean and spread."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import lambertw, ndtr

from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, moments

__all__ = ["AnalyticalClipping"]

# Where b / sigma of a sample makes both distributions equally likely: sqrt(pi / (2 e)).
_EQUALLY_LIKELY = float(np.sqrt(np.pi / (2.0 * np.e)))


class AnalyticalClipping(HistogramObserver):
    """ACIQ: Banner et al. 2019, "Post training 4-bit quantization of convolutional networks", section 3.1.

    The method assumes that the values follow a Laplacian or a Gaussian. Its clipping value of least squared
    error is a known multiple of ``b = E|x - mu|`` or of sigma. It depends on the number of levels only (see
    `laplace` and `gauss`). The range is steadier than from a search, also with few values, and it is wrong if
    the values follow neither distribution.

    A tensor with one sign (after a ReLU) is treated as one half of a distribution around 0. The centre is 0
    for symmetric schemes, the mean for others. Exact zeros do not count, since they make no error. The range
    stays within the observed one.

    Options:
        distribution: ``gauss``, ``laplace``, or ``auto`` for the likelier of both.
    """

    class Options(HistogramObserver.Options):
        distribution: Literal["auto", "gauss", "laplace"] = "auto"

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        scheme = self._scheme
        one_sided = (lo >= 0.0) | (hi <= 0.0)
        statistics = moments(state, about_zero=one_sided | scheme.symmetric, zeros=False)
        centre = np.where(one_sided | scheme.symmetric, 0.0, statistics.mean)
        # Steps of the whole distribution; they are doubled if all of them lie on one side of it.
        steps = scheme.qmax - scheme.qmin
        doubled = 2 * (scheme.qmax - scheme.symmetric_zero_point if scheme.symmetric else steps)
        by_gauss, by_laplace = (
            np.where(one_sided | scheme.symmetric, form(doubled), form(steps)) * spread
            for form, spread in ((gauss, statistics.deviation), (laplace, statistics.absolute))
        )
        distribution = self._options["distribution"]
        if distribution == "auto":
            is_gauss = statistics.absolute > _EQUALLY_LIKELY * statistics.deviation
        else:
            is_gauss = np.full(lo.shape, distribution == "gauss")
        reach = np.where(is_gauss, by_gauss, by_laplace)
        return np.clip(centre - reach, lo, hi), np.clip(centre + reach, lo, hi)


def laplace(steps: int) -> float:
    """Returns the clipping value of least squared error for a Laplacian, in units of b.

    ``MSE(a) = 2 exp(-a) + (2 a / steps)**2 / 12`` has its minimum where ``a exp(a) = 3 steps**2``. With
    ``steps = 2**M`` this is 2.83, 3.89, 5.03 for M = 2, 3, 4, as in the paper.

    Args:
        steps: number of steps in the range [-a, a].
    """
    return float(lambertw(3.0 * steps * steps).real)


@lru_cache(maxsize=64)
def gauss(steps: int) -> float:
    """Returns the clipping value of least squared error for a Gaussian, in units of sigma.

    ``MSE(a)`` is ``2 int_a^inf (x - a)**2 phi(x) dx + (2 a / steps)**2 / 12``. Its derivative is 0 where
    ``2 (phi(a) - a Q(a)) = a / (3 steps**2)``, Q being the mass above. With ``steps = 2**M`` this is 1.71,
    2.15, 2.55 for M = 2, 3, 4, as in the paper.

    Args:
        steps: number of steps in the range [-a, a].
    """

    def slope(a: float) -> float:
        density = np.exp(-a * a / 2.0) / np.sqrt(2.0 * np.pi)
        return a / (3.0 * steps * steps) - 2.0 * (density - a * float(ndtr(-a)))

    return float(brentq(slope, 0.0, 40.0, xtol=1e-12))
