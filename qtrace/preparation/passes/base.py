"""What every pass returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Left", "PassResult"]


@dataclass(frozen=True)
class Left:
    """Something that looked like work and was left alone.

    Attributes:
        site: its name, most often that of an op's output; "" for the whole graph.
        reason: why it was left, as a clause.
    """

    site: str
    reason: str

    def __str__(self) -> str:
        """The site and the reason in a line."""
        return f"{self.site}: {self.reason}" if self.site else self.reason


@dataclass(frozen=True)
class PassResult:
    """What a pass did to the module that it edited in place.

    Attributes:
        changed: one line for everything that was done.
        left: everything that looked like work but was left alone, with the reason.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, where
            a BatchNorm that is gone said so.
    """

    changed: tuple[str, ...]
    left: tuple[Left, ...] = ()
    norms: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
