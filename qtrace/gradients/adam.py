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

    def step(self, gradient: np.ndarray, factor: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``; ``factor`` scales the learning rate."""
        self.steps += 1
        self.first += 0.1 * (gradient - self.first)
        self.second += 0.001 * (gradient * gradient - self.second)
        first = self.first / (1.0 - 0.9**self.steps)
        second = self.second / (1.0 - 0.999**self.steps)
        self.value -= self.lr * factor * first / (np.sqrt(second) + 1e-8)

    @staticmethod
    def square_sum(values: np.ndarray) -> float:
        """Returns the sum of squares, summed in float64."""
        return float(np.sum(np.square(values, dtype=np.float64)))
