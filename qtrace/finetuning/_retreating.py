"""When a run diverges: back to the best state, with smaller learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Retreat", "Retreats"]

_WORSE = 3.0  # held-back error or mean loss, relative to the start
_LONG = 10  # steps over which the loss is averaged
_SLOWER = 0.25
_MOST = 4


@dataclass(frozen=True)
class Retreat:
    """A return to the best state.

    Attributes:
        step: after how many steps the run diverged.
        back_to: after how many steps the best state was.
        factor: what learning rates are multiplied by from there on.
        reason: what showed that the run diverged.
    """

    step: int
    back_to: int
    factor: float
    reason: str

    def __str__(self) -> str:
        """A sentence without its period."""
        where = f"the state after step {self.back_to}" if self.back_to else "the start"
        return f"{self.reason}: back to {where}, learning rates times {self.factor:g}"


class Retreats:
    """Watches the loss and the held-back error.

    Args:
        error: the held-back error at the start.
        losses: the losses of some batches at the start.
    """

    def __init__(self, error: float, losses: Sequence[float]) -> None:
        self.all: list[Retreat] = []
        self._error, self._loss = error, float(np.mean(losses))

    @property
    def factor(self) -> float:
        """What learning rates are multiplied by."""
        return self.all[-1].factor if self.all else 1.0

    @property
    def exhausted(self) -> bool:
        """Whether rates have been lowered as often as they may be."""
        return len(self.all) >= _MOST

    def reason(self, done: int, losses: Sequence[float], error: float | None) -> str:
        """Returns why the run diverges; "" where it does not.

        Args:
            done: how many steps were taken.
            losses: the loss of each.
            error: the held-back error after them; None where it was not evaluated.
        """
        if error is not None and error > _WORSE * self._error:
            return f"after step {done} the held-back error is {error:.3g}, at the start {self._error:.3g}"
        since = self.all[-1].step if self.all else 0
        if done - since < _LONG:
            return ""
        # The first loss counts too: kept BatchNorms use the statistics of the batch in a step.
        before, now = max(self._loss, losses[0]), float(np.mean(losses[done - _LONG : done]))
        if now <= _WORSE * before:
            return ""
        return f"up to step {done} the mean loss of {_LONG} steps is {now:.3g}, at the start {before:.3g}"

    def retreat(self, step: int, back_to: int, reason: str) -> Retreat:
        """Takes note of a return to the best state, and returns it."""
        self.all.append(Retreat(step, back_to, self.factor * _SLOWER, reason))
        return self.all[-1]

    def state_dict(self) -> dict[str, np.ndarray]:
        """All retreats, as arrays."""
        rows = [[r.step, r.back_to, r.factor] for r in self.all]
        reasons = np.frombuffer("\n".join(r.reason for r in self.all).encode(), np.uint8)
        return {"rows": np.array(rows, np.float64).reshape(-1, 3), "reasons": reasons}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        reasons = np.asarray(state["reasons"]).tobytes().decode().split("\n")
        rows = zip(state["rows"], reasons, strict=False)
        self.all = [Retreat(int(step), int(to), float(f), reason) for (step, to, f), reason in rows]
