"""The groups of columns of the nodes at which noise is measured, each relative to its own power."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.graph.types import Node, TracedModule
from qtrace.outputs.counted import noise_weight
from qtrace.outputs.groups import ColumnGroup, find_groups

__all__ = ["EndGroup", "find_end_groups"]


@dataclass(frozen=True)
class EndGroup:
    """Columns of like range of one end.

    Attributes:
        end: the node at which noise is measured.
        columns: its columns.
        power: the sum of their squares in all batches, neither 0 nor infinite, divided by ``weight``.
        weight: how much the noise counts: more than 1 if the values hardly differ between samples; see
            `qtrace.outputs.counted.noise_weight`.
    """

    end: Node
    columns: ColumnGroup
    power: float
    weight: float

    def fill(self, values: np.ndarray, number: float) -> None:
        """Sets the columns of an array that has the end's shape."""
        index: list[Any] = [slice(None)] * values.ndim
        if self.columns.axis is not None:
            index[self.columns.axis] = self.columns.columns
        values[tuple(index)] = number

    def noise(self, exact: np.ndarray, changed: np.ndarray) -> float:
        """Returns the noise of one batch relative to the power of all; infinite for other rows."""
        if exact.shape != changed.shape:
            return math.inf
        error = self.columns.select(changed).astype(np.float64) - self.columns.select(exact)
        return float(np.square(error).sum()) / self.power


def find_end_groups(
    model: TracedModule,
    ends: Sequence[Node],
    exact: Sequence[Mapping[Node, np.ndarray]],
    counts: Sequence[int],
    every_column: bool = False,
) -> tuple[EndGroup, ...]:
    """Finds the groups of all ends whose values are neither 0 everywhere nor infinite.

    Args:
        model: the graph.
        ends: the nodes at which noise is measured.
        exact: for each batch the values of the ends.
        counts: the number of samples of each batch.
        every_column: whether columns that tell nothing count like others.
    """
    values = [[batch[end] for end in ends] for batch in exact]
    groups = []
    for columns in find_groups(model, values, ends=ends, every_column=every_column):
        end = ends[columns.output]
        parts = [columns.select(batch[end]) for batch in exact]
        power = sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)
        if 0 < power < math.inf:
            weight = noise_weight(parts, counts)
            groups.append(EndGroup(end, columns, power / weight, weight))
    return tuple(groups)
