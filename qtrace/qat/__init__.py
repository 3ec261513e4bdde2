"""Helpers for a training loop of one's own: parameter groups, freezing, damped oscillations.

Nothing here is needed to train: a prepared module in the phase ``train`` is an ordinary Module.
"""

from __future__ import annotations

from qtrace.qat.groups import Schedule, cosine, freeze_batchnorm, freeze_ranges, load_state, param_groups
from qtrace.qat.oscillation import Dampening, Oscillations

__all__ = [
    "Dampening",
    "Oscillations",
    "Schedule",
    "cosine",
    "freeze_batchnorm",
    "freeze_ranges",
    "load_state",
    "param_groups",
]
