"""The result of a pass: its changes, and the candidates that it left unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Left", "PassResult"]


@dataclass(frozen=True)
class Left:
    """A candidate that a pass or an algorithm did not change.

    Attributes:
        site: name of the candidate, most often of an op's output; "" for the whole graph.
        reason: why it was not changed, as a clause.
    """

    site: str
    reason: str

    def __str__(self) -> str:
        """Returns the site and the reason in one line."""
        return f"{self.site}: {self.reason}" if self.site else self.reason


@dataclass(frozen=True)
class PassResult:
    """The changes of a pass to the module that it edited in place.

    Attributes:
        changed: one line for each change.
        left: candidates that the pass did not change, with the reason.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, from
            the BatchNorm that was folded into the layer.
    """

    changed: tuple[str, ...]
    left: tuple[Left, ...] = ()
    norms: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
