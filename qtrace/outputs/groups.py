"""Finds the groups of columns of each output: by the graph's structure first, else by the values' ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtrace.errors import SHOWN_NAMES
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.interface import read_interface
from qtrace.graph.types import Node, TracedModule
from qtrace.graph.walk import owner
from qtrace.outputs.columns import group_columns, measure_columns
from qtrace.outputs.structure import Parts, find_parts

__all__ = ["ColumnGroup", "find_groups", "output_names"]

_MOST_GROUPS = 8


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of one output whose values have like ranges.

    Attributes:
        output: the place of the output among the graph's outputs.
        label: the name of the output.
        axis: the axis whose indices are the columns; None for the whole output.
        runs: the columns as half-open runs, in order; empty for the whole output.
    """

    output: int
    label: str
    axis: int | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the group is the whole output."""
        return self.axis is None

    @property
    def columns(self) -> np.ndarray:
        """The indices of the columns; empty for the whole output."""
        runs = [np.arange(start, stop) for start, stop in self.runs]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    @property
    def place(self) -> str:
        """The columns in words, such as "columns 4..84"; "" for the whole output."""
        if self.whole:
            return ""
        spans = [str(a) if b == a + 1 else f"{a}..{b - 1}" for a, b in self.runs]
        if len(spans) == 1 and ".." not in spans[0]:
            return f"column {spans[0]}"
        others = f" and {len(spans) - SHOWN_NAMES} more runs" if len(spans) > SHOWN_NAMES + 1 else ""
        shown = spans[:SHOWN_NAMES] if others else spans
        joined = ", ".join(shown) if others or len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
        return f"columns {joined}{others}"

    @property
    def name(self) -> str:
        """The output and the columns, for texts: "out, columns 4..84"."""
        return self.label if self.whole else f"{self.label}, {self.place}"

    def fits(self, value: np.ndarray) -> bool:
        """Returns whether a value has all columns of the group."""
        return self.axis is None or (value.ndim > self.axis and value.shape[self.axis] >= self.runs[-1][1])

    def select(self, value: np.ndarray) -> np.ndarray:
        """Returns the group's columns of a value of its output, with the value's other axes as they are."""
        if self.axis is None:
            return value
        if len(self.runs) == 1:
            index: list[Any] = [slice(None)] * value.ndim
            index[self.axis] = slice(*self.runs[0])
            return value[tuple(index)]
        return np.take(value, self.columns, axis=self.axis)


def find_groups(
    model: TracedModule | None,
    reference: Sequence[Sequence[np.ndarray]],
    *,
    ends: Sequence[Node] | None = None,
    names: Sequence[str] = (),
    every_column: bool = False,
) -> tuple[ColumnGroup, ...]:
    """Finds the groups of columns of each float output.

    The parts that a join puts side by side are the groups. A part that a bounded function makes, such as
    sigmoid or softmax, is never divided: rare classes have small values, and are no group of their own. Where
    the graph says nothing, columns are divided by the ranges of their values, if these are clearly unlike.
    Parts of like range are one group. Columns of a layer that tell nothing in float32, because they are
    constant or far too small, are with the largest ones.

    Args:
        model: the graph, in float, prepared or converted; None to look only at the values.
        reference: for each batch the float values of every output.
        ends: the nodes whose values ``reference`` has, in order; None for the outputs of ``model``.
        names: the names of the outputs for texts; () for the names in the file of an imported graph,
            or of the nodes.
        every_column: whether columns that tell nothing count like others.

    Returns:
        The groups of the first output, of the second, and so on. Every output has at least one.
    """
    count = len(reference[0]) if reference else 0
    parts: Sequence[Parts | None] = [None] * count
    if model is not None:
        nodes = list(model.graph.outputs) if ends is None else list(ends)
        names = names or (_file_names(model) if ends is None else ()) or output_names(nodes)
        if len(nodes) == count:
            parts = find_parts(model, nodes)
    if every_column:
        parts = [part and replace(part, sums=frozenset()) for part in parts]
    groups: list[ColumnGroup] = []
    for index in range(count):
        label = names[index] if index < len(names) else f"output {index}"
        groups += _groups_of_output(index, label, [batch[index] for batch in reference], parts[index])
    return tuple(groups)


def _file_names(model: TracedModule) -> list[str]:
    interface = read_interface(model)
    return [] if interface is None else [tensor.name for tensor in interface.outputs]


def output_names(nodes: Sequence[Node]) -> list[str]:
    """Returns the names of nodes before a fake quant; a repeated name is numbered."""
    names = [_unrounded(node).name for node in nodes]
    return [f"{n}_{c}" if (c := names[:i].count(n) + 1) > 1 else n for i, n in enumerate(names)]


def _unrounded(node: Node) -> Node:
    """Returns the node that a fake quant rounds to ``node``, or ``node``."""
    return node.expr.inputs[1] if isinstance(owner(node.expr), FakeQuant) else node


def _groups_of_output(
    index: int, label: str, values: Sequence[np.ndarray], parts: Parts | None
) -> list[ColumnGroup]:
    """Returns the groups along the axis that separates the ranges best; one group if none does."""
    best: tuple[float, int, list[np.ndarray]] | None = None
    for axis in _candidate_axes(values):
        measured = measure_columns(values, axis) if axis > 0 or parts is not None else None
        if measured is None:
            continue
        layout = None if parts is None else parts.along(axis, measured.count)
        if axis == 0 and layout is None:
            continue
        ratio, columns = group_columns(measured, layout)
        if 2 <= len(columns) <= _MOST_GROUPS and (best is None or ratio > 1.5 * best[0]):
            best = ratio, axis, columns
    if best is None:
        return [ColumnGroup(index, label)]
    return [ColumnGroup(index, label, best[1], _runs(columns)) for columns in best[2]]


def _candidate_axes(values: Sequence[np.ndarray]) -> list[int]:
    """Returns the axes whose indices may be columns: the last one, the channel axis, then the others.

    Axis 0 is the last candidate: it has columns only where a join without an axis of samples made them.
    """
    ranks = {value.ndim for value in values}
    if len(ranks) != 1 or any(value.dtype.kind != "f" for value in values):
        return []
    (rank,) = ranks
    axes = dict.fromkeys([rank - 1, 1, *range(2, rank - 1), 0] if rank >= 2 else range(rank))
    return [axis for axis in axes if len({value.shape[axis] for value in values}) == 1]


def _runs(columns: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns sorted indices as half-open runs."""
    breaks = np.flatnonzero(np.diff(columns) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(columns, breaks))
