"""Finds the groups of columns of each output: by the graph's structure first, else by the values' ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtrace.comparing.structure import Layout, Parts, find_parts
from qtrace.errors import SHOWN_NAMES
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.interface import read_interface
from qtrace.graph.types import Node, TracedModule
from qtrace.graph.walk import owner

_UNLIKE = 16.0
"""Ranges are unlike from this ratio on: the smaller one keeps at most 4 of 8 bits on a common grid."""
LEAST_VALUES = 4
"""The number of values of a column from which its range is known: columns with fewer are not divided."""
_MOST_COLUMNS = 4096  # more are positions, as in a sound, of which some are silent
_SOME_COLUMNS = 8  # or groups of columns, up to which each may be a quantity of its own
_HEAD_COLUMNS = 64  # up to which they may be, where the smallest range is lost on the grid of the largest
_LAST_PLACE = float(np.finfo(np.float32).eps)
_SMALLEST = float(np.finfo(np.float32).tiny)
_LOST = 256.0  # the ratio of ranges from which a column has less than one of 256 levels


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
        if 2 <= len(columns) <= _SOME_COLUMNS and (best is None or ratio > 1.5 * best[0]):
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


@dataclass(frozen=True)
class Columns:
    """The ends of each column's values, over samples and positions of all batches.

    Attributes:
        low, high: the smallest and the largest finite value; both 0 without one.
        values: the number of values of each column.
    """

    low: np.ndarray
    high: np.ndarray
    values: int

    @property
    def count(self) -> int:
        """The number of columns."""
        return len(self.low)

    @property
    def largest(self) -> np.ndarray:
        """The largest magnitude of each column."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def tells_nothing(self, members: np.ndarray) -> np.ndarray:
        """Returns which of the columns ``members`` of one layer carry no information in float32.

        They are constant but for the rounding of the sum that computes them, one unit in the last place up or
        down, as where a BatchNorm has switched a channel off and left its bias. Or they are one of many and
        below half a unit of the largest column. What a layer, whose columns are sums of the same values with
        weights that are trained alike, gives in this size is what weight decay has left of a channel. Every
        sum with another column rounds it away. If an op in the graph scales it up, the columns after that op
        count instead. Of a few columns each may be a quantity of its own, whatever its unit. A constant
        beyond all other columns counts: their noise would vanish next to it.
        """
        largest, spans = self.largest[members], (self.high - self.low)[members]
        constant = spans <= 2 * _LAST_PLACE * largest  # from one unit below to one above
        small = largest <= spans[~constant].max(initial=0.0)
        tiny = 0.5 * _LAST_PLACE * largest.max(initial=0.0) if len(members) > _SOME_COLUMNS else _SMALLEST
        return (constant & small) | (largest <= tiny)

    @property
    def levels(self) -> np.ndarray:
        """The size of each column's range; the magnitude where it is constant or has few values."""
        spans = self.high - self.low
        return np.where((spans > 0) & (self.values >= LEAST_VALUES), spans, self.largest)


@dataclass(frozen=True)
class _Atom:
    """Columns that stay together: their indices and the size of their range."""

    columns: np.ndarray
    level: float


def measure_columns(values: Sequence[np.ndarray], axis: int) -> Columns | None:
    """Measures the columns of one output along an axis; None where there are no two columns.

    Args:
        values: the output's values in each batch, of equal size along the axis.
        axis: the axis.
    """
    lows, highs, count = [], [], 0
    for value in values:
        if value.shape[axis] < 2:
            return None
        if not value.size:
            continue
        others = tuple(i for i in range(value.ndim) if i != axis)
        if np.isfinite(value).all():
            lows.append(value.min(axis=others))
            highs.append(value.max(axis=others))
        else:
            finite = np.isfinite(value)
            lows.append(np.where(finite, value, np.inf).min(axis=others))
            highs.append(np.where(finite, value, -np.inf).max(axis=others))
        count += value.size // value.shape[axis]
    if not lows:
        return None
    low, high = np.min(lows, axis=0).astype(np.float64), np.max(highs, axis=0).astype(np.float64)
    unseen = ~(np.isfinite(low) & np.isfinite(high))
    return Columns(np.where(unseen, 0.0, low), np.where(unseen, 0.0, high), count)


def group_columns(columns: Columns, layout: Layout | None) -> tuple[float, list[np.ndarray]]:
    """Puts columns of like range together.

    Args:
        columns: the columns of one axis.
        layout: what the graph says about them; None for nothing.

    Returns:
        The ratio of the largest to the smallest level, and the sorted columns of each group, in the order of
        their first columns.
    """
    atoms = _atoms(columns, layout)
    levels = [atom.level for atom in atoms if atom.level > 0]
    if not levels:
        return 1.0, [np.arange(columns.count)]
    groups: list[list[_Atom]] = []
    for atom in sorted(atoms, key=lambda a: (-a.level, int(a.columns[0]))):
        if not groups or (atom.level > 0 and groups[-1][0].level >= _UNLIKE * atom.level):
            groups.append([])
        groups[-1 if atom.level > 0 else 0].append(
            atom
        )  # a column of zeros loses nothing: it is with the largest
    joined = [np.sort(np.concatenate([atom.columns for atom in group])) for group in groups]
    return max(levels) / min(levels), sorted(joined, key=lambda g: int(g[0]))


def _atoms(columns: Columns, layout: Layout | None) -> list[_Atom]:
    parts = np.zeros(columns.count, np.int64) if layout is None else layout.parts
    bounded = frozenset() if layout is None else layout.bounded
    unit = frozenset() if layout is None else layout.unit
    atoms = []
    united = np.flatnonzero(np.isin(parts, list(unit)))
    if united.size:
        atoms.append(_Atom(united, float(columns.largest[united].max())))
    for part in dict.fromkeys(parts.tolist()):
        if part in unit:
            continue
        members = np.flatnonzero(parts == part)
        if part in bounded:
            atoms.append(_Atom(members, float(columns.largest[members].max())))
        else:
            atoms += _divide(columns, members, layout is not None and part in layout.sums)
    return atoms


def _divide(columns: Columns, members: np.ndarray, sums: bool) -> list[_Atom]:
    """Divides the columns of one part by their ranges, if these are clearly unlike.

    Args:
        columns: the columns of one axis.
        members: the indices of the part's columns.
        sums: whether a layer computes all of them as sums of the same values.
    """
    levels = columns.levels[members].copy()
    whole = [_Atom(members, float(levels.max()))]
    if columns.values < LEAST_VALUES or not 2 <= len(members) <= _MOST_COLUMNS:
        return whole
    shares = (columns.low[members] >= 0) & (columns.high[members] <= 1)
    if shares.any():  # scores, of which rare classes have small ones
        levels[shares] = levels[shares].max()
    if sums:
        levels[columns.tells_nothing(members)] = 0.0
    positive = levels > 0
    if positive.sum() < 2:
        return whole
    order = np.argsort(-levels[positive], kind="stable")
    indices, ordered = members[positive][order], levels[positive][order]
    cuts = _cuts(ordered)
    atoms = [
        _Atom(np.sort(indices[a:b]), float(ordered[a]))
        for a, b in zip([0, *cuts], [*cuts, len(ordered)], strict=True)
    ]
    zeros = members[~positive]
    return [*atoms, _Atom(zeros, 0.0)] if zeros.size else atoms


def _cuts(levels: np.ndarray) -> list[int]:
    """Returns where to cut levels that fall: at gaps between clusters, or into spans if there are few."""
    ratios = levels[:-1] / levels[1:]
    cuts = [int(i) + 1 for i in np.flatnonzero(ratios >= _UNLIKE)]
    ends = zip([0, *cuts], [*cuts, len(levels)], strict=True)
    if all(levels[a] < _UNLIKE * levels[b - 1] for a, b in ends):
        return cuts
    if len(levels) > _SOME_COLUMNS:
        lost = len(levels) <= _HEAD_COLUMNS and levels[0] >= _LOST * levels[-1]
        return _fill_spans(levels) if lost else []  # ranges of all sizes, as the channels of features have
    return _divide_spans(levels, 0, len(levels))


def _fill_spans(levels: np.ndarray) -> list[int]:
    """Cuts where a level is unlike the first one of its span: the fewest spans."""
    cuts, first = [], levels[0]
    for index, level in enumerate(levels):
        if first >= _UNLIKE * level:
            cuts.append(index)
            first = level
    return cuts


def _divide_spans(levels: np.ndarray, start: int, stop: int) -> list[int]:
    """Cuts at the widest gap until no span is unlike within."""
    if levels[start] < _UNLIKE * levels[stop - 1]:
        return []
    cut = start + 1 + int(np.argmax(levels[start : stop - 1] / levels[start + 1 : stop]))
    return [*_divide_spans(levels, start, cut), cut, *_divide_spans(levels, cut, stop)]
