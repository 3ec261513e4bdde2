"""What every pass returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["PassResult"]


@dataclass(frozen=True)
class PassResult:
    """What a pass did to the module that it edited in place.

    Attributes:
        changed: one line for everything that was done.
        left: one line, with the reason, for everything that looked like work but was left alone.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, where
            a BatchNorm that is gone said so.
    """

    changed: tuple[str, ...]
    left: tuple[str, ...] = ()
    norms: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
