"""Ridge regression that fits a layer's weight to its quantized inputs, with a validated damping.

A quantized layer reads ``X~``, which carries the errors of the layers before it, and should give the output
of the float layer for X. The best weight is not W but ``W + D``, where D is the regression of the residual
``Y - W X~`` on ``X~``. D is damped, since the samples are few (Hoerl and Kennard 1970, "Ridge Regression").
Weights that compensate errors of their inputs as well are called "asymmetric" reconstruction (Nagel et al.
2020, AdaRound, section 3.3; Li et al. 2025, "GPTAQ").
"""

from __future__ import annotations

import functools

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from qtrace.process.together import Together
from qtrace.ptq.layers.second_order import SecondMoments, add_to_diagonals

__all__ = ["DAMPINGS", "correction", "ridge"]

# As shares of the mean of the diagonal; the first ones change hardly anything.
DAMPINGS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)


def correction(
    first: SecondMoments, second: SecondMoments, together: Together | None = None
) -> tuple[np.ndarray, float | None]:
    """Computes a correction of a weight, with the damping that is best in two-fold cross-validation.

    Args:
        first: the sums of one half of the samples, about the means if a bias takes these.
        second: the sums of the other half.
        together: the threads that compute; None for this one.

    Returns:
        The correction, float64 (G, D, O), fitted to both halves, and its damping; zeros and None if no
        damping lowers the error.
    """
    together, smallest, chosen = together or Together(1), 0.0, None
    for damping in DAMPINGS:  # in falling order, until the error rises
        error = sum(together.map(functools.partial(_crossed, damping), ((first, second), (second, first))))
        if not error < smallest:
            break
        smallest, chosen = error, damping
    both = first + second
    return (np.zeros_like(both.cross), None) if chosen is None else (ridge(both, chosen), chosen)


def ridge(sums: SecondMoments, damping: float) -> np.ndarray:
    """Solves for D (G, D, O) that minimizes ``|missed - D read|^2 + damping * mean(diagonal) |D|^2``."""
    size = sums.square.shape[-1]
    power = np.trace(sums.square, axis1=1, axis2=2) / size
    damped = sums.square.copy()
    add_to_diagonals(damped, np.where(power > 0, damping * power, 1.0))
    if len(damped) > 1:  # many small systems, of the groups of a convolution
        return np.asarray(np.linalg.solve(damped, sums.cross))
    solved = [_solve(matrix, right) for matrix, right in zip(damped, sums.cross, strict=True)]
    return np.stack(solved) if solved else np.zeros_like(sums.cross)


def _solve(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solves a positive definite system, in half the time of a general one.

    The centered moments of constant inputs are rounding errors of the sums, and need not be definite.
    """
    try:
        return np.asarray(cho_solve(cho_factor(matrix, lower=True), right))
    except LinAlgError:
        return np.linalg.solve(matrix, right)


def _crossed(damping: float, halves: tuple[SecondMoments, SecondMoments]) -> float:
    """Returns the growth of the squared error on one half by a correction that is fitted to the other one."""
    fitted, other = halves
    return _change(ridge(fitted, damping), other)


def _change(fitted: np.ndarray, other: SecondMoments) -> float:
    """Returns the growth of the squared error on the samples of ``other``."""
    return float(np.sum(fitted * (other.square @ fitted - 2 * other.cross)))
