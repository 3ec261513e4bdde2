"""A rounding that is given: the grid of a tensor, and the module that marks it in a traced graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

__all__ = ["FileRounding", "StoredGrid"]


@dataclass(frozen=True, eq=False)
class StoredGrid:
    """The integers that a tensor is rounded to, and the numbers that they stand for.

    Attributes:
        label: the name of the tensor in its file, for messages.
        kind: numpy name of the integer type, such as ``uint8``.
        scale: float32 of shape ``()`` or ``(channels,)``.
        zero_point: integers of the shape of ``scale``.
        integers: the stored integers of a parameter; None for an activation.
    """

    label: str
    kind: str
    scale: np.ndarray
    zero_point: np.ndarray
    integers: np.ndarray | None = None

    def equals(self, other: StoredGrid, factor: float = 1.0) -> bool:
        """Returns whether both have the same type, zero point and, times ``factor``, the same scale.

        Args:
            other: another grid.
            factor: the factor of the scale of ``other``.
        """
        return (
            self.kind == other.kind
            and np.array_equal(self.zero_point, other.zero_point)
            and np.array_equal(self.scale, other.scale * np.float32(factor))
        )


class FileRounding(Module):
    """Marks in a traced graph that a file rounds the value here; it passes the value on.

    Args:
        grid: the grid of the value.
    """

    def __init__(self, grid: StoredGrid) -> None:
        super().__init__()
        self.label, self.kind = grid.label, grid.kind
        self.scales = grid.scale.tolist()
        self.zero_points = grid.zero_point.tolist()

    @property
    def grid(self) -> StoredGrid:
        """The grid of the value."""
        scale, zero = np.asarray(self.scales, np.float32), np.asarray(self.zero_points, np.int64)
        return StoredGrid(self.label, self.kind, scale, zero)

    def forward(self, x: Tensor) -> Any:
        """Returns ``x``."""
        return x
