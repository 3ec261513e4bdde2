"""The rules for a run that diverges: it returns to the best state, with smaller learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Retreat", "Retreats"]

_DIVERGED = 3.0  # held-back error or mean loss, relative to the start
_LOSS_WINDOW = 10  # steps over which the loss is averaged
_RATE_FACTOR = 0.25  # of each retreat
_MAX_RETREATS = 4


@dataclass(frozen=True)
class Retreat:
    """A return to the best state.

    Attributes:
        step: number of steps after which the run diverged.
        back_to: number of steps after which the best state was reached.
        factor: the factor of the learning rates from then on.
        reason: the error or loss that showed the divergence, as a clause.
    """

    step: int
    back_to: int
    factor: float
    reason: str

    def __str__(self) -> str:
        """Formats the retreat as a sentence without a period."""
        target = f"the state after step {self.back_to}" if self.back_to else "the start"
        return f"{self.reason}: back to {target}, learning rates times {self.factor:g}"


class Retreats:
    """Decides from the loss and the held-back error when a run returns to its best state.

    Args:
        error: the held-back error at the start.
        losses: the losses of several batches at the start.
    """

    def __init__(self, error: float, losses: Sequence[float]) -> None:
        self.all: list[Retreat] = []
        self._error, self._loss = error, float(np.mean(losses))

    @property
    def factor(self) -> float:
        """The factor of the learning rates."""
        return self.all[-1].factor if self.all else 1.0

    @property
    def exhausted(self) -> bool:
        """Whether the learning rates were lowered as often as is allowed."""
        return len(self.all) >= _MAX_RETREATS

    def reason(self, completed: int, losses: Sequence[float], error: float | None) -> str:
        """Returns why the run diverges; "" if it does not.

        Args:
            completed: number of completed steps.
            losses: the loss of each completed step.
            error: the held-back error after these steps; None if it was not evaluated.
        """
        if error is not None and error > _DIVERGED * self._error:
            return (
                f"after step {completed} the held-back error is {error:.3g}, at the start {self._error:.3g}"
            )
        since = self.all[-1].step if self.all else 0
        if completed - since < _LOSS_WINDOW:
            return ""
        # The first loss counts too: kept BatchNorms use the statistics of the batch in a step.
        before, now = max(self._loss, losses[0]), float(np.mean(losses[completed - _LOSS_WINDOW : completed]))
        if now <= _DIVERGED * before:
            return ""
        mean = f"the mean loss of {_LOSS_WINDOW} steps"
        return f"up to step {completed} {mean} is {now:.3g}, at the start {before:.3g}"

    def retreat(self, step: int, back_to: int, reason: str) -> Retreat:
        """Records a return to the best state and lowers the learning rates."""
        self.all.append(Retreat(step, back_to, self.factor * _RATE_FACTOR, reason))
        return self.all[-1]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns all retreats as arrays."""
        rows = [[r.step, r.back_to, r.factor] for r in self.all]
        reasons = np.frombuffer("\n".join(r.reason for r in self.all).encode(), np.uint8)
        return {"rows": np.array(rows, np.float64).reshape(-1, 3), "reasons": reasons}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        reasons = np.asarray(state["reasons"]).tobytes().decode().split("\n")
        rows = zip(state["rows"], reasons, strict=False)
        self.all = [Retreat(int(step), int(to), float(f), reason) for (step, to, f), reason in rows]
