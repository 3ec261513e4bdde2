"""The loop of what learns: its steps, its early end, and a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qtrace.errors import QtraceError, TrainingError
from qtrace.learning import Adam, descend


class Parabola:
    """Minimizes ``(x - 3)**2``."""

    def __init__(self, spoiled: int = -1) -> None:
        self.adam, self.spoiled = Adam(np.zeros(1), 0.1), spoiled
        self.calls: list[tuple[str, int]] = []

    def compute(self, step: int) -> tuple[list[float], list[Any]]:
        self.calls.append(("compute", step))
        x = self.adam.value
        return [math.nan if step == self.spoiled else float((x[0] - 3) ** 2)], [2 * (x - 3)]

    def move(self, step: int, losses: list[float], gradients: Sequence[Any]) -> None:
        self.calls.append(("move", step))
        self.adam.step(gradients[0])

    def fail(self, loss: float, step: int) -> QtraceError:
        return TrainingError(f"the loss is {loss} in step {step}")


def test_descend_reaches_the_minimum() -> None:
    parabola = Parabola()
    descend(parabola, range(300))
    assert parabola.adam.value == pytest.approx(3.0, abs=1e-3)


def test_it_goes_on_from_a_step_and_ends_early() -> None:
    parabola = Parabola()
    descend(parabola, range(5, 20), lambda completed: completed == 7)
    assert parabola.calls == [(name, step) for step in (5, 6) for name in ("compute", "move")]


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    parabola = Parabola(spoiled=1)
    with pytest.raises(TrainingError, match="the loss is nan in step 1"):
        descend(parabola, range(3))
    assert parabola.calls[-1] == ("compute", 1)
