"""Weights fitted to what a quantized layer really reads: ridge regression with a damping that is validated.

A quantized layer reads ``X~``, which carries the errors of the layers before it, and should give what the
float one gives for X. The weight that comes closest is not W: it is ``W + D`` with D the regression of what W
misses, ``Y - W X~``, on ``X~``. As there are few samples, D is damped (Hoerl and Kennard 1970, "Ridge
Regression"). That weights which are rounded should make up for errors of their inputs as well is "asymmetric"
reconstruction (Nagel et al. 2020, AdaRound, section 3.3; Li et al. 2025, "GPTAQ").
"""

from __future__ import annotations

import numpy as np

from qtrace.ptq.layers.second_order import Moments

__all__ = ["DAMPINGS", "correction", "ridge"]

# As shares of the mean of the diagonal; the first ones change hardly anything.
DAMPINGS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)


def correction(first: Moments, second: Moments) -> tuple[np.ndarray, float | None]:
    """What to add to a weight, by the damping that serves best on the samples that it was not fitted to.

    Args:
        first: of one half of the samples, about the means where a bias takes these.
        second: of the other half.

    Returns:
        float64 (G, D, O), fitted to both halves, and its damping; zeros and None where no damping tried makes
        the error of the other half smaller.
    """
    least, chosen = 0.0, None
    for damping in DAMPINGS:  # less and less, until it is too little
        error = _change(ridge(first, damping), second) + _change(ridge(second, damping), first)
        if not error < least:
            break
        least, chosen = error, damping
    both = first + second
    return (np.zeros_like(both.cross), None) if chosen is None else (ridge(both, chosen), chosen)


def ridge(found: Moments, damping: float) -> np.ndarray:
    """The D (G, D, O) that minimises ``|missed - D read|^2 + damping * mean(diagonal) |D|^2``."""
    size = found.square.shape[-1]
    power = np.trace(found.square, axis1=1, axis2=2) / size
    damped = found.square + np.where(power > 0, damping * power, 1.0)[:, None, None] * np.eye(size)
    return np.asarray(np.linalg.solve(damped, found.cross))


def _change(fitted: np.ndarray, other: Moments) -> float:
    """By how much the squared error of the samples of ``other`` grows."""
    return float(np.sum(fitted * (other.square @ fitted - 2 * other.cross)))
