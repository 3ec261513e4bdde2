"""The loop of everything that learns, and Adam on numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from qtrace.errors import QtraceError

__all__ = ["Adam", "Descent", "descend"]


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


class Descent(Protocol):
    """What learns, as `descend` sees it."""

    def compute(self, step: int) -> tuple[list[float], Sequence[np.ndarray | None]]:
        """Computes the losses of a step, the first one to minimize, and the gradient of each parameter."""

    def move(self, step: int, losses: list[float], gradients: Sequence[np.ndarray | None]) -> None:
        """Moves the parameters by one step of the optimizer."""

    def fail(self, loss: float, step: int) -> QtraceError:
        """Returns the error for a loss that is not finite."""


def descend(descent: Descent, steps: range, ends: Callable[[int], bool] = lambda completed: False) -> None:
    """Takes steps until the last one, or until ``ends`` says so.

    Args:
        descent: what learns.
        steps: the numbers of the steps.
        ends: gets the number of completed steps after each; returns whether to end.

    Raises:
        QtraceError: when a loss is not finite; see `Descent.fail`.
    """
    for step in steps:
        losses, gradients = descent.compute(step)
        if not math.isfinite(losses[0]):
            raise descent.fail(losses[0], step)
        descent.move(step, losses, gradients)
        if ends(step + 1):
            return
