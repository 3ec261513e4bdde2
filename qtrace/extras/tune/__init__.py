"""Searches for the best recipe of a network, as ``qtrace tune`` does.

``search.py`` proposes the next trial only from the seed and the finished trials, so that a killed search
resumes to the same result. ``judge.py`` measures a recipe, in this process or in workers. ``trials.py``
appends a line for each. The search is a seeded one of our own, not a library's. A trial takes seconds to
minutes, so there are tens of them, and a library's sampler has a state that resuming would have to restore
bit for bit. Models of the space pay off with hundreds of trials. What pays off with tens is to begin with
what the diagnosis says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.tune.search import TuneSettings
    from qtrace.extras.tune.trials import CostLimits, Trial
    from qtrace.extras.tune.tune import TuneOptions, Tuning, tune

load_when_used(
    __name__,
    {
        "qtrace.extras.tune.search": "TuneSettings",
        "qtrace.extras.tune.trials": "CostLimits Trial",
        "qtrace.extras.tune.tune": "TuneOptions Tuning tune",
    },
)
