"""Searches for the best recipe of a network, as ``qtrace tune`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins.packages import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.tune.pareto import CostLimits
    from qtrace.extras.tune.report import Tuning
    from qtrace.extras.tune.search import TuneSettings
    from qtrace.extras.tune.trials import Trial
    from qtrace.extras.tune.tune import tune

__all__ = ["CostLimits", "Trial", "TuneSettings", "Tuning", "tune"]

load_when_used(
    __name__,
    {
        "qtrace.extras.tune.pareto": "CostLimits",
        "qtrace.extras.tune.report": "Tuning",
        "qtrace.extras.tune.search": "TuneSettings",
        "qtrace.extras.tune.trials": "Trial",
        "qtrace.extras.tune.tune": "tune",
    },
)
