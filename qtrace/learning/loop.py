"""The loop of everything that learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from qtrace.errors import QtraceError

__all__ = ["Descent", "descend"]


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
