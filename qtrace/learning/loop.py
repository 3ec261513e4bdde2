"""The loop of everything that learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def ends(self, completed: int) -> bool:
        """Looks at the state after ``completed`` steps; returns whether to end."""


def descend(descent: Descent, steps: range) -> None:
    """Takes steps until the last one, or until the descent ends.

    Args:
        descent: what learns.
        steps: the numbers of the steps.

    Raises:
        QtraceError: when a loss is not finite; see `Descent.fail`.
    """
    for step in steps:
        losses, gradients = descent.compute(step)
        if not math.isfinite(losses[0]):
            raise descent.fail(losses[0], step)
        descent.move(step, losses, gradients)
        if descent.ends(step + 1):
            return
