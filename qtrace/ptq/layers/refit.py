"""Ridge regression that fits a layer's weight to its quantized inputs, with a validated damping.

A quantized layer reads ``X~``, which carries the errors of the layers before it, and should give the output
of the float layer for X. The best weight is not W but ``W + D``, where D is the regression of the residual
``Y - W X~`` on ``X~``. D is damped, since the samples are few (Hoerl and Kennard 1970, "Ridge Regression").
Weights that compensate errors of their inputs as well are called "asymmetric" reconstruction (Nagel et al.
2020, AdaRound, section 3.3; Li et al. 2025, "GPTAQ").
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from qtrace.process.together import Together
from qtrace.ptq.layers.second_order import SecondMoments, add_to_diagonals

__all__ = ["DAMPINGS", "correction", "ridge"]

# As shares of the mean of the diagonal; the first ones change hardly anything.
DAMPINGS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)
_MIDDLE = 2  # the damping that is tried first

# Outputs whose errors choose the damping, which is one number for all: evenly spaced ones.
_DECIDING = 64


def correction(
    first: SecondMoments, second: SecondMoments, together: Together | None = None
) -> tuple[np.ndarray, float | None]:
    """Computes a correction of a weight, with the damping that is best in two-fold cross-validation.

    The error falls with the damping and rises again where it is too small: it is followed from the middle of
    `DAMPINGS` to its lowest point.

    Args:
        first: the sums of one half of the samples, about the means if a bias takes these.
        second: the sums of the other half.
        together: the threads that compute; None for this one.

    Returns:
        The correction, float64 (G, D, O), fitted to both halves, and its damping; zeros and None if the best
        damping does not lower the error of the outputs that decide.
    """
    together = together or Together(1)
    some = [_some_outputs(sums) for sums in (first, second)]
    pairs = (some, some[::-1])

    @functools.cache
    def error(index: int) -> float:
        return sum(together.map(functools.partial(_crossed, DAMPINGS[index]), pairs))

    best = _MIDDLE
    while best > 0 and math.isinf(error(best)):  # larger ones may not be
        best -= 1
    for step in (1, -1):
        while 0 <= best + step < len(DAMPINGS) and error(best + step) < error(best):
            best += step
    both = first + second
    if not error(best) < 0:
        return np.zeros_like(both.cross), None
    return ridge(both, DAMPINGS[best]), DAMPINGS[best]


def _some_outputs(sums: SecondMoments) -> SecondMoments:
    """Returns the moments of the outputs of each group that choose the damping."""
    apart = max(1, -(-sums.cross.shape[2] // _DECIDING))
    return replace(sums, missed=sums.missed[:, ::apart], cross=sums.cross[:, :, ::apart])


def ridge(sums: SecondMoments, damping: float) -> np.ndarray:
    """Solves for D (G, D, O) that minimizes ``|missed - D read|^2 + damping * mean(diagonal) |D|^2``.

    The damping grows where it is too small for the rounding errors of the sums: the centered moments of
    inputs that hardly change consist of these, and need not be positive definite.
    """
    while True:
        try:
            return _solve(sums, damping)
        except LinAlgError:
            damping *= 10.0


def _solve(sums: SecondMoments, damping: float) -> np.ndarray:
    """Solves as `ridge` does.

    Raises:
        LinAlgError: when a matrix is not positive definite.
    """
    size = sums.square.shape[-1]
    power = np.trace(sums.square, axis1=1, axis2=2) / size
    damped = sums.square.copy()
    add_to_diagonals(damped, np.where(power > 0, power, 1.0) * damping)
    if len(damped) > 1:  # many small systems, of the groups of a convolution
        return np.asarray(np.linalg.solve(damped, sums.cross))
    pairs = zip(damped, sums.cross, strict=True)
    solved = [cho_solve(cho_factor(matrix, lower=True), right) for matrix, right in pairs]
    return np.stack(solved) if solved else np.zeros_like(sums.cross)


def _crossed(damping: float, halves: tuple[SecondMoments, SecondMoments]) -> float:
    """Returns the growth of the squared error on one half by a correction that is fitted to the other one.

    It is infinite where the damping is too small for the rounding errors of the sums; see `ridge`.
    """
    fitted, other = halves
    try:
        return _change(_solve(fitted, damping), other)
    except LinAlgError:
        return math.inf


def _change(fitted: np.ndarray, other: SecondMoments) -> float:
    """Returns the growth of the squared error on the samples of ``other``."""
    return float(np.sum(fitted * (other.square @ fitted - 2 * other.cross)))
