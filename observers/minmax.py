"""The smallest and the largest value observed."""

from __future__ import annotations

import numpy as np

from qtrace.observers.base import Layout, Observer, State

__all__ = ["MinMax"]


class MinMax(Observer):
    """The range from the smallest to the largest value: nothing clips. Suits weights."""

    def _layout(self) -> Layout:
        return {"lo": (np.float32, ("C",)), "hi": (np.float32, ("C",))}

    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        return {"lo": lo, "hi": hi}

    def _combine(self, first: State, second: State) -> State:
        return {"lo": np.minimum(first["lo"], second["lo"]), "hi": np.maximum(first["hi"], second["hi"])}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        return state["lo"], state["hi"]
