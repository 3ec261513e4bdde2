"""Adam on numpy arrays."""

from __future__ import annotations

import numpy as np

__all__ = ["Adam"]


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) for one array, which is changed in place.

    Args:
        value: the array to optimize.
        lr: the learning rate.
    """

    def __init__(self, value: np.ndarray, lr: float | np.ndarray) -> None:
        self.value, self.lr = value, lr
        self.first, self.second, self.steps = np.zeros_like(value), np.zeros_like(value), 0

    def step(self, gradient: np.ndarray, factor: float = 1.0, share: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``.

        Args:
            gradient: the gradient.
            factor: the factor of the learning rate.
            share: the factor of the gradient.
        """
        self.steps += 1
        if share != 1.0:
            gradient = gradient * np.float32(share)
        self.first += 0.1 * (gradient - self.first)
        self.second += 0.001 * (gradient * gradient - self.second)
        first = self.first / (1.0 - 0.9**self.steps)
        second = self.second / (1.0 - 0.999**self.steps)
        self.value -= self.lr * factor * first / (np.sqrt(second) + 1e-8)

    def is_finite(self) -> bool:
        """Returns whether all values are numbers."""
        return bool(np.isfinite(self.value).all())

    @staticmethod
    def square_sum(values: np.ndarray, unit: np.ndarray) -> float:
        """Returns the sum of the squares of ``values * unit``, summed in float64."""
        return float(np.sum(np.square(values * unit, dtype=np.float64)))
